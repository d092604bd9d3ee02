"""`train export`: write the weights of a checkpoint as safetensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

from trainer.assemble.instantiate import look_up
from trainer.assemble.model import build_model
from trainer.assemble.terms import read_terms
from trainer.checkpoint.store import CHECKPOINTS, CheckpointStore, Loaded
from trainer.checkpoint.weights import checkpoint_weights, export
from trainer.config.run_config import RunConfig, to_plain
from trainer.core.errors import ConfigError
from trainer.core.format import expanded
from trainer.core.world import World
from trainer.report.console import Screen, show_read


def export_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Write a checkpoint's weights as safetensors; those of transformers as it loads them.

    One process does it, whatever the number of ranks that saved; shards become whole tensors. It
    reads config and checkpoint: neither data nor a GPU need be there.

    Raises:
        ConfigError: nowhere to write to.
    """
    if config.export.to is None:
        raise ConfigError("export.to: needs a folder, e.g. export.to=weights")
    loaded = CheckpointStore(folder / CHECKPOINTS).load(config.checkpoint_step, set_aside=False)
    description = {
        "model": {"_target_": config.model.target, **config.model.params},
        "step": loaded.step,
    }
    if config.transforms:
        description["transforms"] = to_plain(config)["transforms"]
    to = export(loaded, expanded(config.export.to), description, _built(config, loaded, world))
    show_read(loaded, f"weights written to {to}")
    return 0


def _built(config: RunConfig, loaded: Loaded, world: World) -> nn.Module | None:
    """Build the model where weights are not stored, or it may be one of transformers; else None."""
    look_up(config.model, "model", config.trust)  # imports what makes it
    given, stored = read_terms(loaded).given, checkpoint_weights(loaded)
    if "transformers" not in sys.modules and not stored.frozen:
        return None
    try:
        return build_model(config, world, given, stored=stored)[0]
    except ConfigError as error:  # what it was loaded from may be gone
        if stored.frozen:
            raise
        Screen().warn(f"{error}: only the weights are written, not the layout of transformers")
        return None
