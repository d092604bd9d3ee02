"""From parts to a cut that is ready: tuning, restored constants, and what memory they need."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import torch

from trainer.assemble import Parts, planned_device
from trainer.errors import Preempted
from trainer.evaluate import HeldOut
from trainer.feed import PREFETCH_LIMIT_BYTES
from trainer.models.recompute import checkpoint_blocks
from trainer.plan.cut import Cost, Cut, IntArray, Plan
from trainer.plan.cuts import Auto
from trainer.plan.memory import Shape
from trainer.tune.cache import Notebook, describe
from trainer.tune.limit import MemoryLimit, memory_limit
from trainer.tune.predict import predictor_for
from trainer.tune.speed import Clock, meter_for
from trainer.tune.tensors import MemoryEstimate
from trainer.tune.tuner import tune
from trainer.tune.tuning import Question, Recompute, Shares, Tuning
from trainer.tune.untouched import untouched
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
        limit: memory of this rank.
        limit_bytes: what is left for tensors.
        how: how the cap was found, or why it is as it is.
        is_here: whether the plan is for this machine; time is unknown for any other.
        evaluation_tokens: cap of a micro-batch in evaluation. It stays what the first process of a
            run found, so that every evaluation sums in the same order.
    """

    parts: Parts
    cut: Cut
    plans: tuple[Plan, ...]
    tuning: Tuning | None
    predicted: MemoryEstimate | None
    limit: MemoryLimit
    limit_bytes: int
    how: str
    is_here: bool
    evaluation_tokens: int


def interruptible(was_asked: Callable[[], bool]) -> Clock:
    """Make a clock for tuning that ends it, between two timings, when a signal asks to stop.

    Args:
        was_asked: whether a signal asked.
    """

    def clock() -> float:
        if was_asked():
            raise Preempted("stopped before the first step: nothing was trained, begin again")
        return time.perf_counter()

    return clock


