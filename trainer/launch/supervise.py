"""Start a run's local ranks, watch over them, and say in one line why they ended.

The ranks are processes of this program, started by a command and never by a function, so that a
notebook, joblib or a sweep can start them too. They find each other by a file in a folder of this
attempt, and talk over the loopback interface alone.

PyTorch's own launcher is not used. Its store listens on every interface, whatever address it is
given; it takes a rank that hangs for one that works; and it ends with code 1 for every cause and
says so in fifty lines (torch 2.13). Ranks that torchrun or srun started are joined instead: `join`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from trainer.checkpoint import lock
from trainer.config.run_config import RunConfig
from trainer.core import signals
from trainer.core.errors import ConfigError, RankLostError
from trainer.launch import children as processes
from trainer.launch.attempt_folder import attempt_folder
from trainer.launch.children import Child
from trainer.launch.ends import Records, verdict
from trainer.launch.rank import JOB_FILE, STOP_FILE, Job
from trainer.launch.watch import Asked, Watch
from trainer.report import journal
from trainer.report.run_status import rank_log, recorded, saved_step, to_go_on


def supervise(config: RunConfig, folder: Path, num_ranks: int) -> int:
    """Run one command on several ranks of this machine; after a lost rank again, where allowed.

    Args:
        config: composed and valid.
        folder: the run folder; it exists.
        num_ranks: how many.

    Returns:
        The exit code: 0.

    Raises:
        ConfigError: the parallel mode knows one rank only.
        RankLostError: a rank was lost more often than `parallel.max_restarts` allows.
        TrainError: how the run ended otherwise, where it did not end well.
    """
    if config.parallel.mode == "none":
        raise ConfigError(
            f"parallel.ranks={num_ranks}: parallel=none is one rank; use parallel=ddp"
        )
    # A last look for garbage takes long where a class of the user's own brought torch along.
    atexit.register(gc.freeze)
    trains, asked = config.command == "train", Asked()
    restarts_left = config.parallel.max_restarts if trains else 0
    with ExitStack() as opened:
        if trains:
            opened.enter_context(lock.hold(folder))
            opened.enter_context(recorded(folder))
        while True:
            try:
                _attempt(config, folder, num_ranks, asked)
                return 0
            except RankLostError as error:
                if not restarts_left or asked.at is not None:
                    step = saved_step(folder) if trains else 0
                    command = to_go_on(config, folder)
                    saved = f"; saved up to step {step}: go on with: {command}" if step else ""
                    raise RankLostError(f"{error}{saved}") from None
                restarts_left -= 1
                config = _prepare_restart(config, folder, restarts_left, error)


def _prepare_restart(
    config: RunConfig, folder: Path, restarts_left: int, error: RankLostError
) -> RunConfig:
    """Go on from the newest checkpoint; begin the metrics anew where nothing is saved."""
    from trainer.checkpoint.store import CHECKPOINTS, CheckpointStore  # noqa: PLC0415 - imports torch

    steps = CheckpointStore(folder / CHECKPOINTS).steps()
    most = config.parallel.max_restarts
    sys.stderr.write(
        f"train: {error}; starting again after step {steps[-1] if steps else 0} "
        f"({most - restarts_left} of {most} restarts)\n"
    )
    if steps:
        return config.model_copy(update={"resume": str(folder)})
    journal.truncate_after(folder / journal.METRICS_FILE, 0)
    return config


def _attempt(config: RunConfig, folder: Path, num_ranks: int, asked: Asked) -> None:
    """Start the ranks once, and wait for them.

    Raises:
        error: how it ended, where it did not end well.
    """
    job = Job(
        config=config.model_dump(mode="json", by_alias=True),
        folder=str(folder),
        path=sys.path,
        size=num_ranks,
        supervisor=os.getpid(),
    )
    again = to_go_on(config, folder, begins=True)
    with attempt_folder() as place, ExitStack() as opened:
        (place / JOB_FILE).write_text(json.dumps(asdict(job)))
        records, children = Records(place), list[Child]()
        watch = Watch(
            children=children,
            size=num_ranks,
            records=records,
            timeout_s=config.parallel.timeout_s,
            unbegun=f"{signals.UNBEGUN}: go on with: {again}",
            asked=asked,
        )
        opened.callback(processes.end, children, records, folder)
        with _forwarding(asked, place, children, trains=config.command == "train"):
            for rank in range(num_ranks):
                # For the user's own code, and for libraries that ask.
                numbers = {"RANK": rank, "LOCAL_RANK": rank}
                numbers |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
                variables = {key: str(value) for key, value in numbers.items()}
                log = rank_log(config, folder, rank)
                children.append(processes.start(log, records, rank, variables))
            watch.run()
    error = verdict(watch.ended, folder, config.parallel.timeout_s)
    if error is not None:
        raise error


@contextmanager
def _forwarding(
    asked: Asked, place: Path, children: Sequence[Child], *, trains: bool
) -> Iterator[None]:
    """Pass the first signal to stop on to every rank, where there is something to save.

    The watch ends them at once where there is nothing, or a second signal came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if asked.at is not None:
            asked.at_once |= time.monotonic() > asked.at + signals.TOGETHER_S
            return
        asked.at, asked.at_once = time.monotonic(), not trains
        (place / STOP_FILE).touch()
        for child in children:
            # Before it notes its process it does not listen, and will look for the file.
            child.signal(signal.SIGTERM)

    before = {each: signal.signal(each, on_signal) for each in signals.SIGNALS}
    if signals.was_asked():
        asked.at = time.monotonic()
        (place / STOP_FILE).touch()
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
