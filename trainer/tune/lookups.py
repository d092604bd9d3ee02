"""Find which fields a model looks up in tables, and how many rows these have, without data.

An index out of range poisons a GPU: no later call of the process works. So every loaded number is
compared with these limits on the host. A fake forward finds them for models of any kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainer.core.micro_batch import Fields
from trainer.data.collate import ATTENTION_MASK, LABELS, PACKING
from trainer.objectives.base import Objective, logits_from
from trainer.objectives.classify import Classify
from trainer.objectives.next_token import NextToken
from trainer.plan.memory import Shape
from trainer.tune.predict import CannotRunFake, fake_micro_batch
from trainer.tune.workload import Workload

_MADE_HERE = {ATTENTION_MASK, *PACKING}
_AXES: Mapping[type[Objective], int] = {NextToken: -1, Classify: 1}  # of the logits: classes


def lookup_limits(work: Workload, length: int, known: Mapping[str, int]) -> dict[str, int]:
    """Find what the whole numbers of every field must be below; nothing where nothing is open.

    Seen are `nn.Embedding` and `F.embedding` on a field or a view of all of it, and the logits
    under the objectives that take a class per label. One of the user's own may do with labels what
    it likes.

    `length` is that of a sample which the model takes; fields of `known` limits are left out. None
    are found where the model cannot run on fake tensors.
    """
    fields = work.make_fields(1, length)
    whole = {name for name, field in fields.items() if not field.dtype.is_floating_point}
    open_fields = whole - known.keys() - _MADE_HERE
    axis = next((axis for kind, axis in _AXES.items() if isinstance(work.objective, kind)), None)
    if axis is None:
        open_fields.discard(LABELS)
    if not open_fields:
        return {}
    try:
        # What is looked up is the same on every rank.
        micro_batch = fake_micro_batch(replace(work, fake_ranks=None), Shape(2, length))
        with micro_batch as (theirs, fields, _), _Lookups(fields) as lookups:
            if axis is None:
                theirs.objective.sums(theirs.call, fields)
            else:
                *others, rows = logits_from(theirs.call, fields).movedim(axis, -1).shape
                if tuple(others) == fields[LABELS].shape:  # else the objective refuses them
                    lookups.rows[LABELS] = rows
    except CannotRunFake:
        return {}
    return {name: rows for name, rows in lookups.rows.items() if name in open_fields}


@final
class _Lookups(TorchFunctionMode):
    """Notes the rows of the tables that fields are looked up in; of several the smallest."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self._fields = fields
        self.rows: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Note a look-up, and call the function."""
        given = dict(zip(("input", "weight"), args, strict=False)) | (kwargs or {})
        if func in {F.embedding, F.embedding_bag}:
            for name, field in self._fields.items():
                if _is_all_of(given["input"], field):
                    rows = len(given["weight"])
                    self.rows[name] = min(rows, self.rows.get(name, rows))
        return func(*args, **(kwargs or {}))


def _is_all_of(index: Tensor, field: Tensor) -> bool:
    """Whether an index is a field, or another view of all that is in it."""
    base = field if field._base is None else field._base
    return index is field or (index._base is base and index.numel() == field.numel())
