"""Sum cross entropy from what goes into the output layer, a chunk of positions at a time.

Neither the logits of all positions nor fp32 copies of them are ever in memory at once. A chunk's
gradients are computed with its loss, from the same logits: what the sums are divided by only scales
them. PyTorch's own `linear_cross_entropy` (2.13) rounds the loss to the dtype of its input, and has
no label smoothing. Compiled, the logits of a chunk are read twice and written once on a GPU, half
of the traffic of eager kernels (docs/decisions/cross-entropy.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.core import gpu
from trainer.core.micro_batch import IGNORED
from trainer.models.compilation import compiled
from trainer.objectives.weighting import weighted

CHUNK_BYTES = {"cpu": 2**25, "gpu": 2**29}
"""Logits of a chunk in fp32: on a CPU about its cache; on a GPU so many that a weight gradient
which is added to once a chunk costs little beside the products."""

MULTIPLE = {"cpu": 1, "gpu": 128}
"""Classes are padded to a multiple of it: tensor cores are slow on odd widths."""

PEAK_CHUNKS = 3
"""Chunks that have reached the peak of memory: in the second the logits of the first are there."""

only_peak: ContextVar[bool] = ContextVar("only_peak", default=False)
"""Whether memory alone counts, and no value: then no chunk beyond those is computed."""

Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor]  # hidden states, weight, bias, targets


class _Task(NamedTuple):
    classes: int
    rows: int  # positions of a chunk
    multiple: int  # what the number of classes is padded to
    smoothing: float
    backend: str | None  # of the compiler
    terms: Tensor | None  # what the loss of each position is written into
    weight: Tensor | None  # how often each position counts


def linear_cross_entropy(
    hidden: Tensor,
    layer: tuple[Tensor, Tensor | None],
    targets: Tensor,
    *,
    target_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    backend: str | None = None,
    observe: Callable[[Tensor, Tensor, Tensor | None], None] | None = None,
    terms: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum the cross entropy of `hidden @ weight.T + bias` in nats, 0-d, in fp32 at least.

    `hidden` is `(positions, width)`, in the dtype of the products; `layer` is the weight,
    `(classes, width)`, and the bias; `targets` are `(positions,)`, int64, of which -100 is no term,
    and each counts as often as `target_weight` says, `(positions,)`. What is no matrix product is
    compiled by `backend`, where there is one. The loss of each position is written into `terms`.
    Where no gradient is recorded `observe` gets the logits, `(rows, classes)`, targets and their
    weights of each chunk, and the second sum is how often the best class is right.
    """
    kind, classes = gpu.kind_of(hidden.device), len(layer[0])
    inputs = (hidden, *layer, targets)
    # 4 bytes for each: the softmax is computed in fp32.
    rows = max(1, CHUNK_BYTES[kind] // (4 * classes))
    task = _Task(classes, rows, MULTIPLE[kind], label_smoothing, backend, terms, target_weight)
    if not torch.is_grad_enabled():
        return _compute(task, inputs, observe=observe)[0]
    sums: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(task, *inputs)  # type: ignore[no-untyped-call] # untyped in torch
    return sums


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes gradients in forward, which one number scales in backward."""

    @staticmethod
    def forward(ctx: Any, task: _Task, *inputs: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
        """Compute the sums."""
        ctx.save_for_backward(*inputs)
        ctx.task, ctx.needs = task, ctx.needs_input_grad[1:4]
        sums, ctx.grads = _compute(task, inputs, ctx.needs)
        ctx.mark_non_differentiable(sums[1])
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Scale the gradients; compute them where there are none, as when this runs again."""
        inputs, grads, ctx.grads = ctx.saved_tensors, ctx.grads, None
        if grads is None:
            _, grads = _compute(ctx.task, inputs, ctx.needs)
        # In place: a backward that runs once more computes its own.
        pairs = zip(grads, inputs, strict=False)
        return None, *(g if g is None else g.mul_(given[0]).to(x.dtype) for g, x in pairs), None


def _compute(
    task: _Task,
    inputs: Inputs,
    needs: Sequence[bool] = (),
    observe: Callable[[Tensor, Tensor, Tensor | None], None] | None = None,
) -> tuple[tuple[Tensor, Tensor], list[Tensor | None] | None]:
    """Walk over the chunks; with `needs`, also give the gradients of the inputs that need one."""
    hidden, weight, bias, targets = inputs
    # Backward may run within autocast, or not.
    with torch.autocast(hidden.device.type, enabled=False):
        matrix, added = (_padded(x, task.multiple, hidden.dtype) for x in (weight, bias))
        assert matrix is not None
        wide, grads = torch.promote_types(hidden.dtype, torch.float32), None
        if needs:
            # Every chunk adds to those of the layer, which are in fp32 at least.
            kinds = zip((hidden, matrix, added), (hidden.dtype, wide, wide), needs, strict=True)
            grads = [
                torch.zeros_like(x, dtype=dtype) if needed and x is not None else None
                for x, dtype, needed in kinds
            ]
        counted = torch.int64 if task.weight is None else torch.float64
        total, hits = (torch.zeros((), dtype=t, device=hidden.device) for t in (wide, counted))
        starts = range(0, len(hidden), task.rows)
        for start in starts[:PEAK_CHUNKS] if only_peak.get() else starts:
            piece = slice(start, start + task.rows)
            rows, labels = hidden[piece], targets[piece]
            often = None if task.weight is None else task.weight[piece]
            logits = F.linear(rows, matrix, added)
            # What only pads the number of classes has no probability.
            logits[:, task.classes :] = -torch.inf
            if not needs:
                # Training shows no accuracy, for which all logits would be read once more.
                hits += weighted(logits.argmax(-1) == labels, often).sum()
            if observe is not None:
                observe(logits[:, : task.classes], labels, often)
            losses = _entropy(task, logits, labels, wide, overwrites=grads is not None)
            if often is not None:
                losses *= often
                logits *= often[:, None]
            total += losses.sum()
            if task.terms is not None:
                task.terms[piece] = losses
            if grads is not None:
                _add_gradients(grads, piece, (logits, rows, matrix), (labels == IGNORED)[:, None])
    if grads is not None:
        # Without the rows that padded the number of classes.
        grads = [grads[0], *(g if g is None else g[: task.classes] for g in grads[1:])]
    return (total, hits), grads


def _padded(tensor: Tensor | None, multiple: int, dtype: torch.dtype) -> Tensor | None:
    """Cast, and add rows of zeros up to the multiple, in one copy; none where nothing changes."""
    if tensor is None or not -len(tensor) % multiple:
        return tensor if tensor is None else tensor.to(dtype)
    rows = len(tensor) + -len(tensor) % multiple
    padded = tensor.new_zeros((rows, *tensor.shape[1:]), dtype=dtype)
    padded[: len(tensor)] = tensor
    return padded


def _entropy(
    task: _Task, logits: Tensor, labels: Tensor, dtype: torch.dtype, *, overwrites: bool
) -> Tensor:
    """Give the cross entropy of each row; may overwrite its logits with their gradient."""
    ignored = labels == IGNORED
    # -100 is no index of a class; the loss of those is put to zero in the end.
    index = labels.masked_fill(ignored, 0)[:, None]
    softmax = _softmax if task.backend is None else _compiled_softmax(task.backend)
    log_prob, losses = softmax(task, logits, index, dtype, overwrites=overwrites)
    if overwrites:
        # The gradient is p - q, the softmax less the target. The label's own entry is computed
        # apart, since p - 1 of a rounded p near 1 keeps few digits, as does Inductor's expm1.
        own = torch.expm1(log_prob) + task.smoothing - task.smoothing / task.classes
        logits.scatter_(1, index, own.to(logits.dtype))
    return losses.masked_fill_(ignored, 0.0)


def _softmax(
    task: _Task, logits: Tensor, index: Tensor, dtype: torch.dtype, *, overwrites: bool
) -> tuple[Tensor, Tensor]:
    """Give log-probability and loss of each label; may overwrite the logits with the softmax.

    Less the target of every class, as label smoothing has it. One graph for all numbers of rows.
    """
    log_probs = logits.log_softmax(-1, dtype=dtype)
    log_prob = log_probs.gather(1, index)
    losses = -log_prob[:, 0]
    if task.smoothing:
        mean = log_probs[:, : task.classes].mean(-1)
        losses = (1.0 - task.smoothing) * losses - task.smoothing * mean
    if overwrites:
        torch.exp(log_probs, out=logits)
        if task.smoothing:
            logits[:, : task.classes].sub_(task.smoothing / task.classes)
    return log_prob, losses


_compiled_softmax = cache(partial(compiled, _softmax))


def _add_gradients(
    grads: list[Tensor | None],
    piece: slice,
    factors: tuple[Tensor, Tensor, Tensor],
    ignored: Tensor,
) -> None:
    """Add what a chunk gives the inputs; what has no label is left out where numbers are fewer."""
    (d_hidden, d_weight, d_bias), (d_logits, rows, matrix) = grads, factors
    if d_hidden is not None:
        d_hidden[piece] = (d_logits @ matrix).masked_fill_(ignored, 0.0)
    if d_weight is not None:
        labelled = rows.masked_fill(ignored, 0.0)
        if d_weight.dtype == rows.dtype:
            torch.addmm(d_weight, d_logits.T, labelled, out=d_weight)
        else:
            # A product of half precision is added in fp32, as `addmm` cannot.
            d_weight += d_logits.T @ labelled
    if d_bias is not None:
        d_bias += d_logits.masked_fill_(ignored, 0.0).sum(0, dtype=d_bias.dtype)
