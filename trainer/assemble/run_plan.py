"""Make a cut ready: tune it, or restore it from a checkpoint, and predict what memory it needs."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, final

import torch
from pydantic import TypeAdapter

from trainer.accumulate.sum import Sum
from trainer.assemble.checks import check_parts, check_sums
from trainer.assemble.components import Components, bind_run
from trainer.assemble.packing import unpacked
from trainer.assemble.parallel import planned_device, rank_memory
from trainer.assemble.peak import open_cache, predict_sampled
from trainer.assemble.reads import check_reads
from trainer.assemble.trials import Trials
from trainer.config.cards import card_of, reported_as
from trainer.core.errors import DataError, NoCheckpointError
from trainer.core.micro_batch import Fields
from trainer.core.signals import check
from trainer.data.loader import Request
from trainer.models.boundaries import BOUNDARIES
from trainer.models.first_weights import is_on_meta
from trainer.models.recompute import blocks_of, checkpoint_blocks
from trainer.plan.cut import Cost, Cut, IntArray, Plan
from trainer.plan.cuts import Auto
from trainer.plan.traffic import MOST_OF_MEMORY, ComputeTime
from trainer.training.batches import PREFETCH_LIMIT_BYTES
from trainer.tune.flops import ModelFlops, model_flops, peak_flops
from trainer.tune.forward import Forward, card_cost
from trainer.tune.memory_limit import MemoryLimit, begin_peak
from trainer.tune.speed import meter_for, speed_of
from trainer.tune.tensors import MemoryEstimate
from trainer.tune.tuner import tune
from trainer.tune.tuning import NEAR_BEST_TOKENS, Tuning, TuningRequest
from trainer.tune.workload import Tiled, Workload, measured_dims

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
            "trials": asdict(replace(found[0].trials, forward=None)),
        }

    answer = components.world.on_main(find)
    return found[0] if found else prepare(components, answer["cut"], Trials(**answer["trials"]))


def choose_sync(run_plan: RunPlan, saved: Mapping[str, Any] | None = None) -> RunPlan:
    """Weigh the sync policies with what the plan and the network cost. Collective.

    `run_plan` is the plan under the policy so far; `saved` as for `prepare`. What `sync=auto` took
    stays on the same ranks: after a cut was lowered it would be another policy, of other bits.
    """
    components, seconds = run_plan.components, run_plan.step_seconds
    count = fmean(plan.accum_steps for plan in run_plan.plans)
    is_gpu = planned_device(components.config, components.world).type == "cuda"
    # Of a model that is compiled as a whole, all gradients come at the end.
    in_parts = not components.config.compile or bool(blocks_of(components.module))
    # What is measured differs from run to run, and buckets in another order round otherwise.
    is_plain = (
        isinstance(components.strategy, Sum) and in_parts and not components.config.deterministic
    )
    work = ComputeTime(
        micro_batches=count,
        seconds=None if seconds is None else seconds / count,
        overlaps=is_gpu,
        overlaps_backward=is_gpu and is_plain,
        scatters_whole=not is_gpu,
    )
    *layout, begun = (saved or {}).get("sync") or (None,)
    begun = begun if layout == [components.parallel.mode, components.world.size] else None
    setup = components.parallel.weighed(work, components.parallel.network, begun)
    lockstep = setup.sync.lockstep and components.world.size > 1
    changed = replace(
        components, parallel=setup, layout=replace(components.layout, lockstep=lockstep)
    )
    if lockstep != components.layout.lockstep:
        return prepare_on_main(changed, saved)
    return replace(run_plan, components=changed)


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
    work = _workload(components)
    trials = trials or Trials.run(components, work)
    trials.apply(components)
    forward = trials.forward
    components = _with_cost(components, forward, saved)
    limit, is_here = _limit_of(components, work.resident_bytes)
    batches, known = _sampled(components), _restored(components, saved)
    cut, tuning, how = components.cut, None, f"{type(components.cut).__name__}, as typed"
    if known is not None:
        cut, tuning, how = *known, "as before, from the checkpoint"
    elif isinstance(cut, Auto):
        assert limit is not None  # a machine that is not here has what accum.memory says
        tuning = _tune(components, cut, work, forward, limit, batches, is_here=is_here)
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
            predicted = predict_sampled(components, work, forward, plans, warnings)
        warnings += [*check_sums(components), *check_reads(components)]
    begin_peak(components.world.device)
    return RunPlan(
        # Held-out data have a cap of their own: what training's largest micro-batch fits in.
        components=replace(
            components,
            held_out=components.held_out and replace(components.held_out, max_tokens=tokens),
        ),
        cut=cut,
        plans=plans,
        tuning=tuning,
        predicted=predicted,
        limit_bytes=tuning.limit_bytes if tuning is not None else limit and limit.bytes,
        flops=_count_flops(components, work) if components.config.command == "train" else None,
        how=how,
        is_here=is_here,
        warnings=tuple(warnings),
        trials=trials,
    )


def _with_cost(
    components: Components, forward: Forward | None, saved: Mapping[str, Any] | None
) -> Components:
    """Give every cut the time model of the device: what the run began with, or by arithmetic.

    On a CPU it is a constant; `accum=auto` times its own where it can.
    """
    if saved is not None and saved["accum"] == components.config.accum.model_dump(include=_CUT_BY):
        known = saved.get("cost")
        cost = components.layout.cost if known is None else Cost(**known)
    elif planned_device(components.config, components.world).type == "cuda":
        here, named = components.world.device, card_of(components.config.device)
        card = reported_as(torch.cuda.get_device_name(here)) if here.type == "cuda" else named
        cost = card_cost(forward, card, components.precision)
        cost = cost if named else replace(cost, seconds_per_token=None)
    else:
        return components
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
    return batches


def _workload(components: Components) -> Workload:
    """Give what tuning computes: model, loss, optimizer, and micro-batches of any shape."""
    world, setup = components.world, components.parallel
    call_of = partial(bind_run, precision=components.precision, world=world)
    ranks = partial(setup.fake_ranks, world.size, call_of, world.device)
    return Workload(
        model=components.module,
        bind=call_of,
        objective=components.objective,
        make_optimizer=components.make_optimizer,
        make_fields=_tiled(components),
        device=world.device,
        compiled=components.config.compile,
        weights=components.weights,
        sync=setup.sync,
        fake_ranks=ranks if components.is_sharded or setup.mode == "ddp" else None,
    )


def _tiled(components: Components) -> Tiled:
    """Make shapes out of the longest sample; others show which dimensions follow its length."""
    example, lengths, longest = (
        components.example,
        components.source.lengths,
        components.source.lengths.max(),
    )
    is_away = (
        planned_device(components.config, components.world).type != components.world.device.type
    )
    # Without that kernel boundaries are looked at, and a model on the meta device runs fake alone.
    has_kernel = not is_away and (
        not is_on_meta(components.module) or components.world.device.type == "cuda"
    )
    boundaries = inspect.signature(components.module.forward).parameters.get(BOUNDARIES)
    is_optional = boundaries is None or boundaries.default is not boundaries.empty
    if not has_kernel and is_optional and BOUNDARIES in example:
        # The kernel that takes all documents of a packed row at once is a GPU's. Where that is not
        # here, documents side by side, which take as much, stand in for it.
        example = unpacked(example)
    if BOUNDARIES in example:
        return Tiled(example, longest)

    def load(i: int) -> Fields | None:
        # What cannot be read is refused, or passed over, where its step needs it.
        with suppress(DataError):
            return components.source.loader.load(
                Request((i,), 0, int(lengths[i]), components.layout.packed)
            )
        return None

    some = lengths.sample()
    return Tiled(
        example, longest, measured_dims(lengths[some], lambda place: load(int(some[place])))
    )


def _count_flops(components: Components, work: Workload) -> ModelFlops | None:
    """Count the model's FLOPs, on the rank that reports them; documents side by side."""
    if not components.world.is_main:
        return None
    lengths, peak = (
        components.source.lengths,
        peak_flops(components.world.device, components.precision),
    )
    if BOUNDARIES in components.example:
        work = replace(work, make_fields=Tiled(unpacked(components.example), lengths.max()))
    return model_flops(work, lengths.min(), lengths.max(), peak and peak * components.world.size)


