"""`train export run=RUN export.to=DIR`: weights for other programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.weights import CHECKPOINTS, export
from trainer.config import RunConfig
from trainer.errors import ConfigError
from trainer.report.console import Screen
from trainer.world import World


def export_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Write a checkpoint's weights as safetensors.

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
    to = export(loaded, Path(config.export.to), description)
    screen = Screen()
    for message in loaded.messages:
        screen.warn(message)
    screen.line(f"step {loaded.step}: weights written to {to}")
    screen.close()
    return 0
