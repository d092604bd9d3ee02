"""`train evaluate run=RUN`: a run's newest checkpoint on the held-out data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainer import durable
from trainer.assemble import assemble
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.weights import CHECKPOINTS, load_weights
from trainer.commands.prepare import held_out, prepare
from trainer.config import RunConfig
from trainer.errors import DataError
from trainer.evaluate import evaluate
from trainer.report.console import Screen
from trainer.world import World

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
    """
    loaded = CheckpointStore(folder / CHECKPOINTS).load(set_aside=False)
    parts = assemble(config, world)
    load_weights(parts.module, loaded.path)
    prepared = prepare(parts)
    data = held_out(prepared)
    if data is None:
        raise DataError("data.holdout: nothing is held out to evaluate on")
    metrics = evaluate(parts.kit().model, parts.objective, data, world)
    names = {f"eval_{name}": value for name, value in metrics.items()}
    durable.write_json(folder / EVALUATE_FILE, {"step": loaded.step, **names})
    screen = Screen()
    for message in loaded.messages:
        screen.warn(message)
    figures = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    screen.line(f"step {loaded.step}: held out ({len(data.lengths)} samples): {figures}")
    screen.close()
    return 0
