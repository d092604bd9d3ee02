"""Refuse ranks that do not begin with the same data and the same model.

Replicas that begin apart stay apart, and no later step shows it: gradients are summed all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from trainer.core.bits import bits_of
from trainer.core.errors import ConfigError, DataError, TrainError
from trainer.core.world import World
from trainer.data.view import DataView
from trainer.models.meta_start import Weights


def check_consistency(
    world: World,
    data_sets: Sequence[DataView],
    module: nn.Module,
    weights: Weights | None,
    *,
    begins: bool,
) -> None:
    """Refuse ranks that read other samples, or built another model, bit for bit. Collective.

    Args:
        world: all ranks.
        data_sets: what is trained and evaluated on.
        module: on its device, not yet laid out.
        weights: what parameters on the meta device begin with.
        begins: whether the model's values count; if not, they are to be loaded.

    Raises:
        ConfigError: a rank built another model than the first.
        DataError: a rank reads other samples than the first, or cannot read one.
    """
    if world.long_timeout_group is None:
        return
    named = list(chain(module.named_parameters(), module.named_buffers()))
    dense = [(n, t) for n, t in named if t.layout == torch.strided and not t.is_meta]
    values = {name: _digest(bits_of(t).cpu().numpy().data) for name, t in dense}
    if weights is not None:
        values["a parameter"] = weights.digest()
    facts = {
        "data": [
            f"{d.fingerprint} {_digest(d.lengths.astype('<i8').tobytes())}" for d in data_sets
        ],
        "unreadable": [fault for d in data_sets for fault in d.unreadable][:1],
        "forms": [[n, f"{tuple(t.shape)} {t.dtype} {t.requires_grad}"] for n, t in named],
        "values": values if begins else {},
    }
    first, *others = world.collect(facts)
    faults = (_difference(rank, mine, first) for rank, mine in enumerate(others, start=1))
    for fault in filter(None, faults):
        raise fault


def _difference(rank: int, mine: dict[str, Any], first: dict[str, Any]) -> TrainError | None:
    """Say how the facts of a rank differ from those of rank 0."""
    if mine["data"] != first["data"]:
        if mine["unreadable"] == first["unreadable"]:
            return DataError(
                f"data: rank {rank} reads other samples than rank 0: give every rank the same files"
            )
        where, why = (rank, mine) if mine["unreadable"] else (0, first)
        fault = why["unreadable"][0].removeprefix("data: ")
        return DataError(f"data: rank {where} cannot read {fault}")
    if mine["forms"] != first["forms"]:
        pairs = zip(first["forms"], mine["forms"], strict=False)
        name = next((own[0] for other, own in pairs if own != other), "fewer or more")
        return ConfigError(
            f"model: rank {rank} built other parameters than rank 0 ({name}): every rank must "
            "build the same ones in the same order"
        )
    for name, value in first["values"].items():
        if mine["values"][name] != value:
            return ConfigError(
                f"model: weights differ between ranks: {name} of rank {rank} is not that of rank "
                "0; its constructor draws from a generator that `seed` does not govern, or depends "
                "on the rank: draw with torch's generator, or from a fixed seed"
            )
    return None


def _digest(bits: bytes | memoryview) -> str:
    """Hash; a gigabyte takes a second."""
    return hashlib.blake2b(bits, digest_size=16).hexdigest()
