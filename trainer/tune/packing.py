"""Try on two documents whether a model holds them apart when packed, and what padding does."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trainer.config.messages import clip
from trainer.core.micro_batch import Fields, to_device
from trainer.data.collate import ATTENTION_MASK, PACKING
from trainer.data.loader import Loader, Request
from trainer.models.bind import OMITTED, bind
from trainer.models.boundaries import uses_flash
from trainer.models.first_weights import is_on_meta
from trainer.objectives.base import ModelCall, logits_from
from trainer.tune.workload import restoring

TRIED_SAMPLES, TRIED_TOKENS = 256, 16  # looked at, and as long as which two of them are tried
LEAK_SHARE = 0.1  # of what seeing it all changes, at most
# What a model of transformers calls where it gets no mask
WARNS = "warn_if_padding_and_no_attention_mask"
TF32_EPS = 2.0**-10  # a GPU may round factors to this


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
    call = call if uses_flash(module) else bind(module)

    def logits(fields: Fields) -> Tensor:
        return logits_from(call, to_device(fields, next(module.parameters()).device))[0].double()

    try:
        with restoring(module), torch.no_grad():
            module.eval()
            alone = torch.cat([logits(fields) for fields in each])
            packed, mixed = logits(row), logits(unaware)
    except Exception as fault:
        return clip(f"{name} cannot take packed documents: {type(fault).__name__}: {fault}")
    scale = float(alone.abs().max()) or 1.0
    error, leak = (float((found - alone).abs().max()) / scale for found in (packed, mixed))
    if error <= min(_rounding(module), LEAK_SHARE * leak):
        return None
    return (
        f"{name} does not hold packed documents apart: their logits are off by {error:.2g} of the "
        "largest, so its attention does not heed position_ids"
    )


def needs_mask(loader: Loader, module: nn.Module, call: ModelCall) -> bool:
    """Compare two short documents with and without a mask over their second halves.

    Models of transformers read a mask on the host in every call, and lose their fastest kernels to
    it. Causal ones do without, as padding is on the right. Hiding first halves gives the scale.
    """
    can_do_without = hasattr(module, WARNS) and loader.makes_mask
    # A loss that balances experts leaves padding out by the mask.
    if not can_do_without or getattr(module.config, "output_router_logits", False):
        return True
    if is_on_meta(module):  # a fake mask could not be read, and takes next to no memory
        return False
    ids, lengths = _tried(loader)
    call = call if uses_flash(module) else bind(module)
    try:
        row = loader.load(Request(ids, 0, max(lengths)))
        fields = dict(to_device(row, next(module.parameters()).device))
        real = fields.pop(ATTENTION_MASK)
        early = real * (real.cumsum(1) * 2 <= real.sum(1, keepdim=True))
        masks = early, real - early
        with restoring(module), torch.no_grad():
            module.eval()
            plain = logits_from(call, fields).double()
            off = {m: logits_from(call, {**fields, ATTENTION_MASK: m}) - plain for m in masks}
        error, leak = (float(gap[mask > 0].abs().max()) for mask, gap in off.items())
    except Exception:  # it takes no padding, or not without a mask
        return True
    return not error < min(LEAK_SHARE * leak, _rounding(module) * float(plain.abs().max()))


def leave_out_mask(module: nn.Module) -> None:
    """Give a model no mask, from its next binding on."""
    setattr(module, OMITTED, {ATTENTION_MASK, *getattr(module, OMITTED, ())})
    for part in module.modules():  # GPT-2 would read ids on the host, to warn of padding
        vars(part)[WARNS] = lambda *_: None


def unpacked(example: Fields) -> Fields:
    """Take from a packed row of one document what says that it is one."""
    return {name: f for name, f in example.items() if name not in PACKING}


def _tried(loader: Loader) -> tuple[tuple[int, ...], list[int]]:
    lengths = loader.dataset.lengths
    ids = abs(lengths[:TRIED_SAMPLES] - TRIED_TOKENS).argsort(kind="stable")[:2].tolist()
    return tuple(ids), [int(lengths[i]) for i in ids]


def _rounding(module: nn.Module) -> float:
    weight = next(module.parameters())
    eps = torch.finfo(torch.bfloat16 if uses_flash(module) else weight.dtype).eps
    return math.sqrt(max(eps, TF32_EPS) if weight.is_cuda else eps)
