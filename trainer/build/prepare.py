"""Make a cut ready: tune it, or restore it from a checkpoint, and predict what memory it needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import numpy as np

from trainer.build.parts import Parts
from trainer.build.trial_run import rehearse_own
from trainer.build.workload import limit_of, situation, workload
from trainer.config.messages import clip
from trainer.core.errors import NoCheckpointError, Preempted
from trainer.core.signals import UNBEGUN
from trainer.data.loader import Request
from trainer.models.recompute import checkpoint_blocks
from trainer.plan.cut import Cost, Cut, IntArray, Plan
from trainer.plan.cuts import Auto, Budget, Fixed, LayoutInvariant
from trainer.plan.memory import Shape, corner_shapes
from trainer.plan.partition import pad
from trainer.plan.traffic import MOST_OF_MEMORY
from trainer.training.evaluation import HeldOut
from trainer.tune.cache import TuningCache
from trainer.tune.memory_limit import MemoryLimit
from trainer.tune.predict import Predictor
from trainer.tune.restored import restoring
from trainer.tune.speed import Clock, meter_for
from trainer.tune.tensors import MemoryEstimate
from trainer.tune.tuner import tune
from trainer.tune.tuning import Question, Recompute, Tuning
from trainer.tune.workload import Tiled, Workload

RECOMPUTE: Mapping[bool | str, Recompute] = {False: "never", True: "always", "auto": "auto"}

SAMPLED_STEPS = 8
"""Global batches, spread over an epoch, that tuning and the plan's means look at."""


