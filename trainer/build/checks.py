"""Check, before training, that ranks begin the same, and that a loss nobody has tested is a sum.

Replicas that begin apart stay apart, and no later step shows it: gradients are summed all the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, product
from typing import Any

import torch
from torch import nn

from trainer.build.parts import Parts
from trainer.core.bits import bits_of
from trainer.core.errors import ConfigError, DataError, TrainError
from trainer.core.micro_batch import to_device
from trainer.core.world import World
from trainer.data.loader import Request
from trainer.data.view import DataView
from trainer.models.meta_start import Weights
from trainer.objectives.base import Objective, sums_of, weights_of
from trainer.objectives.model_loss import REDUCTIONS, ModelLoss
from trainer.plan.cut import IntArray
from trainer.tune.workload import restoring

# Relative; sums over different shapes differ by less, and a mean by a half
ROUNDING = {"fp32": 1e-4, "bf16": 0.02}
# Relative error from which on a loss is no sum, rather than one with a little beside it
LARGE = 0.02
# How many times smaller the error is under the settings that are meant
FAR = 10.0


def check_sums(parts: Parts) -> list[str]:
    """Compare the loss of two samples of the first step together with that of both apart.

    Only where an objective is the user's own, or the loss is the model's. Not collective; the
    declared state of the model is put back. Gives a warning where they differ; `train verify`
    measures the same, and more.

    Raises:
        ConfigError: the model's loss is no sum, with the settings under which it is.
    """
    objective, ids = parts.objective, parts.source.order.next(parts.source.order.start).ids
    is_tested = type(objective).__module__.startswith("trainer.")
    is_coupled = objective.scope != "sample" or objective.group_size > 1
    is_here = parts.weights is None and parts.config.command != "verify"
    if (is_tested and not isinstance(objective, ModelLoss)) or is_coupled or not is_here:
        return []
    lengths = parts.source.lengths[ids]
    pair = ids[[lengths.argmin(), len(ids) - 1 - lengths[::-1].argmax()]]
    # What fails on so few samples fails again, in full, in the step.
    with suppress(RuntimeError, ValueError, IndexError):
        limit, error = ROUNDING[parts.config.precision], _error(parts, objective, pair)
        if error <= limit or len(ids) == 1:
            return []
        padded = _error(parts, objective, pair, is_padded=True)
        is_padding = padded <= limit
        if isinstance(objective, ModelLoss) and not is_padding:
            _refuse(parts, objective, pair, padded)
        remedy = "sum over samples and divide by nothing"
        if is_padding:
            remedy = "padding changes it: mask it, or use samples of one length"
        return [
            f"objective: the loss of {type(objective).__name__} for two samples together is "
            f"{error:.2g} off that of both apart, so the step depends on the cut: {remedy}; train "
            "verify measures by how much"
        ]
    return []


def _refuse(parts: Parts, objective: ModelLoss, pair: IntArray, error: float) -> None:
    """Refuse a model's loss that is no sum, naming the settings under which it is one.

    Raises:
        ConfigError: always, but for a small error that no other settings explain.
    """
    shifts = (objective.causal, not objective.causal)
    others = [replace(objective, reduction=r, causal=c) for r, c in product(REDUCTIONS, shifts)]
    errors = [_error(parts, other, pair, is_padded=True) for other in others]
    best, is_better = others[errors.index(min(errors))], min(errors) * FAR <= error
    if error <= LARGE and not is_better:
        return
    typed = [
        f"objective.{key}={str(value).lower()}"
        for key, value in vars(best).items()
        if value != getattr(objective, key)
    ]
    remedy = f"type {' '.join(typed)}, or " if is_better else ""
    loss = "drops num_items_in_batch" if objective.reduction == "sum" else "takes another mean"
    raise ConfigError(
        f"objective.reduction={objective.reduction}: {type(parts.module).__name__} {loss}: its "
        "loss for two samples together is not that of both apart, so the step depends on the "
        f"cut: {remedy}take an objective that sums, such as next_token or classify"
    )


def _error(parts: Parts, objective: Objective, pair: IntArray, *, is_padded: bool = False) -> float:
    """Compute the relative difference between two samples together and apart."""
    longest = int(parts.source.lengths[pair].max()) if is_padded else 1
    with restoring(parts.module, objective), torch.no_grad():
        parts.module.eval()
        whole = _sum(parts, objective, pair, longest)
        apart = sum(_sum(parts, objective, ids, longest) for ids in (pair[:1], pair[1:]))
    error = abs(whole - apart) / (abs(apart) or 1.0)
    # A mean over a sample without a label is NaN; a loss that always is says nothing.
    return error if not math.isnan(error) else 0.0 if math.isnan(whole) else math.inf


def _sum(parts: Parts, objective: Objective, ids: IntArray, pad_to: int) -> float:
    lengths, packed = parts.source.lengths[ids], parts.layout.packed
    length = int(lengths.sum()) if packed else max(pad_to, int(lengths.max()))
    fields = parts.source.loader.load(Request(tuple(ids.tolist()), 0, length, packed))
    weights = weights_of(objective, fields)
    found = sums_of(objective, parts.call, to_device(fields, parts.world.device), weights)
    return float(sum(map(float, found.losses.values())))


def check_consistency(
    world: World,
    data_sets: Sequence[DataView],
    module: nn.Module,
    weights: Weights | None,
    *,
    begins: bool,
) -> None:
    """Refuse ranks that read other samples, or built another model, bit for bit. Collective.

    Unless the run `begins`, the model's values do not count: they are to be loaded.

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
    for rank, mine in enumerate(others, start=1):
        if (fault := _difference(rank, mine, first)) is not None:
            raise fault


def _difference(rank: int, mine: dict[str, Any], first: dict[str, Any]) -> TrainError | None:
    """Name how the facts of a rank differ from those of rank 0."""
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
    name = next((n for n, value in first["values"].items() if mine["values"][n] != value), None)
    if name is None:
        return None
    return ConfigError(
        f"model: weights differ between ranks: {name} of rank {rank} is not that of rank 0; its "
        "constructor draws from a generator that `seed` does not govern, or depends on the rank: "
        "draw with torch's generator, or from a fixed seed"
    )


def _digest(bits: bytes | memoryview) -> str:
    """Hash; a gigabyte takes a second."""
    return hashlib.blake2b(bits, digest_size=16).hexdigest()
