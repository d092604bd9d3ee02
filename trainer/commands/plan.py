"""`train plan`: the whole arithmetic of a run, on the screen and in plan.json. Starts nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from trainer.build.parts import assemble
from trainer.build.prepare import choose_sync, prepare
from trainer.build.summary import summarize
from trainer.commands.train import PLAN_FILE
from trainer.config.run_config import RunConfig
from trainer.core.durable import write_record
from trainer.core.world import World
from trainer.report.blocks import plan_block
from trainer.report.console import Screen


def plan_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Resolve, print and write the plan.

    Args:
        config: composed and checked.
        folder: the run folder.
        world: all ranks.
        stop: not asked; it takes seconds.
    """
    prepared = prepare(assemble(config, world))
    plan = summarize(choose_sync(prepared, None, None, time.perf_counter))
    write_record(folder / PLAN_FILE, plan)
    screen = Screen(folder)
    screen.show(plan_block(plan, folder / PLAN_FILE))
    screen.close()
    return 0
