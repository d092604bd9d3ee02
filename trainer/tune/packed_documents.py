"""Decide whether documents are packed: try on two whether a model holds them apart."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from trainer.config.messages import clip
from trainer.core import gpu
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import Fields, to_device
from trainer.data.collate import ATTENTION_MASK, PACKING
from trainer.data.loader import Loader, Request
from trainer.models.bind import AUTOCAST, BOUNDARIES, BOUNDARY_FIELDS, bind
from trainer.models.facts import facts_of
from trainer.models.first_weights import is_on_meta
from trainer.objectives.base import ModelCall, logits_from
from trainer.tune.workload import restoring

# Mean length over the longest; above it, as in windows of one length, padding costs nothing
FULL = 0.95
TRIED_SAMPLES, TRIED_TOKENS = 256, 16  # looked at, and as long as which two of them are tried
LEAK_SHARE = 0.1  # of what seeing it all changes, at most
TF32_EPS = 2.0**-10  # a GPU may round factors to this


def packs(
    asked: bool | Literal["auto"],
    module: nn.Module,
    *,
    unfit: str | None,
    device: torch.device,
    precision: str,
    fill: float = 0.0,
    fault: Callable[[], str | None] = lambda: None,
) -> bool:
    """Decide whether documents are packed end to end.

    Left to itself it is done where padding would cost something and the model has one kernel for
    all documents of a row, as it says itself. Never on a CPU: there documents are attended to one
    by one, which gains 1 % at 350 tokens in the mean, and less where they are shorter. `unfit` says
    why data or objective cannot be packed. `fill` is the mean length of the data over that of the
    longest sample. `fault` runs a model that is given boundaries in other words than `cu_seqlens`,
    and says why it cannot be packed.
    """
    names = inspect.signature(module.forward).parameters.keys()
    if not names & {BOUNDARIES, *BOUNDARY_FIELDS}:
        unfit = (
            f"forward of {type(module).__name__} takes no {BOUNDARIES}, so documents laid end to "
            "end would see each other"
        )
    if asked is False:
        return False
    if asked == "auto" and (fill > FULL or not has_kernel(module, device, precision)):
        return False
    if unfit is None and BOUNDARIES not in names:
        unfit = fault()
    if asked is True and unfit is not None:
        raise ConfigError(f"accum.packed=true: {unfit}; use accum.packed=false")
    return unfit is None


def has_kernel(module: nn.Module, device: torch.device, precision: str) -> bool:
    """Whether one kernel takes all documents of a row, which a model can be asked for."""
    weight = next(module.parameters(), torch.empty(0))
    dtype = AUTOCAST.get(precision, weight.dtype)
    if not gpu.is_gpu(device):
        return False
    if callable(ask := getattr(module, "has_packed_kernel", None)):
        return bool(ask(device, dtype))
    # Other kernels of a library's score every pair of positions of the row.
    return dtype in AUTOCAST.values() and facts_of(module).uses_flash is not False


def packing_fault(loader: Loader, module: nn.Module, call: ModelCall) -> str | None:
    """Compare two short documents of the data in one row with each alone; None where they agree.

    Attention that looks at `position_ids` alone may heed boundaries or not, by architecture and
    kernel. Run in the precision of the weights, unless the kernel needs that of the run's `call`.
    """
    name = type(module).__name__
    if is_on_meta(module):  # a plan of shapes, which says nothing of values
        return None
    ids, lengths = _tried(loader)
    row = loader.load(Request(ids, 0, sum(lengths), packed=True))
    each = [loader.load(Request((i,), 0, n)) for i, n in zip(ids, lengths, strict=True)]
    unaware = unpacked(row)
    if not facts_of(module).uses_flash:
        call = bind(module)

    def logits(fields: Fields) -> Tensor:
        return logits_from(call, to_device(fields, next(module.parameters()).device))[0].double()

    try:
        with restoring(module), torch.no_grad():
            module.eval()
            separate = torch.cat([*map(logits, each)])
            packed, mixed = logits(row), logits(unaware)
    except Exception as fault:
        return clip(f"{name} cannot take packed documents: {type(fault).__name__}: {fault}")
    scale = float(separate.abs().max()) or 1.0
    error = float((packed - separate).abs().max()) / scale
    leak = float((mixed - separate).abs().max()) / scale
    if error <= min(_rounding(module), LEAK_SHARE * leak):
        return None
    return (
        f"{name} does not hold packed documents apart: their logits are off by {error:.2g} of the "
        "largest, so its attention does not heed position_ids"
    )


def needs_mask(loader: Loader, module: nn.Module, call: ModelCall) -> bool:
    """Compare two short documents with and without a mask over their second halves.

    Some models read a mask on the host in every call, and lose their fastest kernels to it. Causal
    ones do without, as padding is on the right. Hiding first halves gives the scale.
    """
    if not loader.makes_mask:
        return True
    if is_on_meta(module):  # a fake mask could not be read, and takes next to no memory
        return False
    ids, lengths = _tried(loader)
    if not facts_of(module).uses_flash:
        call = bind(module)
    gaps = list[float]()
    try:
        row = loader.load(Request(ids, 0, max(lengths)))
        fields = dict(to_device(row, next(module.parameters()).device))
        real = fields.pop(ATTENTION_MASK)
        early = real * (real.cumsum(1) * 2 <= real.sum(1, keepdim=True))
        with restoring(module), torch.no_grad():
            module.eval()
            plain = logits_from(call, fields).double()
            for mask in (early, real - early):
                masked = logits_from(call, {**fields, ATTENTION_MASK: mask})
                gaps.append(float((masked - plain)[mask > 0].abs().max()))
    except Exception:  # it takes no padding, or not without a mask
        return True
    error, leak = gaps
    return not error < min(LEAK_SHARE * leak, _rounding(module) * float(plain.abs().max()))


def unpacked(example: Fields) -> Fields:
    """Take from a packed row of one document what says that it is one."""
    fields = dict(example)
    for name in PACKING:
        fields.pop(name, None)
    return fields


def _tried(loader: Loader) -> tuple[tuple[int, ...], list[int]]:
    lengths = loader.dataset.lengths
    ids = abs(lengths[:TRIED_SAMPLES] - TRIED_TOKENS).argsort(kind="stable")[:2].tolist()
    return tuple(ids), [int(lengths[i]) for i in ids]


def _rounding(module: nn.Module) -> float:
    weight = next(module.parameters())
    dtype = weight.dtype
    # The kernel takes nothing wider than half precision.
    if facts_of(module).uses_flash:
        dtype = torch.bfloat16
    eps = torch.finfo(dtype).eps
    if gpu.is_gpu(weight.device):
        eps = max(eps, TF32_EPS)
    # Half of the digits of the precision.
    return math.sqrt(eps)
