"""Find token ids and labels that the model has no row or class for, before a device sees them.

An index out of range poisons a GPU, and on the CPU its error names neither sample nor id.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor
from torch.nn import functional as F

from trainer.data.collate import IGNORED_LABEL, LABELS
from trainer.data.samples import INPUT_IDS


@final
@dataclass(frozen=True, slots=True)
class Limits:
    """What the model has rows and classes for.

    Attributes:
        tokens: token ids are below it; None where it is not known.
        labels: likewise labels, or they are -100.
    """

    tokens: int | None = None
    labels: int | None = None

    def fault(self, fields: Mapping[str, Tensor]) -> str | None:
        """Name the first value out of range, its place and the range; None where all are in it."""
        for name, limit, known in (
            (INPUT_IDS, self.tokens, "the model's vocabulary is"),
            (LABELS, self.labels, "the model's classes, but for -100, are"),
        ):
            values = fields.get(name)
            if limit is None or values is None or values.is_floating_point():
                continue
            wrong = (values < 0) | (values >= limit)
            if name == LABELS:
                wrong &= values != IGNORED_LABEL
            if wrong.any():
                at: list[int] = wrong.nonzero()[0].tolist()
                place = f" at position {', '.join(map(str, at))}" if at else ""
                value = values[tuple(at)].tolist()
                return f"{name} holds {value}{place}, and {known} 0 to {limit - 1}"
        return None


def limits_of(error: BaseException) -> Limits | None:
    """Read off a failed look-up on the CPU how many rows or classes there are.

    Args:
        error: as a model or a loss raised it, or caused by that.

    Returns:
        None where nothing was looked up.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, IndexError):
        cause = cause.__cause__
    for frame, _ in traceback.walk_tb(None if cause is None else cause.__traceback__):
        if frame.f_code is F.embedding.__code__:
            return Limits(tokens=len(frame.f_locals["weight"]))
        if frame.f_code is F.cross_entropy.__code__:
            logits = frame.f_locals["input"]
            return Limits(labels=logits.shape[min(1, logits.dim() - 1)])
    return None