def prepare_alike(
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

    told = parts.world.on_main(find)
    return found[0] if found else prepare(parts, told)


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
    limit, is_here = _limit(parts, work)
    batches = _sampled(parts)
    known = _restored(parts, saved)
    if known is not None:
        cut, tuning, how = known
    elif isinstance(parts.cut, Auto):
        tuning = _tune(parts, parts.cut, work, limit, batches, clock if is_here else None)
        cut = parts.cut.tuned(tuning.max_tokens, tuning.cost, tuning.alone)
        how = tuning.method
    else:
        cut, tuning, how = parts.cut, None, "as typed"
    is_open = parts.config.activation_checkpointing == "auto"
    if is_open and tuning is not None and tuning.activation_checkpointing:
        checkpoint_blocks(parts.module)
    plans = tuple(cut.cut(lengths, parts.layout) for lengths in batches)
    predicted = None if tuning is None else tuning.predicted
    if tuning is None and parts.world.is_main:
        predicted = _predicted(parts, work, plans)
    return Prepared(
        parts=parts,
        cut=cut,
        plans=plans,
        tuning=tuning,
        predicted=predicted,
        limit=limit,
        limit_bytes=limit.bytes if tuning is None else tuning.limit_bytes,
        how=how,
        is_here=is_here,
        evaluation_tokens=(
            max(plan.max_positions for plan in plans)
            if known is None or saved is None
            else saved["evaluation_tokens"]
        ),
    )


def _limit(parts: Parts, work: Workload) -> tuple[MemoryLimit, bool]:
    """Find the memory of one rank, and whether it is that of this machine.

    `train plan` takes `accum.memory` at its word, for a machine that is not here too. A run cannot
    have more than there is.
    """
    asked = parts.cut.memory if isinstance(parts.cut, Auto) else None
    device, world = planned_device(parts.config, parts.world), parts.world

    def find(device: torch.device, asked: int | None = None) -> MemoryLimit:
        limit = memory_limit(
            device,
            resident_bytes=work.resident_bytes,
            asked=asked,
            local_ranks=world.local_size,
        )
        # A GPU holds one micro-batch of inputs, which the prediction counts.
        held = _inputs_bytes(parts) if device.type == "cpu" else 0
        return replace(limit, bytes=max(0, limit.bytes - held))

    if device.type != world.device.type:
        return find(device, asked=asked), False
    there = find(device)
    if asked is None:
        return there, True
    said = find(device, asked=asked)
    if said.bytes <= there.bytes:
        return said, True
    return (said, False) if parts.config.command == "plan" else (there, True)


def _inputs_bytes(parts: Parts) -> int:
    """Count the inputs of one rank's step, and of the next where that is loaded ahead."""
    lengths = parts.source.lengths
    per_token = sum(field.nbytes for field in parts.example.values()) / float(lengths.max())
    is_in_tokens = parts.config.batch.unit == "tokens"
    tokens = parts.global_size * (1.0 if is_in_tokens else float(lengths.mean()))
    step = int(per_token * tokens / parts.world.size)
    return step * (2 if step <= PREFETCH_LIMIT_BYTES else 1)


def _shares(parts: Parts) -> Shares:
    """Tell what a rank of a sharded model holds at the peak of a step.

    Parameters are gathered, beside their shards; gradients are whole within a window, and shards
    under a policy that reduces at every micro-batch.
    """
    spread = parts.spread
    if spread.mode not in {"fsdp", "hsdp"}:
        return Shares()
    shard = spread.replicas / parts.world.size
    whole = 0.0 if spread.sync.lockstep else 1.0
    return Shares(parameters=1.0 + shard, gradients=whole + shard, optimizer_state=shard)


def workload(parts: Parts) -> Workload:
    """Give what tuning rehearses: model, loss, optimizer, and micro-batches of any shape."""
    length = int(parts.source.lengths.max())
    return Workload(
        model=parts.module,
        call=parts.call,
        objective=parts.objective,
        make_optimizer=parts.spec.build,
        make_fields=Tiled(parts.example, length),
    )


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
    if state.get("cost") is not None:
        state["cost"] = Cost(**state["cost"])
    tuning = None if saved["tuning"] is None else Tuning.from_dict(saved["tuning"])
    return replace(parts.cut, **state), tuning, "as before, from the checkpoint"


def _sampled(parts: Parts) -> list[IntArray]:
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
    spread = [step * order.steps_per_epoch // num_steps for step in range(num_steps)]
    return [lengths[order.next(order.at(step)).ids] for step in spread]


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
    question = Question(
        work=work,
        batches=batches,
        longest=int(lengths.max()),
        shortest=int(lengths.min()),
        cut_at=cut.tuned,
        layout=parts.layout,
        limit=limit,
        max_samples=cut.micro,
        recompute=RECOMPUTE[config.activation_checkpointing],
        timed=clock is not None,
        num_steps=parts.total_steps,
        shares=_shares(parts),
        longest_id=int(lengths.argmax()),
    )
    book = Notebook.open(describe(work, int(lengths.max()), config.precision))
    return tune(question, book, clock or time.perf_counter, meter_for(work.device))


def _predicted(parts: Parts, work: Workload, plans: tuple[Plan, ...]) -> MemoryEstimate | None:
    """Predict the peak of the largest micro-batch of the sampled plans.

    A packed row counts as documents of their mean length.
    """
    shapes = []
    for plan in plans:
        for rank, slot in plan.slots():
            held = max(1, len(plan.ranks[rank][slot]))
            shapes.append(Shape(held, -(-plan.positions(rank, slot) // held)))
    shape = max(shapes, key=lambda shape: shape.num_samples * shape.length)
    longest = int(parts.source.lengths.max())
    book = Notebook.open(describe(work, longest, parts.config.precision))
    recompute = parts.config.activation_checkpointing is True
    if (shape, recompute) not in book.peaks:
        with untouched(parts.module):
            predictor = predictor_for(work, Shape(1, longest), recompute=recompute)
            book.peaks[shape, recompute] = predictor(shape)
        book.methods[recompute] = predictor.method
        book.save()
    return _shares(parts).of(book.peaks[shape, recompute])


def held_out(prepared: Prepared) -> HeldOut | None:
    """Give the held-out data a cap of its own: what training's largest micro-batch fits in."""
    found = prepared.parts.held_out
    if found is None:
        return None
    return replace(found, max_tokens=prepared.evaluation_tokens)
