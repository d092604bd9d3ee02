"""Bring rows of samples, which each rank has some of, to all ranks in sample order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.core.errors import ConfigError
from trainer.core.micro_batch import MicroBatch
from trainer.core.world import World

Rows = Mapping[str, Tensor]
"""Tensors by name whose first dimension is samples."""


def at_places(rows: Rows, places: Sequence[int], num_samples: int) -> Rows:
    """Put rows to the places of their samples among all, and zeros to others.

    So that a plain sum over ranks gathers them, however many each rank has, and their order does
    not depend on the cut. It sends twice what a gathering would.
    """
    at = torch.tensor(places)
    whole = {name: own.new_zeros((num_samples, *own.shape[1:])) for name, own in rows.items()}
    for name, tensor in whole.items():
        tensor[at] = rows[name]
    return whole


def at_positions(rows: Rows, micro_batches: Sequence[MicroBatch], num_samples: int) -> Rows:
    """Put the rows of a rank's micro-batches to the places of their samples in the global batch."""
    return at_places(rows, [i for m in micro_batches for i in m.positions], num_samples)


def summed(rows: Rows, world: World, name: str) -> Rows:
    """Add what ranks put to their places; a rank without samples may have none. Collective.

    Raises:
        ConfigError: ranks gave rows of different names, shapes or dtypes; names who made them.
    """
    forms = [
        [key, list(own.shape), str(own.dtype).removeprefix("torch.")]
        for key, own in sorted(rows.items())
    ]
    given = [each for each in world.collect(forms) if each]
    if any(each != given[0] for each in given):
        raise ConfigError(f"{name}: ranks gave rows of different names, shapes or dtypes: {given}")
    whole = {
        key: rows[key]
        if rows
        else torch.zeros(shape, dtype=getattr(torch, dtype), device=world.device)
        for key, shape, dtype in (given[0] if given else ())
    }
    for own in whole.values():
        world.sum(own)
    return whole
