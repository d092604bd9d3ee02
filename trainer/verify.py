"""Proof on the user's own model and data: the planned step equals the whole-batch step.

The gradient of one planned step is compared with that of the whole global batch in one piece, in
float64, where a wrong normalizer or a coupled layer stands out by ten orders of magnitude. When
they differ, the modules that cause it are found by running samples alone and together.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from trainer.accumulate.normalizer import Kind, divisors
from trainer.culprits import find_culprits
from trainer.data.loader import Loader, Request
from trainer.feed import PlannedBatch
from trainer.micro_batch import Fields, MicroBatch
from trainer.models.bind import bind
from trainer.parallel import Replicated
from trainer.report.records import VerifyReport
from trainer.step import Kit
from trainer.world import World

EXACT = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest relative error that is rounding, by the precision of the comparison."""

FLOOR = 1e-4
"""Gradients below this share of the largest one are compared against that share: a gradient that
is zero on paper (a key's bias under softmax) holds rounding noise only."""

Gradient = Mapping[str, Tensor]


@final
@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is compared: a scratch copy of the model, in the highest precision it runs in.

    Attributes:
        kit: the run's, around the scratch copy.
        dtype: of its parameters.
    """

    kit: Kit
    dtype: torch.dtype


def verify(kit: Kit, batch: PlannedBatch, loader: Loader, *, whole_fits: bool) -> VerifyReport:
    """Compare the gradient of a planned step with the whole batch's.

    Args:
        kit: the run's; its model is copied and left as it is.
        batch: the planned step.
        loader: gives the same samples in other groups.
        whole_fits: whether the whole batch in one piece fits into memory; if not, the reference
            is one sample per pass, summed.

    Returns:
        The largest relative error over parameters, the worst of them, and the culprits.
    """
    subject, planned = _highest(kit, batch)
    low = _low_precision(kit)
    if low is not None:
        planned = _planned(_subject(kit, low), batch)
    whole = [_whole(batch, loader, subject)] if whole_fits else _alone(batch, loader, subject)
    kind: Kind = "samples" if kit.normalizer == "samples" else "tokens"
    reference = _gradient(subject.kit, whole, kind)
    errors = _errors(planned, reference)
    worst = sorted(errors.items(), key=lambda item: -item[1])
    error = worst[0][1] if worst else 0.0
    exact = error <= EXACT[subject.dtype]
    return VerifyReport(
        exact=exact,
        max_relative_error=error,
        reference="whole batch" if whole_fits else "sample by sample, summed",
        dtype=str(subject.dtype).removeprefix("torch."),
        worst=tuple(worst[:10]),
        culprits=() if exact else _culprits(kit, subject, batch, loader),
        num_parameters=len(errors),
        micro_batches=batch.plan.num_micro_batches,
        global_batch=len(batch.samples.ids),
    )


def _highest(kit: Kit, batch: PlannedBatch) -> tuple[Subject, Gradient]:
    """Compute the planned gradient in float64, or in fp32 where the model fixes its precision."""
    subject = _subject(kit, torch.float64)
    with suppress(RuntimeError):
        return subject, _planned(subject, batch)
    subject = _subject(kit, torch.float32)
    return subject, _planned(subject, batch)


def _planned(subject: Subject, batch: PlannedBatch) -> Gradient:
    micro_batches = [
        replace(m, fields=_in_precision(m.fields, subject.dtype)) for m in batch.micro_batches
    ]
    return _gradient(subject.kit, micro_batches, subject.kit.normalizer)


def _subject(kit: Kit, dtype: torch.dtype) -> Subject:
    module = copy.deepcopy(kit.model.module).to(dtype)
    parameters = [p for p in module.parameters() if p.requires_grad]
    model = Replicated(module, bind(module), parameters, World(device=kit.world.device))
    return Subject(kit=replace(kit, model=model, world=model.world), dtype=dtype)


def _low_precision(kit: Kit) -> torch.dtype | None:
    """Give the dtype of parameters that accumulate in fewer bits than fp32."""
    dtypes = {p.dtype for p in kit.model.module.parameters()}
    return next(iter(dtypes & {torch.bfloat16, torch.float16}), None)


def _in_precision(fields: Fields, dtype: torch.dtype) -> Fields:
    return {n: f.to(dtype) if f.is_floating_point() else f for n, f in fields.items()}


def _gradient(kit: Kit, micro_batches: Sequence[MicroBatch], kind: Kind) -> Gradient:
    """Compute one step's gradient by name, leaving the buffers as they were."""
    module = kit.model.module
    buffers = [buffer.clone() for buffer in module.buffers()]
    _, parts = divisors(kind, kit.terms, micro_batches, kit.world)
    kit.strategy.backward(kit.model, kit.objective, micro_batches, parts, kit.sync)
    gradient = {
        name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None
    }
    kit.model.drop_gradients()
    for buffer, saved in zip(module.buffers(), buffers, strict=True):
        buffer.copy_(saved)
    return gradient


