"""`train`: from a config to a finished run folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from trainer.assemble.build import assemble_on_all
from trainer.assemble.open_run import open_run
from trainer.assemble.run_plan import prepare_on_main
from trainer.assemble.saved import Saved, check_terms
from trainer.assemble.step import own_parts
from trainer.assemble.summary import describe_run
from trainer.checkpoint.store import CheckpointStore
from trainer.commands.announce import announce, finish
from trainer.config.run_config import RunConfig
from trainer.core.errors import GO_ON, Preempted
from trainer.core.rows import record_of
from trainer.core.world import World
from trainer.report.run_status import to_go_on
from trainer.training.loop import refuse_unknown_metrics, train

_log = logging.getLogger(__name__)


def train_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Train, from the start or from the newest intact checkpoint."""
    # No clock of the day, which may be set while a run goes on.
    end = time.monotonic() + config.max_seconds
    try:
        _train(config, folder, world, lambda: stop() or time.monotonic() >= end)
    except Preempted as error:
        text = f"{error}: {GO_ON}{to_go_on(config, folder)}"
        if time.monotonic() >= end and not stop():
            text = f"max_time={config.max_time}: {text}"
        _log.info("%s", text)
        raise Preempted(text) from None
    return 0


def _train(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> None:
    """Build the run, go through its steps, and say how it ended. Collective."""
    started = time.perf_counter()
    world.end_if(stop())
    store = CheckpointStore.of(folder, keep=config.checkpoint.keep)
    loaded = store.load(world=world) if config.resume is not None else None
    saved = Saved.read(config, loaded, world)
    # Before data are read, which may take minutes: what is wrong with these is said at once.
    own = own_parts(config)
    run = assemble_on_all(config, world, saved)
    terms = check_terms(run, saved.terms)
    run_plan = prepare_on_main(run, saved.cut)
    plan = record_of(rows := describe_run(run_plan))
    with open_run(run_plan, plan, store, saved, terms, own, stop) as opened:
        refuse_unknown_metrics(opened)
        announce(opened, run_plan.run, rows, plan, saved)
        with run_plan.run.features.around_steps(opened, folder):
            train(opened)
        finish(opened, run_plan.run, plan, folder, started)
