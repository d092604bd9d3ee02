"""Update matrices by their orthogonalised momentum, whole where ranks hold rows of them.

The update of `torch.optim.Muon` (Jordan et al. 2024, kellerjordan.github.io/posts/muon), and for
each matrix of a fused one on its own. Of shards every matrix goes to one rank, which orthogonalises
it and sends each its rows: 6 bytes of traffic per weight, and no rank computes what another does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.core.tensors import is_sharded, local_part
from trainer.models.fused import FusedMatrix

FUSED = "fused_matrix"
"""Attribute of a parameter that is several matrices: its `FusedMatrix`."""

# Of the quintic polynomial, which is steepest at 0
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7

_Group = dict[str, Any]


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """Bring the singular values of `(rows, columns)` near 1, by iterations of Newton and Schulz.

    In bf16, but of float64, in which cuts are compared.
    """
    x = matrix if matrix.dtype == torch.float64 else matrix.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x


@final
class HiddenMatrices(Optimizer):
    """Steps matrices alone, each group by the settings of `Muon`."""

    # Entered where it waits for other ranks
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step. Collective where the matrices are in shards."""
        found = list[tuple[nn.Parameter, _Group]]()
        for group in self.param_groups:
            found += [(weight, group) for weight in group["params"] if weight.grad is not None]
        # One by one, so that one update is in memory.
        updates: Iterable[Tensor] = (_update(self._momentum(*each), *each) for each in found)
        if found and is_sharded(found[0][0]):
            updates = self._of_shards(found)
        for (weight, group), update in zip(found, updates, strict=True):
            here = local_part(weight)
            here.mul_(1 - group["lr"] * group["weight_decay"])
            here.add_(update, alpha=-group["lr"])

    def _momentum(self, weight: nn.Parameter, group: _Group) -> Tensor:
        """Move the momentum of what is here, and give what is to be orthogonalised."""
        state, rate = self.state[weight], group["momentum"]
        assert weight.grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight.grad)
        gradient, momentum = local_part(weight.grad), local_part(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - rate)
        return gradient.lerp(momentum, rate) if group["nesterov"] else momentum

    def _of_shards(self, found: Sequence[tuple[nn.Parameter, _Group]]) -> list[Tensor]:
        """Give this rank's rows of every update. Collective.

        The last ranks may have fewer rows of a matrix, or none; zeros are sent for these.
        """
        mesh: Any = found[0][0].device_mesh  # type: ignore[attr-defined] # of a DTensor
        ranks = mesh.get_group(mesh.ndim - 1)
        size, rank = ranks.size(), ranks.rank()
        # Each matrix goes to who has the least work.
        owners, work, shards = list[int](), [0] * size, list[Tensor]()
        for weight, group in found:
            owners.append(work.index(min(work)))
            work[owners[-1]] += weight.numel() * min(weight.shape)
            sent_as = torch.float64 if weight.dtype == torch.float64 else torch.bfloat16
            shard = self._momentum(weight, group).to(sent_as)
            shards.append(_with_rows(shard, math.ceil(len(weight) / size)))
        # All are sent before any is computed, so that no rank waits for the work of another.
        whole, updates, returned = dict[int, list[Tensor]](), dict[int, Tensor](), list[Tensor]()
        with self.waiting():
            for place, owner in enumerate(owners):
                if owner == rank:
                    whole[place] = [torch.empty_like(shards[place]) for _ in range(size)]
                dist.gather(shards[place], whole.get(place), group=ranks, group_dst=owner)
        for place, pieces in whole.items():
            weight, group = found[place]
            updates[place] = _update(torch.cat(pieces)[: len(weight)], weight, group)
        with self.waiting():
            for place, owner in enumerate(owners):
                weight, rows = found[place][0], len(shards[place])
                part = torch.empty_like(shards[place], dtype=_wide(weight))
                parts = None
                if owner == rank:
                    parts = [*torch.split(_with_rows(updates[place], rows * size), rows)]
                dist.scatter(part, parts, group=ranks, group_src=owner)
                returned.append(part[: len(local_part(weight))])
        return returned


def _update(momentum: Tensor, weight: nn.Parameter, group: _Group) -> Tensor:
    """Orthogonalise a whole matrix, or each of those that are fused in it, and scale it."""
    fused = getattr(weight, FUSED, FusedMatrix((len(momentum),)))
    parts = list[Tensor]()
    for part in fused.split(momentum):
        rows, columns = part.shape
        scale = math.sqrt(max(1, rows / columns))
        if group["adjust_lr_fn"] == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(rows, columns))
        parts.append(orthogonalised(part, group["ns_steps"]).to(_wide(weight)) * scale)
    update = torch.empty_like(momentum, dtype=parts[0].dtype)
    fused.write(parts, update)
    return update


def _with_rows(matrix: Tensor, count: int) -> Tensor:
    """Add rows of zeros, up to so many."""
    return F.pad(matrix, (0, 0, 0, count - len(matrix)))


def _wide(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)