def _limit_of(components: Components, resident_bytes: int) -> tuple[MemoryLimit | None, bool]:
    """Find the memory of one rank, and whether it is here, less what inputs take on a CPU.

    Those are the inputs of a step, and of the next where that is loaded ahead; a GPU holds one
    micro-batch of them, which the prediction counts.
    """
    config, world, lengths = components.config, components.world, components.source.lengths
    limit, is_here = rank_memory(config, world, resident_bytes)
    if limit is None or planned_device(config, world).type != "cpu":
        return limit, is_here
    per_token = sum(field.nbytes for field in components.example.values()) / float(lengths.max())
    each = 1.0 if config.batch.unit == "tokens" else float(lengths.mean())
    of_step = int(per_token * each * components.source.order.global_batch / world.size)
    inputs = of_step * (2 if of_step <= PREFETCH_LIMIT_BYTES else 1)
    return replace(limit, bytes=max(0, limit.bytes - inputs), inputs=inputs), is_here


def _tune(
    components: Components,
    cut: Auto,
    work: Workload,
    forward: Forward | None,
    limit: MemoryLimit,
    batches: list[IntArray],
    *,
    is_here: bool,
) -> Tuning:
    """Tune, for a machine that is here, or for one on which nothing can, or may, be timed."""
    longest, lengths = components.source.lengths.argmax(), components.source.lengths
    # A window holds a sharded model whole, so it can be timed where that fits; one that is only
    # ever gathered block by block may be too large.
    whole = 2 * sum(p.nbytes for p in components.module.parameters())
    fits = components.weights is None or whole <= limit.bytes * MOST_OF_MEMORY
    device = planned_device(components.config, components.world).type
    question = TuningRequest(
        work=work,
        batches=batches,
        longest=lengths.max(),
        shortest=lengths.min(),
        cut_at=cut.tuned,
        layout=components.layout,
        limit=limit,
        most_samples=min(components.source.order.most_samples, cut.micro or sys.maxsize),
        recompute=components.config.activation_checkpointing,
        timed=is_here and fits and not components.config.deterministic,
        as_needed=not is_here and device == "cuda",
        fixed_cap=NEAR_BEST_TOKENS[device] if components.config.deterministic else None,
        num_steps=components.total_steps,
        longest_id=int(components.train_set.original_ids([longest])[0]),
    )
    cache = open_cache(components, work, forward)
    return tune(question, cache, _clock, meter_for(work.device))


def _clock() -> float:
    """Read the clock, between two timings, where a signal may end them all."""
    check()
    return time.perf_counter()
