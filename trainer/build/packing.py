"""Try whether a model holds packed documents apart, before any are packed for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trainer.config.messages import clip
from trainer.core.micro_batch import Fields, to_device
from trainer.data.collate import PACKING
from trainer.data.loader import Loader, Request
from trainer.models.bind import bind
from trainer.models.boundaries import uses_flash
from trainer.objectives.base import ModelCall, logits_from
from trainer.tune.workload import restoring

TRIED_SAMPLES, TRIED_TOKENS = 256, 16  # looked at, and as long as which two of them are tried
LEAK_SHARE = 0.1  # of what packing without boundaries does, at most
TF32_EPS = 2.0**-10  # a GPU may round factors to this


def packing_fault(loader: Loader, module: nn.Module, call: ModelCall) -> str | None:
    """Compare two short documents of the data in one row with each alone; None where they agree.

    For models that are not known to take boundaries: attention that looks at `position_ids` alone
    may heed them or not, by architecture and kernel, and what is recurrent does not. It is run in
    the precision of its weights, unless its kernel needs that of the run, which `call` has, and
    left as it was.
    """
    name, data = type(module).__name__, loader.dataset
    distance = abs(data.lengths[:TRIED_SAMPLES] - TRIED_TOKENS)
    ids = tuple(distance.argsort(kind="stable")[:2].tolist())
    lengths = [int(data.lengths[i]) for i in ids]
    row = loader.load(Request(ids, 0, sum(lengths), packed=True))
    each = [loader.load(Request((i,), 0, n)) for i, n in zip(ids, lengths, strict=True)]
    unaware = {key: field for key, field in row.items() if key not in PACKING}
    weight = next(module.parameters())
    call = call if uses_flash(module) else bind(module)

    def logits(fields: Fields) -> Tensor:
        return logits_from(call, to_device(fields, weight.device))[0].double()

    try:
        with restoring(module), torch.no_grad():
            module.eval()
            alone = torch.cat([logits(fields) for fields in each])
            packed, mixed = logits(row), logits(unaware)
    except Exception as fault:
        return clip(f"{name} cannot take packed documents: {type(fault).__name__}: {fault}")
    scale = float(alone.abs().max()) or 1.0
    error, leak = (float((found - alone).abs().max()) / scale for found in (packed, mixed))
    eps = torch.finfo(torch.bfloat16 if uses_flash(module) else weight.dtype).eps
    eps = max(eps, TF32_EPS) if weight.is_cuda else eps
    if error <= min(math.sqrt(eps), LEAK_SHARE * leak):
        return None
    return (
        f"{name} does not hold packed documents apart: their logits are off by {error:.2g} of the "
        "largest, so its attention does not heed position_ids"
    )
