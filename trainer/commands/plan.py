"""`train plan`: the whole arithmetic of a run, on the screen and in plan.json. Starts nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from trainer.assemble import assemble
from trainer.commands.prepare import prepare
from trainer.commands.settle_parallel import settle_parallel
from trainer.commands.settle_sync import settle_sync
from trainer.commands.summary import summarize
from trainer.commands.train import PLAN_FILE
from trainer.config import RunConfig
from trainer.durable import write_record
from trainer.report.blocks import plan_block
from trainer.report.console import Screen
from trainer.world import World


def plan_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Resolve, print and write the plan.

    Args:
        config: composed and settled.
        folder: the run folder.
        world: all ranks.
        stop: not asked; it takes seconds.
    """
    prepared = prepare(settle_parallel(assemble(config, world)))
    plan = summarize(settle_sync(prepared, None, None, time.perf_counter))
    write_record(folder / PLAN_FILE, plan.to_json())
    screen = Screen(folder)
    screen.show(plan_block(plan, folder / PLAN_FILE))
    screen.close()
    return 0
