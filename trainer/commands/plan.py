"""`train plan`: print the whole arithmetic of a run, and start nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainer.assemble.build import assemble_resumed
from trainer.assemble.run_plan import prepare
from trainer.assemble.shown_samples import shown_samples
from trainer.assemble.summary import describe_run
from trainer.config.run_config import RunConfig
from trainer.core.durable import write_record
from trainer.core.rows import record_of
from trainer.core.run_folder import RunFolder
from trainer.core.world import World
from trainer.report.blocks import plan_block
from trainer.report.console import Screen
from trainer.tune.predict import CannotRunFake


def plan_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Print the whole arithmetic of a run, and write it into plan.json; start nothing.

    Of ranks that are not there this process works out what the first would do.
    """
    try:
        run, saved = assemble_resumed(config, world)
        run_plan = prepare(run, saved.cut)
    # Shapes alone do not do, as where a forward branches on the values of a tensor.
    except CannotRunFake:
        run, saved = assemble_resumed(config, world, with_values=True)
        run_plan = prepare(run, saved.cut)
    run = run_plan.run
    rows = describe_run(run_plan)
    if saved.loaded is not None:
        for feature in run.features:
            rows += feature.saved_rows(run, saved.loaded)
    rows += shown_samples(run, folder)
    plan = record_of(rows)
    write_record(folder / RunFolder.PLAN, plan)
    screen = Screen(folder)
    screen.name_checkpoint(saved.loaded)
    screen.show(plan_block(rows, plan, folder / RunFolder.PLAN))
    screen.close()
    return 0
