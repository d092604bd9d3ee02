"""`train export run=RUN export.to=DIR`: weights for other programs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.build.instantiate import look_up
from trainer.build.parts import assemble
from trainer.checkpoint.store import CHECKPOINTS, CheckpointStore, Loaded
from trainer.checkpoint.weights import export, take_weights
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.world import World
from trainer.report.console import Screen


def export_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Write a checkpoint's weights as safetensors; those of transformers as it loads them.

    Args:
        config: the run's own.
        folder: the run.
        world: of one rank.
        stop: not asked; it takes seconds.

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
    to = export(loaded, Path(config.export.to), description, _hugging_face(config, loaded, world))
    screen = Screen()
    for message in loaded.messages:
        screen.warn(message)
    screen.line(f"step {loaded.step}: weights written to {to}")
    screen.close()
    return 0


def _hugging_face(config: RunConfig, loaded: Loaded, world: World) -> Any:  # noqa: ANN401
    """Build the model with its weights where it is one of transformers; else give None."""
    look_up(config.model, "model", config.trust)  # imports what makes it
    if all("transformers" not in target for _, target in config.model.targets("model")) and (
        "transformers" not in sys.modules
    ):
        return None
    module = assemble(config, world).module
    if not hasattr(module, "save_pretrained"):
        return None
    take_weights(module, loaded)
    return module