@final
@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that knows how to cut.

    Attributes:
        cut: tuned, or as a checkpoint left it.
        plans: of sampled global batches, that of the first step first.
        tuning: what `accum=auto` found; None under another cut.
        predicted: peak of a step; None where it cannot be predicted.
        limit_bytes: what is left for tensors on this rank; None where nobody knows.
        how: how the cap was found, or why it is as it is.
        is_here: whether the plan is for this machine; time is unknown for any other.
        seen: what showed when the user's own model, objective and optimizer ran, for a person to
            read.
        evaluation_tokens: cap of a micro-batch in evaluation. It stays what the first process of a
            run found, so that every evaluation sums in the same order.
    """

    parts: Parts
    cut: Cut
    plans: tuple[Plan, ...]
    tuning: Tuning | None
    predicted: MemoryEstimate | None
    limit_bytes: int | None
    how: str
    is_here: bool
    seen: tuple[str, ...]
    evaluation_tokens: int


def interruptible(was_asked: Callable[[], bool]) -> Clock:
    """Make a clock for tuning that ends it, between two timings, when a signal asks to stop.

    Args:
        was_asked: whether a signal asked.
    """

    def clock() -> float:
        if was_asked():
            raise Preempted(UNBEGUN)
        return time.perf_counter()

    return clock


def prepare_on_main(
    parts: Parts, saved: Mapping[str, Any] | None = None, clock: Clock = time.perf_counter
) -> Prepared:
    """Find the cut of a run on the main rank, and give every rank the same. Collective.

    Args:
        parts: what the run is made of.
        saved: as for `prepare`.
        clock: likewise.
    """
    found: list[Prepared] = []

    def find() -> dict[str, Any]:
        found.append(prepare(parts, saved, clock))
        return describe_cut(found[0], found[0].cut)

    answer = parts.world.on_main(find)
    return found[0] if found else prepare(parts, answer)


def prepare(
    parts: Parts, saved: Mapping[str, Any] | None = None, clock: Clock = time.perf_counter
) -> Prepared:
    """Find the cut of a run.

    Args:
        parts: what the run is made of.
        saved: `describe_cut` of a run that is resumed; it counts while `accum` is unchanged, so
            that a resumed `auto` cuts as before.
        clock: times what tuning computes, and may end it.
    """
    work = workload(parts)
    limit, is_here = limit_of(parts, work)
    batches = sampled(parts)
    known = _restored(parts, saved)
    if known is not None:
        cut, tuning, how = known
    elif isinstance(parts.cut, Auto):
        assert limit is not None  # a machine that is not here has what accum.memory says
        with parts.source.loader.naming_samples(_longest(parts)):
            tuning = _tune(parts, parts.cut, work, limit, batches, clock if is_here else None)
        cut = parts.cut.tuned(tuning.max_tokens, tuning.cost, tuning.alone)
        how = tuning.method
    else:
        cut, tuning, how = parts.cut, None, "as typed"
    is_open = parts.config.activation_checkpointing == "auto"
    if is_open and tuning is not None and tuning.activation_checkpointing:
        checkpoint_blocks(parts.module)
    plans = tuple(cut.cut(lengths, parts.layout) for lengths in batches)
    predicted, unknown = None if tuning is None else tuning.predicted, None
    if tuning is None and parts.world.is_main:
        predicted, unknown = _predicted_or_why(parts, work, plans)
    return Prepared(
        parts=parts,
        cut=cut,
        plans=plans,
        tuning=tuning,
        predicted=predicted,
        limit_bytes=tuning.limit_bytes if tuning is not None else limit and limit.bytes,
        how=how,
        is_here=is_here,
        seen=_seen(parts, work, unknown),
        evaluation_tokens=(
            max(plan.max_positions for plan in plans)
            if known is None or saved is None
            else saved["evaluation_tokens"]
        ),
    )


def _longest(parts: Parts) -> Request:
    """Ask for the sample that tuning makes its shapes out of."""
    lengths = parts.source.lengths
    return Request((int(lengths.argmax()),), 0, int(lengths.max()))


def describe_cut(prepared: Prepared, cut: Cut) -> dict[str, Any]:
    """Give what a resumed run needs to cut as this one does, as JSON."""
    return {
        "accum": _accum(prepared.parts),
        "state": asdict(cut),
        "tuning": None if prepared.tuning is None else prepared.tuning.to_dict(),
        "evaluation_tokens": prepared.evaluation_tokens,
    }


def _accum(parts: Parts) -> dict[str, Any]:
    return {"target": parts.config.accum.target, "params": dict(parts.config.accum.params)}


def _restored(
    parts: Parts, saved: Mapping[str, Any] | None
) -> tuple[Cut, Tuning | None, str] | None:
    if saved is None or saved["accum"] != _accum(parts):
        return None
    state = dict(saved["state"])
    try:
        if state.get("cost") is not None:
            state["cost"] = Cost(**state["cost"])
        cut = replace(parts.cut, **state)
        tuning = None if saved["tuning"] is None else Tuning.from_dict(saved["tuning"])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise NoCheckpointError(
            f"the checkpoint's cut is none ({error!r:.80}): use init="
        ) from error
    return cut, tuning, "as before, from the checkpoint"


def sampled(parts: Parts) -> list[IntArray]:
    """Take the lengths behind a few steps of the first epoch, the first step's first."""
    order, lengths = parts.source.order, parts.source.lengths
    num_steps = min(SAMPLED_STEPS, order.steps_per_epoch, max(1, parts.total_steps))
    if parts.config.batch.unit == "tokens":
        cursor, batches = order.start, []
        for _ in range(num_steps):
            samples = order.next(cursor)
            cursor = samples.after
            batches.append(lengths[samples.ids])
        return batches
    steps = [step * order.steps_per_epoch // num_steps for step in range(num_steps)]
    return [lengths[order.next(order.at(step)).ids] for step in steps]


def _tune(
    parts: Parts,
    cut: Auto,
    work: Workload,
    limit: MemoryLimit,
    batches: list[IntArray],
    clock: Clock | None,
) -> Tuning:
    """Tune; without a clock, for a machine that is not here."""
    lengths, config = parts.source.lengths, parts.config
    # A window holds a sharded model whole, so it can be timed where that fits; one that is only
    # ever gathered block by block may be too large.
    whole = 2 * sum(p.nbytes for p in parts.module.parameters())
    fits = parts.weights is None or whole <= limit.bytes * MOST_OF_MEMORY
    question = Question(
        work=work,
        batches=batches,
        longest=int(lengths.max()),
        shortest=int(lengths.min()),
        cut_at=cut.tuned,
        layout=parts.layout,
        limit=limit,
        largest_batch=parts.source.order.most_samples,
        max_samples=cut.micro,
        recompute=RECOMPUTE[config.activation_checkpointing],
        timed=clock is not None and fits,
        num_steps=parts.total_steps,
        longest_id=int(parts.train_set.original_ids([lengths.argmax()])[0]),
    )
    cache = TuningCache.open(situation(parts, work))
    return tune(question, cache, clock or time.perf_counter, meter_for(work.device))


def _predicted_or_why(
    parts: Parts, work: Workload, plans: tuple[Plan, ...]
) -> tuple[MemoryEstimate | None, str | None]:
    """Predict, or say why that cannot be: a stated cut needs no prediction to be trained."""
    try:
        return _predicted(parts, work, plans), None
    except Exception as error:
        # A fault of the model's own shows again, in full, in the step that follows.
        return None, clip(f"memory not predicted: {type(error).__name__}: {error}")


def _seen(parts: Parts, work: Workload, unknown: str | None) -> tuple[str, ...]:
    """Gather what showed when the user's own code ran, on the main rank."""
    notes = () if unknown is None else (unknown,)
    return (*notes, *rehearse_own(parts, work)) if parts.world.is_main else ()


def _predicted(parts: Parts, work: Workload, plans: tuple[Plan, ...]) -> MemoryEstimate:
    """Predict the peak of the dearest micro-batch of any step."""
    work, shapes, cache = dearest(parts, work, plans)
    recompute = parts.config.activation_checkpointing is True
    facts = cache.facts(recompute=recompute)
    unknown = [shape for shape in shapes if shape not in facts.peaks]
    if unknown:
        # One that the run has, not one sample alone: BatchNorm of single values needs two.
        smallest = min(shapes, key=lambda shape: shape.num_samples)
        with restoring(parts.module, parts.objective):
            predictor = Predictor(work, smallest, recompute=recompute)
            facts.peaks.update({shape: predictor(shape) for shape in unknown})
        facts.method = predictor.method
        cache.save()
    return max((facts.peaks[shape] for shape in shapes), key=lambda peak: peak.peak_bytes)


def dearest(
    parts: Parts, work: Workload, plans: tuple[Plan, ...]
) -> tuple[Workload, tuple[Shape, ...], TuningCache]:
    """Name shapes of which one needs the most memory of all steps.

    Returns:
        What makes them, the shapes, and the cache of their peaks.
    """
    shapes, row = _dearest_shapes(parts, plans)
    facts = situation(parts, work)
    if row is not None and isinstance(work.make_fields, Tiled):
        work = replace(work, make_fields=replace(work.make_fields, row=row))
        facts["row"] = row
    return work, shapes, TuningCache.open(facts)


def _dearest_shapes(parts: Parts, plans: tuple[Plan, ...]) -> tuple[tuple[Shape, ...], int | None]:
    """Name shapes of which one needs the most memory of all steps, sampled or not.

    The longest sample of the data comes with a whole micro-batch of others under a fixed cut, and
    under a cap with as many as it allows. Of a cut of the user's own only the sampled plans are
    known. A packed row counts as documents of their mean length, rounded up.

    Returns:
        Shapes, and the positions of the row where documents are packed.
    """
    cut, lengths, layout = parts.cut, parts.source.lengths, parts.layout
    most = max(len(plan.ranks[rank][slot]) for plan in plans for rank, slot in plan.slots())
    if isinstance(cut, Fixed) and parts.config.batch.unit == "tokens" and cut.micro is None:
        share = -(-parts.source.order.most_samples // layout.world_size)
        most = -(-share // (cut.steps or 1))
    shortest, longest = map(int, pad(np.array([lengths.min(), lengths.max()]), layout))
    if isinstance(cut, Budget) and not layout.packed:
        whole = parts.source.order.most_samples
        return corner_shapes(
            cut.max_tokens, longest, shortest, min(whole, cut.micro or whole)
        ), None
    if not isinstance(cut, Fixed | Budget | LayoutInvariant):
        most, row = max(_size(plan, *at) for plan in plans for at in plan.slots())[::-1]
    elif not layout.packed:
        return (Shape(most, longest),), None
    else:
        row = int(np.partition(lengths, -most)[-most:].sum())
        row = min(row, max(cut.max_tokens, longest)) if isinstance(cut, Budget) else row
    return (Shape(most, -(-row // most)),), row if layout.packed else None


def _size(plan: Plan, rank: int, slot: int) -> tuple[int, int]:
    """Count the positions and the samples of a micro-batch."""
    return plan.positions(rank, slot), max(1, len(plan.ranks[rank][slot]))


def held_out(prepared: Prepared) -> HeldOut | None:
    """Give the held-out data a cap of its own: what training's largest micro-batch fits in."""
    found = prepared.parts.held_out
    if found is None:
        return None
    return replace(found, max_tokens=prepared.evaluation_tokens)
