"""`train evaluate run=RUN`: a run's checkpoint on the held-out data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainer.build.consistency import check_consistency
from trainer.build.parts import assemble
from trainer.build.prepare import prepare_on_main
from trainer.checkpoint.store import CHECKPOINTS, CheckpointStore
from trainer.checkpoint.weights import take_weights
from trainer.config.run_config import RunConfig
from trainer.core.durable import write_record
from trainer.core.errors import DataError
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
    take_weights(parts.module, loaded)
    data = prepare_on_main(parts).parts.held_out
    if data is None:
        raise DataError("data.holdout: nothing is held out to evaluate on")
    metrics = evaluate(parts.kit().model, parts.objective, data, world)

    def report() -> None:
        screen = Screen()
        for message in loaded.messages:
            screen.warn(message)
        figures = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        screen.line(f"step {loaded.step}: held out ({len(data.lengths)} samples): {figures}")
        screen.close()
        names = {f"eval_{name}": value for name, value in metrics.items()}
        write_record(folder / EVALUATE_FILE, {"step": loaded.step, **names})

    world.on_main(report)
    return 0
