"""`train evaluate run=RUN` and `train export run=RUN export.to=DIR`: read a checkpoint of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.build.checks import check_consistency
from trainer.build.instantiate import look_up
from trainer.build.parts import assemble
from trainer.build.prepare import prepare_on_main
from trainer.checkpoint.state import load_model
from trainer.checkpoint.store import CHECKPOINTS, CheckpointStore, Loaded
from trainer.checkpoint.weights import export
from trainer.config.run_config import RunConfig
from trainer.core.durable import write_record
from trainer.core.errors import ConfigError, DataError
from trainer.core.world import World
from trainer.report.console import Screen
from trainer.training.evaluation import evaluate

EVALUATE_FILE = "evaluate.json"


def evaluate_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Evaluate, print, and write evaluate.json into the run.

    Args:
        config: the run's own.
        folder: the run.
        world: all ranks.
        stop: not asked.

    Raises:
        DataError: the data hold nothing out.
        SaveError: the figures, which are printed, cannot be written.
    """
    store = CheckpointStore(folder / CHECKPOINTS)
    loaded = store.load(config.checkpoint_step, set_aside=False, world=world)
    parts = assemble(config, world)
    check_consistency(world, parts.data_views, parts.module, parts.weights, begins=False)
    load_model(parts.module, loaded.weights, loaded.path)
    data = prepare_on_main(parts).parts.held_out
    if data is None:
        raise DataError("data.holdout: nothing is held out to evaluate on")
    metrics = evaluate(parts.kit().model, parts.objective, data, world)

    def report() -> None:
        figures = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        _show(loaded, f"held out ({len(data.lengths)} samples): {figures}")
        names = {f"eval_{name}": value for name, value in metrics.items()}
        write_record(folder / EVALUATE_FILE, {"step": loaded.step, **names})

    world.on_main(report)
    return 0


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
    _show(loaded, f"weights written to {to}")
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
    load_model(module, loaded.weights, loaded.path)
    return module


def _show(loaded: Loaded, text: str) -> None:
    """Print what was done with a checkpoint, after what reading it warned of."""
    screen = Screen()
    for message in loaded.messages:
        screen.warn(message)
    screen.line(f"step {loaded.step}: {text}")
    screen.close()