def _whole(batch: PlannedBatch, loader: Loader, subject: Subject) -> MicroBatch:
    ids = tuple(map(int, batch.samples.ids))
    length = int(batch.plan.lengths.max())
    return _load(batch, loader, subject, ids, length)


def _alone(batch: PlannedBatch, loader: Loader, subject: Subject) -> list[MicroBatch]:
    return [
        _load(batch, loader, subject, (int(sample),), int(length))
        for sample, length in zip(batch.samples.ids, batch.plan.lengths, strict=True)
    ]


def _load(
    batch: PlannedBatch, loader: Loader, subject: Subject, ids: tuple[int, ...], length: int
) -> MicroBatch:
    """Group samples anew, under the draws of the step's first micro-batch."""
    request = Request(ids=ids, epoch=batch.samples.epoch, pad_to=length, packed=False)
    fields = _in_precision(loader.load(request), subject.dtype)
    return MicroBatch(
        fields=fields,
        ids=ids,
        weights=subject.kit.objective.weights(fields),
        num_tokens=length * len(ids),
        num_positions=length * len(ids),
        rng_key=batch.micro_batches[0].rng_key,
    )


def _errors(planned: Gradient, reference: Gradient) -> dict[str, float]:
    """Per parameter: max absolute difference over max absolute reference."""
    scale = max((float(g.abs().max()) for g in reference.values() if g.numel()), default=0.0)
    errors = {}
    for name in sorted(planned.keys() | reference.keys()):
        if name not in planned or name not in reference:
            errors[name] = float("inf")
            continue
        difference = float((planned[name].double() - reference[name]).abs().max())
        size = max(float(reference[name].abs().max()), FLOOR * scale)
        errors[name] = difference / size if difference else 0.0
    return errors


def _culprits(
    kit: Kit, subject: Subject, batch: PlannedBatch, loader: Loader
) -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    if kit.normalizer == "micro_batches":
        found.append(
            (
                "batch.normalizer",
                "a mean of means: a token's share depends on its micro-batch; use tokens",
            )
        )
    low = _low_precision(kit)
    if low is not None:
        found.append(
            ("parameters", f"{low}: gradients lose bits as they accumulate; keep fp32 weights")
        )
    order = batch.plan.lengths.argsort(kind="stable")
    picks = order[[0, len(order) // 3, 2 * len(order) // 3, len(order) - 1]]
    ids = tuple(dict.fromkeys(int(i) for i in batch.samples.ids[picks]))
    lengths = {int(batch.samples.ids[p]): int(batch.plan.lengths[p]) for p in picks}
    together = _load(batch, loader, subject, ids, max(lengths.values()))
    alone = [_load(batch, loader, subject, (i,), lengths[i]) for i in ids]
    return (*found, *find_culprits(subject.kit.model, subject.kit.objective, together, alone))
