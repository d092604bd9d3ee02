"""Refuse ranks that do not begin with the same data and the same model.

Replicas that begin apart stay apart, and no later step shows it: gradients are summed all the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from trainer.core.bits import bits_of
from trainer.core.errors import ConfigError, DataError
from trainer.core.world import World
from trainer.data.view import DataView
from trainer.models.meta_start import Weights

WHOLE = 4096
"""Elements up to which a tensor is hashed as it is; of a larger one sums of rows of as many."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element, what its bits are read as."""


def check_data(world: World, data_sets: Sequence[DataView]) -> None:
    """Refuse ranks that read other samples. Collective.

    Args:
        world: all ranks.
        data_sets: what is trained and evaluated on.

    Raises:
        DataError: a rank reads other samples than the first, or cannot read one.
    """
    if world.long_timeout_group is None:
        return
    mine = [_hash(d.fingerprint, d.lengths.astype("<i8").tobytes()) for d in data_sets]
    faults = [fault for d in data_sets for fault in d.unreadable]
    answers = world.collect({"data": mine, "faults": faults[:1]})
    for rank, answer in enumerate(answers):
        if answer["data"] != answers[0]["data"]:
            raise DataError(_other_samples(rank, answer["faults"], answers[0]["faults"]))


def _other_samples(rank: int, faults: Sequence[str], faults_0: Sequence[str]) -> str:
    """Tell a rank whose files differ from one that cannot read a sample, or that rank 0 cannot."""
    if faults == faults_0:
        return f"data: rank {rank} reads other samples than rank 0: give every rank the same files"
    where, why = (rank, faults[0]) if faults else (0, faults_0[0])
    return f"data: rank {where} cannot read {why.removeprefix('data: ')}"


def check_model(
    world: World, module: nn.Module, weights: Weights | None, *, begins: bool = True
) -> None:
    """Refuse ranks whose models are not the same, bit for bit. Collective.

    Args:
        world: all ranks.
        module: on its device, not yet laid out.
        weights: what parameters on the meta device begin with.
        begins: whether the values count; if not, they are to be loaded.

    Raises:
        ConfigError: a rank built another model than the first.
    """
    if world.long_timeout_group is None:
        return
    forms, values = _forms(module), _values(module, weights) if begins else {}
    whole = [_hash(json.dumps(list(each.items()))) for each in (forms, values)]
    answers = world.collect(whole)
    different = next((rank for rank, each in enumerate(answers) if each != answers[0]), None)
    if different is None:
        return
    # Long lists travel only where they are read.
    lists = world.collect([list(forms.items()), list(values.items())])
    (forms_0, values_0), (forms_n, values_n) = lists[0], lists[different]
    if forms_n != forms_0:
        pairs = zip(forms_0, forms_n, strict=False)
        name = next((mine[0] for first, mine in pairs if first != mine), "fewer or more")
        raise ConfigError(
            f"model: rank {different} built other parameters than rank 0 ({name}): every rank must "
            "build the same ones in the same order"
        )
    name = _first_difference(dict(values_n), dict(values_0))
    raise ConfigError(
        f"model: weights differ between ranks: {name} of rank {different} is not that of rank 0; "
        "its constructor draws from a generator that `seed` does not govern, or depends on the "
        "rank: draw with torch's generator, or from a fixed seed"
    )


def _forms(module: nn.Module) -> dict[str, str]:
    named = chain(module.named_parameters(), module.named_buffers())
    return {name: f"{tuple(t.shape)} {t.dtype} {t.requires_grad}" for name, t in named}


def _values(module: nn.Module, weights: Weights | None) -> dict[str, str]:
    named = chain(module.named_parameters(), module.named_buffers())
    found = {name: _digest(tensor.detach()) for name, tensor in named if not tensor.is_meta}
    return found if weights is None else {**found, "a parameter": weights.digest()}


def _digest(tensor: Tensor) -> str:
    """Hash the bits of a tensor: of a large one sums of rows and of columns, where it lies."""
    if tensor.layout != torch.strided:
        return ""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    words = bits_of(real, INTEGERS[real.element_size()])
    if len(words) <= WHOLE:
        return _hash(words.cpu().numpy().tobytes())
    full = len(words) // WHOLE * WHOLE
    rows = words[:full].view(-1, WHOLE)
    sums = [rows.sum(dim, dtype=torch.int64) for dim in (0, 1)]
    return _hash(*(part.cpu().numpy().tobytes() for part in (*sums, words[full:])))


def _first_difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    names = [*theirs, *mine]
    return next((name for name in names if mine.get(name) != theirs.get(name)), None)


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()
