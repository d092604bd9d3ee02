"""Tensors that ranks hold in shards (FSDP2): gathered to be stored, dealt out to be restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:  # the import costs half a second, which a run without shards need not wait for
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is one rank's view of a distributed one."""
    return hasattr(tensor, "device_mesh")


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather sharded tensors on the CPU; others are passed on. Collective if there are any.

    Tied ones (the same object under several names) are gathered once and stay tied.
    """
    gathered: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if is_sharded(tensor) and id(tensor) not in gathered:
            gathered[id(tensor)] = tensor.full_tensor().cpu()
    return {name: gathered.get(id(tensor), tensor).detach() for name, tensor in tensors.items()}


def like(source: Tensor, target: Tensor) -> Tensor:
    """Shard a whole tensor, which every rank has, as `target` is; sends nothing."""
    if not is_sharded(target):
        return source
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 - as above

    here = source.to(target.device)
    return distribute_tensor(here, target.device_mesh, target.placements, src_data_rank=None)
