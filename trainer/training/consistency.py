"""Compare what ranks begin with: replicas that begin apart stay apart, and no step shows it."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn

from trainer.core.errors import ConfigError, DataError
from trainer.core.own_code import OWN_CODE
from trainer.core.tensors import bits_of
from trainer.core.world import World
from trainer.data.loader import Loader
from trainer.models.first_weights import FirstWeights


def check_consistency(
    world: World, loaders: Sequence[Loader], module: nn.Module, weights: FirstWeights | None = None
) -> None:
    """Refuse ranks with other classes, samples or models, bit for bit. Collective."""
    if world.long_timeout_group is None:
        return
    named = list(chain(module.named_parameters(), module.named_buffers()))
    dense = [(n, t) for n, t in named if t.layout == torch.strided and not t.is_meta]
    bits = {name: bits_of(t).cpu().numpy().data for name, t in dense}
    # A gigabyte takes a second.
    values = {name: hashlib.blake2b(b, digest_size=16).hexdigest() for name, b in bits.items()}
    values |= {name: each.identity() for name, each in (weights or {}).items()}
    facts = {
        "host": socket.gethostname(),
        "code": OWN_CODE.digests(),
        "data": [[e.dataset.fingerprint, e.dataset.lengths.digest] for e in loaders],
        "forms": [[n, f"{tuple(t.shape)} {t.dtype} {t.requires_grad}"] for n, t in named],
        "values": values,
    }
    # What a model's size times ranks is too much of: a digest shows whether all is equal.
    of_all = json.dumps({**facts, "host": ""}, sort_keys=True).encode()
    if len({*world.collect(hashlib.blake2b(of_all).hexdigest())}) == 1:
        return
    first, *others = world.collect(facts)
    for rank, mine in enumerate(others, start=1):
        # Some modules, of trackers say, are imported on the first rank alone.
        for name in sorted(mine["code"].keys() & first["code"].keys()):
            if mine["code"][name] != first["code"][name]:
                raise ConfigError(
                    f"{name}: its file on {mine['host']} (rank {rank}) differs from that on "
                    f"{first['host']} (rank 0); put the same file on every host"
                )
        if mine["data"] != first["data"]:
            text = f"rank {rank} has another data set than rank 0: give every rank the same files"
            raise DataError(f"data: {text}")
        if mine["forms"] != first["forms"]:
            pairs = zip(first["forms"], mine["forms"], strict=False)
            name = next((own[0] for other, own in pairs if own != other), "fewer or more")
            raise ConfigError(
                f"model: the parameters of rank {rank} differ from those of rank 0 ({name}): every "
                "rank must build the same ones in the same order"
            )
        differing = [n for n, value in first["values"].items() if mine["values"][n] != value]
        if differing:
            raise ConfigError(
                f"model: weights differ between ranks: {differing[0]} of rank {rank} is not that "
                "of rank 0; its constructor draws from a generator that `seed` does not govern, or "
                "depends on the rank: draw with torch's generator, or from a fixed seed"
            )
