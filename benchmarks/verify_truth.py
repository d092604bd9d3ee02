"""Whether the gradient of a whole batch is that of its parts, computed without the trainer.

In float64 and without dropout: the gradient of eight samples in one forward, and the sum of those
of their parts, each weighed by its share of the loss terms. Where they differ, parts that are
padded as the whole batch is tell whether padding is the cause, and else outputs whether it is the
loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from verify_models import Model
from verify_samples import together

SPLITS = ((3, 2, 3), (1,) * 8)
NUM_SAMPLES = 8
EXACT, SINGLE, COARSE = 1e-9, 2e-5, 2e-3
"""Relative errors that are rounding: in float64, in float64 where a model casts to float32 by hand,
and in float32."""

Samples = Sequence[Mapping[str, Tensor]]

SHIFTED = ("causal_lm", "image_text_to_text")


@final
@dataclass(frozen=True, kw_only=True)
class Truth:
    """What was found.

    Attributes:
        error: the largest of any parameter and split, relative to the largest of its gradient.
        draws: whether the model draws at random though its config's dropout and noise are off.
        cause: of an error: `padding`, `neighbours` or `loss`; empty where there is none.
    """

    error: float
    draws: bool = False
    cause: str = ""

    @property
    def word(self) -> str:
        """Say it in a word."""
        if self.draws:
            return "draws"
        if self.error <= EXACT:
            return "exact"
        return f"not exact: {self.cause}" if self.cause else "exact in float32"

    @property
    def is_exact(self) -> bool:
        """Whether parts give the gradient of the whole."""
        return not (self.draws or self.cause)


def truth_of(model: Model) -> Truth:
    """Compare the whole batch with its parts; in float32 what cannot be computed in more."""
    try:
        return _truth_in(torch.float64, SINGLE, model)
    except (RuntimeError, ArithmeticError) as error:
        # A mask of the least number of float64, added twice, is infinite.
        if not (isinstance(error, ArithmeticError) or "dtype" in str(error)):
            raise
        return _truth_in(torch.float32, COARSE, model)


def _truth_in(dtype: torch.dtype, limit: float, model: Model) -> Truth:
    with _default(dtype):
        torch.manual_seed(0)
        module, data = model.build(draws=False).to(dtype), model.samples()
        samples = [data[i] for i in range(NUM_SAMPLES)]
        samples = [{n: _cast(v, dtype) for n, v in sample.items()} for sample in samples]
        check = _Check(module, model.kind, limit)
        whole = check.gradient([samples], seed=1)
        if not all(g.isfinite().all() for g in whole.values()):
            raise ArithmeticError("the gradient is not finite")
        if _distance(check.gradient([samples], seed=2), whole) > limit:
            return Truth(error=math.inf, draws=True)
        parts = [_split(samples, sizes) for sizes in SPLITS]
        error = max(_distance(check.gradient(each, seed=1), whole) for each in parts[:1])
        with suppress(ValueError, RuntimeError):  # some take no single sample, or no short one
            error = max(error, _distance(check.gradient(parts[1], seed=1), whole))
        cause = ""
        if error > limit:
            padded = check.gradient(parts[0], seed=1, like=samples)
            agrees = check.outputs_agree(samples, parts[0])
            cause = "loss" if agrees else "neighbours"
            cause = "padding" if _distance(padded, whole) <= limit else cause
        return Truth(error=error, cause=cause)


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _split(samples: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [list(samples[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


class _Check:
    def __init__(self, module: nn.Module, kind: str, limit: float) -> None:
        self.module, self.kind, self.limit = module, kind, limit

    def gradient(
        self, parts: Sequence[Samples], *, seed: int, like: Samples = ()
    ) -> dict[str, Tensor]:
        """Add up the gradients of parts, each from the same random numbers."""
        batches = [together(part, like) for part in parts]
        total = sum(self._count(fields) for fields in batches)
        state = {n: b.detach().clone() for n, b in self.module.named_buffers()}
        self.module.zero_grad(set_to_none=True)
        for fields in batches:
            torch.manual_seed(seed)
            (self._loss_sum(fields) / total).backward()
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                buffer.copy_(state[name]) if name in state else None
        named = self.module.named_parameters()
        return {n: p.grad.clone() for n, p in named if p.grad is not None}

    def outputs_agree(self, samples: Samples, parts: Sequence[Samples]) -> bool:
        """Compare logits of the whole and of parts that are padded like it."""
        with torch.no_grad():
            given = [self._logits(together(part, samples)) for part in [samples, *parts]]
        whole = given[0]
        apart = torch.cat(given[1:])
        return bool(
            (apart - whole).nan_to_num().abs().max()
            <= self.limit * whole[whole.isfinite()].abs().max()
        )

    def _count(self, fields: Mapping[str, Tensor]) -> int:
        labels = fields.get("labels")
        if labels is None:
            return len(next(iter(fields.values())))
        return int(((labels[:, 1:] if self.kind in SHIFTED else labels) != -100).sum())

    def _logits(self, fields: Mapping[str, Tensor]) -> Tensor:
        given = dict(fields)
        if self.kind == "question_answering":
            given = {n: f for n, f in given.items() if not n.endswith("_positions")}
            output = self.module(**given)
            logits = torch.stack([output.start_logits, output.end_logits], dim=1)
            return logits.masked_fill(fields["attention_mask"][:, None] == 0, -torch.inf)
        if self.kind != "seq2seq_lm":  # which makes the decoder's inputs of its labels
            given.pop("labels")
        found: Tensor = self.module(**given).logits
        return found

    def _loss_sum(self, fields: Mapping[str, Tensor]) -> Tensor:
        if self.kind == "question_answering":
            ends = torch.stack([fields["start_positions"], fields["end_positions"]], dim=1)
            return (
                F.cross_entropy(self._logits(fields).flatten(0, 1), ends.flatten(), reduction="sum")
                / 2
            )
        logits, labels = self._logits(fields), fields["labels"]
        if self.kind in SHIFTED:
            logits, labels = logits[:, :-1], labels[:, 1:]
        classes = logits.shape[-1]
        return F.cross_entropy(logits.reshape(-1, classes), labels.reshape(-1), reduction="sum")


def _distance(found: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> float:
    """Give the largest error of any parameter; one of nearly no gradient counts less."""
    largest = max(float(g.abs().max()) for g in whole.values() if g.numel())
    errors = [0.0]
    for name in found.keys() | whole.keys():
        one, other = found.get(name), whole.get(name)
        if one is None or other is None:
            gap = float((one if other is None else other).abs().max())  # type: ignore[union-attr]
            errors.append(gap / largest)
        elif other.numel():
            gap = float((one - other).abs().max())
            errors.append(gap / max(float(other.abs().max()), 1e-3 * largest))
    return max(errors) if all(map(math.isfinite, errors)) else math.inf
