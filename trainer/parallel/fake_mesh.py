"""Make a mesh of ranks that are not there: collectives allocate as they would, and send nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def fake_mesh(size: int, replicas: int) -> Iterator[DeviceMesh]:
    """Give the mesh of a sharded model as its first rank sees it, in one process.

    May be entered by one rank of a real run while the others wait.

    Args:
        size: ranks to pretend.
        replicas: copies of the model; 1 shards over all ranks.

    Yields:
        The mesh, of the CPU, with a dimension `replicate` where there are several copies.
    """
    # Registers the backend. Its name says what it is for; nothing but its allocations counts here.
    import torch.testing._internal.distributed.fake_pg as _  # noqa: PLC0415, F401

    is_alone = not dist.is_initialized()
    if is_alone:
        dist.init_process_group("fake", rank=0, world_size=size)
    ranks = torch.arange(size).view(replicas, size // replicas)
    groups = [_group(ranks[:, 0]), _group(ranks[0])] if replicas > 1 else [_group(ranks[0])]
    try:
        yield DeviceMesh.from_group(
            groups if replicas > 1 else groups[0],
            "cpu",
            mesh=ranks if replicas > 1 else ranks[0],
            # Caches inside of DTensor take meshes of the same names for one and the same, and would
            # go on with this one's groups when they are gone.
            mesh_dim_names=("fake replicate", "fake shard")[-len(groups) :],
        )
    finally:
        for group in (None,) if is_alone else groups:
            dist.destroy_process_group(group)


def _group(ranks: torch.Tensor) -> Any:  # noqa: ANN401 - PyTorch does not say
    """Make a group of this process's own, of which the other ranks hear nothing."""
    return dist.new_group(ranks.tolist(), backend="fake", use_local_synchronization=True)
