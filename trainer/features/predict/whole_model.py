"""Build the model of a checkpoint, whole on each rank."""

from __future__ import annotations

from trainer.assemble.hardware import resolve_precision
from trainer.assemble.module import build_model
from trainer.assemble.saved import Saved
from trainer.config.run_config import RunConfig
from trainer.core.world import World
from trainer.models.bind import AUTOCAST, bind
from trainer.parallel.base import Replicated


def whole_model(config: RunConfig, saved: Saved, world: World) -> Replicated:
    """Build it with its weights, to be called in the precision of the run."""
    terms = saved.terms
    module, _ = build_model(config, world, terms.given, stored=saved.stored)
    precision = resolve_precision(config, world, module, terms.contract)
    call = bind(module, autocast=AUTOCAST.get(precision), device_type=world.device.type)
    return Replicated(module, call, (), world)
