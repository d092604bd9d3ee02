"""Tell where one parameter is several matrices, as those of query, key and value.

A module declares it: `fused_matrices = {"qkv.weight": (width, width, width)}`, rows of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from trainer.core.errors import ConfigError

_DECLARED = "fused_matrices"


@final
@dataclass(frozen=True)
class FusedMatrix:
    """How matrices that map the same input share one parameter."""

    # Outputs of each, one behind the other; the row of them comes again until all are used
    outputs: Sequence[int]
    # Whether they are columns, as of a layer that computes `x @ weight`
    is_transposed: bool = False

    @property
    def num_matrices(self) -> int:
        """How many they are."""
        return len(self.outputs)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Give each matrix, `(outputs, inputs)`."""
        return [place.flatten(0, 1) for place in self._places(whole)]

    def write(self, parts: Sequence[Tensor], whole: Tensor) -> None:
        """Put each matrix in its place of the whole."""
        for place, part in zip(self._places(whole), parts, strict=True):
            place.copy_(part.view(place.shape))

    def _places(self, whole: Tensor) -> tuple[Tensor, ...]:
        """View the rows of each matrix, `(repetitions, rows, inputs)`."""
        rows = whole.T if self.is_transposed else whole
        return torch.split(torch.unflatten(rows, 0, (-1, sum(self.outputs))), [*self.outputs], 1)


def fused_matrices(model: nn.Module, known: Mapping[str, FusedMatrix]) -> dict[int, FusedMatrix]:
    """Find what modules declare, beside what is `known` by name, by the id of a parameter."""
    found = dict(known)
    for path, part in model.named_modules():
        declared: Mapping[str, Sequence[int]] = getattr(part, _DECLARED, {})
        if isinstance(part, nn.MultiheadAttention) and part.in_proj_weight is not None:
            declared = {"in_proj_weight": [part.embed_dim] * 3}
        for name, outputs in declared.items():
            found[f"{path}.{name}".removeprefix(".")] = FusedMatrix(tuple(outputs))
    named, by_id = dict(model.named_parameters(remove_duplicate=False)), dict[int, FusedMatrix]()
    for name, each in found.items():
        shape = named[name].shape if name in named else ()
        if len(shape) != 2 or shape[each.is_transposed] % sum(each.outputs):  # noqa: PLR2004
            text = f"{name} is no matrix whose fused_matrices may be {[*each.outputs]}"
            raise ConfigError(f"model: {text}; it has the shape {list(shape)}")
        by_id[id(named[name])] = each
    return by_id
