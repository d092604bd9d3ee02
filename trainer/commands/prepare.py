"""From parts to a cut that is ready: tuning, restored constants, and what memory they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from trainer.assemble import Parts
from trainer.evaluate import HeldOut
from trainer.models.recompute import checkpoint_blocks
from trainer.plan.cut import Cost, Cut, IntArray, Plan
from trainer.plan.cuts import Auto
from trainer.plan.memory import Shape
from trainer.tune.cache import Notebook, describe
from trainer.tune.limit import MemoryLimit, memory_limit
from trainer.tune.predict import predictor_for
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
        limit: memory of this rank.
        limit_bytes: what is left for tensors.
        how: how the cap was found, or why it is as it is.
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
    evaluation_tokens: int


def prepare_alike(parts: Parts, saved: Mapping[str, Any] | None = None) -> Prepared:
    """Find the cut of a run on the main rank, and give every rank the same. Collective.

    Args:
        parts: what the run is made of.
        saved: as for `prepare`.
    """
    found: list[Prepared] = []

    def find() -> dict[str, Any]:
        found.append(prepare(parts, saved))
        return describe_cut(found[0], found[0].cut)

    told = parts.world.on_main(find)
    return found[0] if found else prepare(parts, told)


def prepare(parts: Parts, saved: Mapping[str, Any] | None = None) -> Prepared:
    """Find the cut of a run.

    Args:
        parts: what the run is made of.
        saved: `describe_cut` of a run that is resumed; it counts while `accum` is unchanged, so
            that a resumed `auto` cuts as before.
    """
    work = workload(parts)
    limit = memory_limit(
        parts.world.device,
        resident_bytes=work.resident_bytes,
        asked=_asked(parts.cut),
        local_ranks=parts.world.local_size,
    )
    batches = _sampled(parts)
    known = _restored(parts, saved)
    if known is not None:
        cut, tuning, how = known
    elif isinstance(parts.cut, Auto):
        tuning = _tune(parts, parts.cut, work, limit, batches)
        cut, how = parts.cut.tuned(tuning.max_tokens, tuning.cost), tuning.method
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
        evaluation_tokens=(
            max(plan.max_positions for plan in plans)
            if known is None or saved is None
            else saved["evaluation_tokens"]
        ),
    )


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


def _asked(cut: Cut) -> int | None:
    return cut.memory if isinstance(cut, Auto) else None


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
    parts: Parts, cut: Auto, work: Workload, limit: MemoryLimit, batches: list[IntArray]
) -> Tuning:
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
        timed=cut.memory is None,
        num_steps=parts.total_steps,
        longest_id=int(lengths.argmax()),
    )
    return tune(question, Notebook.open(describe(work, int(lengths.max()), config.precision)))


def _predicted(parts: Parts, work: Workload, plans: tuple[Plan, ...]) -> MemoryEstimate | None:
    """Predict the peak of the largest micro-batch of the sampled plans."""
    shapes = [
        Shape(max(1, len(plan.ranks[r][s])), plan.padded_lengths[r][s])
        for plan in plans
        for r, s in plan.slots()
        if not plan.packed
    ]
    if not shapes:
        return None
    shape = max(shapes, key=lambda shape: shape.num_samples * shape.length)
    longest = int(parts.source.lengths.max())
    book = Notebook.open(describe(work, longest, parts.config.precision))
    recompute = parts.config.activation_checkpointing is True
    if (shape, recompute) not in book.peaks:
        predictor = predictor_for(work, Shape(1, longest), recompute=recompute)
        book.methods[recompute] = predictor.method
        book.peaks[shape, recompute] = predictor(shape)
        book.save()
    return book.peaks[shape, recompute]


def held_out(prepared: Prepared) -> HeldOut | None:
    """Give the held-out data a cap of its own: what training's largest micro-batch fits in."""
    found = prepared.parts.held_out
    if found is None:
        return None
    return replace(found, max_tokens=prepared.evaluation_tokens)
