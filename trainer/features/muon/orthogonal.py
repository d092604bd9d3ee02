"""Update matrices by their orthogonalised momentum, whole where ranks hold rows of them.

The update of `torch.optim.Muon` (Jordan et al. 2024, kellerjordan.github.io/posts/muon), and for
each matrix of a fused one on its own. Of shards every matrix goes to one rank, which orthogonalises
it and sends each its rows: 6 bytes of traffic per weight, and no rank computes what another does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, final

import torch
import torch.distributed as dist
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
        if found and is_sharded(found[0][0]):
            updates = self._of_shards(found)
        else:
            # One by one, so that one update is in memory.
            updates = (_update(self._momentum(*each), *each) for each in found)
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

    def _of_shards(self, found: Sequence[tuple[nn.Parameter, _Group]]) -> Iterator[Tensor]:
        """Give this rank's rows of every update. Collective."""
        mesh: Any = found[0][0].device_mesh  # type: ignore[attr-defined] # of a DTensor
        ranks = mesh.get_group(mesh.ndim - 1)
        size, rank = ranks.size(), ranks.rank()
        wide = torch.promote_types(found[0][0].dtype, torch.float32)
        sent_as = wide if wide == torch.float64 else torch.bfloat16
        # By its owner, the places of its matrices: each goes to who has the least work.
        owned, work = [list[int]() for _ in range(size)], [0] * size
        for place, (weight, _) in enumerate(found):
            owner = work.index(min(work))
            owned[owner].append(place)
            work[owner] += weight.numel() * min(weight.shape)
        rows = [_rows_by_rank(weight.shape, size) for weight, _ in found]
        shards = [self._momentum(*each).to(sent_as) for each in found]
        mine = owned[rank]
        sent = [[shards[place] for place in each] for each in owned]
        shapes = [[rows[place][source] for place in mine] for source in range(size)]
        with self.waiting():
            arrived = _exchange(sent, shapes, ranks, shards[0].new_empty(0))
        back = [list[Tensor]() for _ in range(size)]
        for place, pieces in zip(mine, zip(*arrived, strict=True), strict=True):
            update = _update(torch.cat(pieces), *found[place]).to(wide)
            counts = [num_rows for num_rows, _ in rows[place]]
            for target, part in zip(back, torch.split(update, counts), strict=True):
                target.append(part)
        shapes = [[rows[place][rank] for place in each] for each in owned]
        with self.waiting():
            returned = _exchange(back, shapes, ranks, shards[0].new_empty(0, dtype=wide))
        by_place = dict(zip(chain(*owned), chain(*returned), strict=True))
        return (by_place[place] for place in range(len(found)))


def _update(momentum: Tensor, weight: nn.Parameter, group: _Group) -> Tensor:
    """Orthogonalise a whole matrix, or each of those that are fused in it, and scale it."""
    fused = getattr(weight, FUSED, FusedMatrix((len(momentum),)))
    parts = list[Tensor]()
    for part in fused.split(momentum):
        rows, columns = part.shape
        scale = math.sqrt(max(1, rows / columns))
        if group["adjust_lr_fn"] == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(rows, columns))
        wide = torch.promote_types(weight.dtype, torch.float32)
        parts.append(orthogonalised(part, group["ns_steps"]).to(wide) * scale)
    update = torch.empty_like(momentum, dtype=parts[0].dtype)
    fused.write(parts, update)
    return update


def _rows_by_rank(shape: torch.Size, size: int) -> list[tuple[int, int]]:
    """Give the shape of each rank's shard: rows are divided evenly, rounded up."""
    most = -(-shape[0] // size)
    return [(max(0, min(most, shape[0] - rank * most)), shape[1]) for rank in range(size)]


def _exchange(
    sent: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, int]]],
    ranks: dist.ProcessGroup,
    empty: Tensor,
) -> list[list[Tensor]]:
    """Send each rank its tensors, and give those of each rank, of these shapes. Collective.

    `empty` is of their dtype and on their device.
    """
    # Of one row each, so that what has no element is sent as well
    rows = [[*map(torch.flatten, each)] for each in sent]
    flat = torch.cat([empty, *chain(*rows)])
    given = [sum(map(len, each)) for each in rows]
    sizes = [[*map(math.prod, each)] for each in shapes]
    taken = [*map(sum, sizes)]
    received = flat.new_empty(sum(taken))
    dist.all_to_all_single(received, flat, taken, given, group=ranks)
    found = list[list[Tensor]]()
    for each, own, part in zip(shapes, sizes, torch.split(received, taken), strict=True):
        found.append([*map(Tensor.view, torch.split(part, own), each)])
    return found
