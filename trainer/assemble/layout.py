"""Find what hardware, model and data ask of every cut."""

from __future__ import annotations

from dataclasses import replace

from trainer.assemble.hardware import planned_device
from trainer.config.run_config import RunConfig
from trainer.core.errors import DataError
from trainer.core.micro_batch import Fields
from trainer.core.world import World
from trainer.data.loader import Loader
from trainer.data.samples import INPUT_IDS
from trainer.models.compilation import COMPILED_SHAPES
from trainer.models.facts import facts_of
from trainer.models.frozen import frozen_of
from trainer.plan.cut import Layout
from trainer.plan.partition import layout_for
from trainer.training.model import Model
from trainer.tune.packed_documents import needs_mask, packing_fault, packs


def find_layout(
    config: RunConfig, world: World, loader: Loader, model: Model
) -> tuple[Layout, Fields]:
    """Find what hardware, model and data ask of every cut, and one micro-batch as it asks."""
    module, data, device = model.module, loader.dataset, planned_device(config, world)
    request = loader.longest()
    example = row = loader.load(request)
    unfit = unpackable(model, loader, example)
    if unfit is None and config.accum.packed is not False:
        try:
            row = loader.load(replace(request, packed=True))
        except DataError as error:
            unfit = str(error)
    # Some models read a mask on the host in every call, and lose their fastest kernels to it.
    call = model.bind(module)
    omit_mask = facts_of(module).omit_mask
    if omit_mask and not world.on_main(lambda: needs_mask(loader, module, call)):
        omit_mask()
    packed = packs(
        config.accum.packed,
        module,
        unfit=unfit,
        device=device,
        precision=model.precision,
        fill=float(data.lengths.mean()) / max(1, request.pad_to),
        fault=lambda: world.on_main(lambda: packing_fault(loader, module, call)),
    )
    # One by one on a CPU, if that is proven too; a compiler would need a graph for all lengths.
    if packed and device.type == "cpu" and not config.compile:
        undo = facts_of(module).attend_by_document()
        if undo and world.on_main(lambda: packing_fault(loader, module, call)) is not None:
            undo()
    most_shapes = COMPILED_SHAPES if config.compile else None
    layout = layout_for(
        data.lengths[data.lengths.sample()],
        world_size=world.size,
        device_type=device.type,
        packed=packed,
        most_shapes=most_shapes,
    )
    if packed:
        return layout, row
    return layout, example


def unpackable(model: Model, loader: Loader, fields: Fields) -> str | None:
    """Say why samples cannot lie end to end, whatever the module takes; None where they can."""
    # What is beside the model is not tried, and may mix documents.
    is_whole = model.coupling.kind == "batch" or frozen_of(model.module) is not None
    if loader.dataset.facts.collate is not None or is_whole or INPUT_IDS not in fields:
        return "this data set or objective cannot use packed samples"
    return None
