"""Make a cut ready: tune it, or restore it from a checkpoint, and predict what memory it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, final

from pydantic import TypeAdapter

from trainer.assemble.checks import check_parts, check_sums
from trainer.assemble.components import Components
from trainer.assemble.reads import check_reads
from trainer.assemble.trials import Trials
from trainer.assemble.tuning import (
    device_cost,
    memory_of_rank,
    padded_workload,
    predict_sampled,
    tune_run,
    workload_of,
)
from trainer.core.errors import NoCheckpointError
from trainer.core.out_of_memory import begin_peak
from trainer.models.recompute import checkpoint_blocks
from trainer.plan.cut import Cost, Cut, IntArray, Plan
from trainer.training.model_flops import ModelFlops
from trainer.tune.flops import ComputeCounts, peak_flops
from trainer.tune.speed import speed_of
from trainer.tune.tensors import MemoryEstimate
from trainer.tune.tuning import Tuning

_CUT_BY = {"target", "params"}  # what of `accum` a checkpoint's cut belongs to
SAMPLED_STEPS = 8  # global batches of the first epoch, for tuning and the plan's means


@final
@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run that knows how to cut."""

    components: Components
    cut: Cut
    plans: tuple[Plan, ...]  # of sampled global batches, that of the first step first
    tuning: Tuning | None  # what `accum=auto` found; None under another cut
    predicted: MemoryEstimate | None  # peak of a step; None where it cannot be predicted
    limit_bytes: int | None  # what is left for tensors on this rank; None where nobody knows
    # Of the model, for the ranks of a run; None where they cannot be counted
    flops: ModelFlops | None
    how: str  # how the cap was found, or why it is as it is
    is_here: bool  # whether the plan is for this machine; time is unknown for any other
    warnings: tuple[str, ...]  # what showed when the user's own model and objective ran
    trials: Trials  # what the model showed on fake tensors

    @property
    def step_seconds(self) -> float | None:
        """The time of a step that tuning, or a card's data sheet, predicts; None where neither."""
        layout = self.components.layout
        if not self.is_here and layout.cost.seconds_per_token is not None:
            speed = speed_of(layout.cost)
            return fmean(speed.step_seconds(p, lockstep=layout.lockstep) for p in self.plans)
        rows = () if self.tuning is None else self.tuning.candidates
        return next((row.seconds_per_step for row in rows if row.chosen), None)


def prepare_on_main(components: Components, saved: Mapping[str, Any] | None = None) -> RunPlan:
    """Find the cut of a run on the main rank, and give every rank the same. Collective."""
    found: list[RunPlan] = []

    def find() -> dict[str, Any]:
        found.append(prepare(components, saved))
        return {
            "cut": describe_cut(found[0]),
            "trials": asdict(replace(found[0].trials, counts=None)),
        }

    answer = components.world.on_main(find)
    return found[0] if found else prepare(components, answer["cut"], Trials(**answer["trials"]))


