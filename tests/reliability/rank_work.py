"""What the harnesses let real ranks do: a whole run, without starting processes for it."""

import contextlib
import io
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lib.cli_support import prepared
from tests.lib.ranks_support import Ranks
from tests.reliability import lab
from trainer.config.run_config import RunConfig, from_text, to_text
from trainer.core.errors import TrainError
from trainer.core.run_folder import hold
from trainer.core.signals import StopFlag
from trainer.core.world import World
from trainer.launch.session import run_rank
from trainer.report.run_status import recorded
from trainer.training import loop


def run_as_rank(
    world: World, lines: tuple[str, ...] | RunConfig, folder: Path, how: dict[str, Any]
) -> dict[str, Any]:
    """Run what is typed, or a config, as one rank.

    Of `how`, `resume` goes on; `stop_after` asks the last rank to stop after that step; `screen` is
    a file for what the first one shows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stop, screen = StopFlag(), io.StringIO()
    try:
        config = lines if isinstance(lines, RunConfig) else lab.config(*lines)
        config = from_text(to_text(config))  # as it reaches a rank that a command starts
    except TrainError as error:
        return {"code": error.exit_code, "error": str(error)}
    if how.get("resume"):
        config = config.model_copy(update={"resume": str(folder)})
    step = loop.train_step

    def watched(context: Any, batch: Any, replanner: Any) -> Any:
        report = step(context, batch, replanner)
        stop.is_set |= world.rank == world.size - 1 and batch.step == how.get("stop_after")
        return report

    loop.train_step = watched
    try:
        with contextlib.ExitStack() as owned, contextlib.redirect_stdout(screen):
            if world.is_main:
                owned.enter_context(hold(folder))
                owned.enter_context(recorded(config, folder))
            run_rank(config, folder, world, stop)
    except TrainError as error:
        return {"code": error.exit_code, "error": str(error)}
    finally:
        loop.train_step = step
        if world.is_main and "screen" in how:
            Path(how["screen"]).write_text(screen.getvalue())
    return {"code": 0}


def on_ranks(ranks: Ranks, typed: Sequence[str], folder: str = "on-ranks") -> Path:
    """Let ranks take the run that is typed; gives its folder, beside a .txt of what it shows."""
    config, run = prepared(shlex.join(typed)).config, Path(folder).absolute()
    size, how = int(config.parallel.ranks), {"screen": run.with_suffix(".txt")}
    assert ranks.run(size, run_as_rank, config, run, how) == [{"code": 0}] * size
    return run
