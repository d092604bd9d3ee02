"""Make a cut ready: tune it, or restore it from a checkpoint, and predict what memory it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, final

from trainer.assemble.checks import check_loss, check_parts
from trainer.assemble.components import Components
from trainer.assemble.counts import count_run, unread_fields
from trainer.assemble.noise import noise_every
from trainer.assemble.saved import SavedCut, accum_of
from trainer.assemble.stages import later_batches
from trainer.assemble.tuning import (
    device_cost,
    memory_of_rank,
    predict_sampled,
    tune_run,
    workload_of,
)
from trainer.core.out_of_memory import begin_peak
from trainer.models.recompute import checkpoint_blocks
from trainer.plan.cut import IntArray, Plan
from trainer.training.model_flops import ModelFlops
from trainer.tune.flops import ComputeCounts, peak_flops
from trainer.tune.request import Tuning
from trainer.tune.speed import speed_of
from trainer.tune.tensors import MemoryEstimate

SAMPLED_STEPS = 8  # global batches of the first epoch, for tuning and the plan's means


@final
@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run that knows how to cut."""

    components: Components
    plans: tuple[Plan, ...]  # of sampled global batches, that of the first step first
    tuning: Tuning | None  # what `accum=auto` found; None under another cut
    predicted: MemoryEstimate | None  # peak of a step; None where it cannot be predicted
    limit_bytes: int | None  # what is left for tensors on this rank; None where nobody knows
    how: str  # how the cap was found, or why it is as it is
    is_here: bool  # whether the plan is for this machine; time is unknown for any other
    warnings: tuple[str, ...]  # what showed when the user's own model and objective ran
    # What the longest samples compute; None where the model cannot run fake
    counts: ComputeCounts | None

    @property
    def saved_cut(self) -> SavedCut:
        """What a resumed run needs to cut as this one does."""
        components = self.components
        return SavedCut(
            accum=accum_of(components.config),
            cost=components.layout.cost,
            settings=asdict(components.cut),
            tuning=self.tuning,
            evaluation_tokens=max((h.max_tokens for h in components.held_out.values()), default=1),
        )

    @property
    def flops(self) -> ModelFlops | None:
        """What the main rank reports of speed; None where nothing could be counted."""
        components, counts = self.components, self.counts
        if counts is None or not components.world.is_main:
            return None
        peak = peak_flops(components.world.device, components.precision)
        return ModelFlops(
            per_token=counts.products,
            per_pair=counts.pairs,
            peak=peak and peak * components.world.size,
        )

    @property
    def step_seconds(self) -> float | None:
        """The time of a step that tuning, or a card's data sheet, predicts; None where neither."""
        layout = self.components.layout
        if not self.is_here and layout.cost.seconds_per_token is not None:
            speed = speed_of(layout.cost)
            return fmean(speed.step_seconds(p, lockstep=layout.lockstep) for p in self.plans)
        rows = () if self.tuning is None else self.tuning.candidates
        return next((row.seconds_per_step for row in rows if row.chosen), None)


def prepare_on_main(components: Components, saved: SavedCut | None = None) -> RunPlan:
    """Find the cut of a run on the main rank, and give every rank the same. Collective."""
    found: list[RunPlan] = []

    def find() -> dict[str, Any]:
        found.append(prepare(components, saved))
        counts = found[0].counts
        return {"cut": found[0].saved_cut.state(), "counts": counts and asdict(counts)}

    answer = components.world.on_main(find)
    return found[0] if found else prepare(components, main=answer)


def prepare(
    components: Components, saved: SavedCut | None = None, main: Mapping[str, Any] | None = None
) -> RunPlan:
    """Find the cut of a run.

    `saved` is of a run that is resumed; it counts while `accum` is unchanged, so that a resumed
    `auto` cuts as before, and every evaluation sums in the same order. `main` is what the main
    rank found, which the others take over.

    Raises:
        CannotRunFake: the model was built without weights, and needs more than shapes.
        Preempted: a signal ended the tuning.
        TrainError: a part of the run does not do what it must, or nothing fits in memory.
    """
    check_parts(components)
    warnings = check_loss(components) if components.world.is_main else []

    # What a rank computes, and the memory that it has.
    saved = SavedCut(**main["cut"]) if main else saved or SavedCut()
    work = workload_of(components)
    counts = count_run(components, work, main)
    is_known = saved.belongs_to(components.config)
    # Every cut has the time model that the run began with; `accum=auto` times its own if it can.
    cost = saved.cost if is_known else device_cost(components, counts)
    components = replace(components, layout=replace(components.layout, cost=cost))
    limit, is_here = memory_of_rank(components, work.resident_bytes)

    # The cut: as it was, as it is tuned, or as it was typed.
    batches = _sampled(components)
    cut, tuning, how = components.cut, None, f"{type(components.cut).__name__}, as typed"
    if is_known:
        cut, tuning, how = saved.restored(cut), saved.tuning, "as before, from the checkpoint"
    elif cut.needs_tuning:
        assert limit is not None  # a machine that is not here has what accum.memory says
        tuning = tune_run(components, work, counts, limit, batches, is_here=is_here)
        cut = cut.tuned(tuning.max_tokens, tuning.cost, tuning.single_sample_cap)
        how = tuning.method
    if tuning is not None and tuning.activation_checkpointing:
        checkpoint_blocks(components.module)  # again where it was typed, which changes nothing

    # What it makes of a few steps, and the memory that those take.
    plans = tuple(cut.cut(lengths, components.layout) for lengths in batches)
    for plan in plans:
        plan.check(components.layout)
    tokens = saved.evaluation_tokens if is_known else max(plan.max_positions for plan in plans)
    predicted = tuning and tuning.predicted
    if components.world.is_main:
        if tuning is None:
            predicted = predict_sampled(components, work, counts, plans, warnings)
        warnings += unread_fields(components, counts)
    begin_peak(components.world.device)
    return RunPlan(
        # Held-out data have a cap of their own: what training's largest micro-batch fits in.
        components=replace(
            components,
            cut=cut,
            noise_every=noise_every(components, cut, tuning, plans),
            parallel=components.parallel.counted(fmean(plan.accum_steps for plan in plans)),
            held_out={
                name: replace(each, max_tokens=tokens) for name, each in components.held_out.items()
            },
        ),
        plans=plans,
        tuning=tuning,
        predicted=predicted,
        limit_bytes=tuning.limit_bytes if tuning is not None else limit and limit.bytes,
        how=how,
        is_here=is_here,
        warnings=tuple(warnings),
        counts=counts,
    )


def _sampled(components: Components) -> list[IntArray]:
    """Take the lengths behind the first few steps of the first epoch."""
    order, batches = components.source.order, list[IntArray]()
    cursor = order.start
    while cursor.epoch == 0 and len(batches) < min(SAMPLED_STEPS, max(1, components.total_steps)):
        samples = order.next(cursor)
        cursor = samples.after
        batches.append(components.source.lengths[samples.ids])
    return [*batches, *later_batches(components)]  # which may need more memory