def prepare(
    components: Components, saved: Mapping[str, Any] | None = None, trials: Trials | None = None
) -> RunPlan:
    """Find the cut of a run.

    `saved` is `describe_cut` of a run that is resumed; it counts while `accum` is unchanged, so
    that a resumed `auto` cuts as before, and every evaluation sums in the same order. `trials` are
    those of the main rank; without them they run here.

    Raises:
        CannotRunFake: the model was built without weights, and needs more than shapes.
        Preempted: a signal ended the tuning.
        TrainError: a part of the run does not do what it must, or nothing fits in memory.
    """
    check_parts(components)
    work = workload_of(components)
    trials = trials or Trials.run(components, padded_workload(components, work))
    trials.apply(components)
    components = _with_cost(components, trials.counts, saved)
    limit, is_here = memory_of_rank(components, work.resident_bytes)
    batches, known = _sampled(components), _restored(components, saved)
    cut, tuning, how = components.cut, None, f"{type(components.cut).__name__}, as typed"
    if known is not None:
        cut, tuning, how = *known, "as before, from the checkpoint"
    elif cut.needs_tuning:
        assert limit is not None  # a machine that is not here has what accum.memory says
        tuning = tune_run(components, work, trials.counts, limit, batches, is_here=is_here)
        cut, how = (
            cut.tuned(tuning.max_tokens, tuning.cost, tuning.single_sample_cap),
            tuning.method,
        )
    if tuning is not None and tuning.activation_checkpointing:
        checkpoint_blocks(components.module)  # again where it was typed, which changes nothing
    plans = tuple(cut.cut(lengths, components.layout) for lengths in batches)
    for plan in plans:
        plan.check(components.layout)
    tokens = max(plan.max_positions for plan in plans)
    if known is not None and saved is not None:
        tokens = saved["evaluation_tokens"]
    predicted, warnings = tuning and tuning.predicted, list[str]()
    if components.world.is_main:
        if tuning is None:
            predicted = predict_sampled(components, work, trials.counts, plans, warnings)
        warnings += [*check_sums(components), *check_reads(components)]
    begin_peak(components.world.device)
    return RunPlan(
        # Held-out data have a cap of their own: what training's largest micro-batch fits in.
        components=replace(
            components,
            parallel=components.parallel.counted(fmean(plan.accum_steps for plan in plans)),
            held_out=components.held_out and replace(components.held_out, max_tokens=tokens),
        ),
        cut=cut,
        plans=plans,
        tuning=tuning,
        predicted=predicted,
        limit_bytes=tuning.limit_bytes if tuning is not None else limit and limit.bytes,
        flops=_model_flops(components, trials.counts),
        how=how,
        is_here=is_here,
        warnings=tuple(warnings),
        trials=trials,
    )


def _with_cost(
    components: Components, counts: ComputeCounts | None, saved: Mapping[str, Any] | None
) -> Components:
    """Give every cut the time model that the run began with, or that of the device.

    `accum=auto` times its own where it can.
    """
    cost = device_cost(components, counts)
    if saved is not None and saved["accum"] == components.config.accum.model_dump(include=_CUT_BY):
        cost = Cost(**saved["cost"])
    return replace(components, layout=replace(components.layout, cost=cost))


def describe_cut(run_plan: RunPlan) -> dict[str, Any]:
    """Give what a resumed run needs to cut and to reduce as this one does, as JSON."""
    components, setup = run_plan.components, run_plan.components.parallel
    return {
        "accum": components.config.accum.model_dump(include=_CUT_BY),
        "cost": asdict(components.layout.cost),
        "state": asdict(run_plan.cut),
        "tuning": run_plan.tuning and asdict(run_plan.tuning),
        "evaluation_tokens": components.held_out.max_tokens if components.held_out else 1,
        "sync": [setup.mode, components.world.size, setup.sync.name] if setup.is_open else None,
    }


def _restored(
    components: Components, saved: Mapping[str, Any] | None
) -> tuple[Cut, Tuning | None] | None:
    """Give the cut of a checkpoint, and what tuning had found; None where `accum` is another."""
    if saved is None or saved["accum"] != components.config.accum.model_dump(include=_CUT_BY):
        return None
    state, tuning = dict(saved["state"]), TypeAdapter(Tuning | None)
    try:
        if state.get("cost") is not None:
            state["cost"] = Cost(**state["cost"])
        return replace(components.cut, **state), tuning.validate_python(saved["tuning"])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise NoCheckpointError(
            f"checkpoint has an invalid micro-batch plan ({error!r:.80}): start a new run with "
            "init="
        ) from error


def _sampled(components: Components) -> list[IntArray]:
    """Take the lengths behind the first few steps of the first epoch."""
    order, batches = components.source.order, list[IntArray]()
    cursor = order.start
    while cursor.epoch == 0 and len(batches) < min(SAMPLED_STEPS, max(1, components.total_steps)):
        samples = order.next(cursor)
        cursor = samples.after
        batches.append(components.source.lengths[samples.ids])
    if not order.sizes.is_constant:  # a later step may need more memory
        batches.append(components.source.lengths[order.largest_batch()])
    return batches


def _model_flops(components: Components, counts: ComputeCounts | None) -> ModelFlops | None:
    """Give what the main rank reports of speed; None where nothing could be counted."""
    if counts is None or not components.world.is_main:
        return None
    peak = peak_flops(components.world.device, components.precision)
    return ModelFlops(
        per_token=counts.products,
        per_pair=counts.pairs,
        peak=peak and peak * components.world.size,
    )
