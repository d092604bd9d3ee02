"""Change how a step is executed: documents in one row, blocks computed again, a compiled graph."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch.utils.checkpoint import CheckpointError

from trainer.assemble.layout import unpackable
from trainer.config.messages import clip
from trainer.core.errors import ConfigError
from trainer.features.matrix.compared import Reference, owner_of_worst, verdict_of
from trainer.features.matrix.matrix import AxisFound
from trainer.models.compilation import COMPILED_SHAPES, compile_model
from trainer.models.recompute import can_recompute, checkpoint_blocks
from trainer.training.context import StepContext
from trainer.tune.packed_documents import packing_fault, packs
from trainer.verify.case import copied
from trainer.verify.diagnose import compare_recomputed
from trainer.verify.find_module import examine
from trainer.verify.reduced import UNITS, as_step


def packing_axis(context: StepContext, own: Reference) -> AxisFound:
    """Lay documents end to end, and compare with padded ones."""
    case, loader, model = own.case, context.data.loader, context.model
    unfit, call = unpackable(model, loader, own.pieces[0].fields), model.bind(model.module)
    device, fault = context.world.device, partial(packing_fault, loader, model.module, call)
    precision = model.precision
    packs(True, model.module, unfit=unfit, device=device, precision=precision, fault=fault)
    plan = case.batch.plan
    packed, padded = (
        replace(case, batch=replace(case.batch, plan=replace(plan, packed=is_packed)))
        for is_packed in (True, False)
    )
    row = Reference.of(packed, UNITS)
    found = Reference.of(padded).judged(row.expected, "end to end in one row, with padded ones")
    if found.verdict == "not_exact":
        for name, reason in examine(packed)[1].modules[:1]:
            text = f"documents of one row change each other: {reason.text}"
            found = replace(found, module=name, reason=text)
    return found


def recomputation_axis(context: StepContext, own: Reference) -> AxisFound:
    """Compute every block again in backward, where casts by hand to float32 are not undone."""
    if not can_recompute(own.case.module):
        raise ConfigError("the model has no list of blocks (nn.ModuleList) to recompute")
    fault = ""
    for dtype in (own.case.dtype, torch.float32):
        case = replace(own.case, context=copied(context, dtype), dtype=dtype)
        try:
            errors, named = compare_recomputed(case, own.pieces, checkpoint_blocks)
        except CheckpointError as error:
            fault = clip(f"cannot be recomputed: {error}")
            continue
        module, reason = None, f"{own.samples}, every block with none; buffers too"
        if not errors.is_exact:
            module, reason = owner_of_worst(errors), "differs each time"
        for name, why in named[:1]:
            module, reason = name, why.text
        return verdict_of(errors, case.limit_dtype, reason, module)
    owner = type(own.case.module).__name__
    return AxisFound(verdict="not_exact", reason=fault, module=owner)


def compile_axis(own: Reference) -> AxisFound:
    """Compile one graph of the smallest shapes: of the two shortest samples."""
    if own.case.holds_draws:
        raise ConfigError("the model draws at random, by other numbers once it is compiled")
    case, lengths = own.case, own.case.batch.plan.lengths
    units = sorted(case.units(), key=lambda unit: int(lengths[unit].max()))[:2]
    pieces = as_step(case, [np.concatenate(units)])
    small = Reference(case, pieces, case.gradient(pieces))
    changed = replace(case, change=lambda module: compile_model(module, COMPILED_SHAPES))
    return small.judged(changed.gradient(pieces), "compiled with eager")
