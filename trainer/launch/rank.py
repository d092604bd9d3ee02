"""Run as one local rank: `python -m trainer.launch.rank FOLDER RANK`, which the supervisor starts.

The folder says what to run, and takes what the supervisor wants to know: where the rank is, and how
it ended. Nothing is printed about an end; the supervisor says it, once.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, final

from trainer.config.run_config import RunConfig
from trainer.config.secrets import mask_logs
from trainer.core.launcher import Membership
from trainer.core.rank_progress import Board
from trainer.core.signals import StopFlag, stop_signals
from trainer.launch.ends import Ended, Records, describe_end
from trainer.report.wandb import is_hanging

JOB_FILE = "job.json"
STOP_FILE = "stop"
STACKS_SIGNAL = signal.SIGUSR2

_SET_DEATH_SIGNAL = 1
"""`PR_SET_PDEATHSIG` of Linux's prctl."""


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """What a supervisor starts.

    Attributes:
        config: composed and valid, with the consent to classes of one's own.
        folder: the run folder.
        path: where Python looks for modules.
        size: number of ranks.
        supervisor: its process id; when it is gone, ranks are to go as well.
    """

    config: dict[str, Any]
    folder: str
    path: list[str]
    size: int
    supervisor: int


def main(arguments: list[str]) -> NoReturn:
    """Run as one rank, and exit."""
    records, rank = Records(Path(arguments[0])), int(arguments[1])
    job = Job(**json.loads((records.folder / JOB_FILE).read_bytes()))
    _end_with(job.supervisor)
    sys.path[:] = job.path
    stacks = records.stacks(rank).open("w")
    faulthandler.register(STACKS_SIGNAL, file=stacks)
    # Collectives abort the process when they find messages they did not expect.
    faulthandler.enable(file=stacks)
    logging.basicConfig(
        filename=Path(job.folder) / "train.log" if rank == 0 else None,
        format="[%(asctime)s][%(name)s][%(levelname)s] - %(message)s",
        level=logging.INFO,
    )
    mask_logs()
    # What loading processes talk through goes with the job, however this process ends.
    pipes = tempfile.mkdtemp(prefix="pymp-", dir=records.folder)
    multiprocessing.current_process()._config["tempdir"] = pipes  # type: ignore[attr-defined]
    try:
        with stop_signals(ends_at_second=False) as stop:
            report: dict[str, Any] = {"code": _work(job, records, rank, stop)}
    except BaseException as error:
        report = describe_end(error, Path(job.folder), rank)
    records.write(Ended.now(rank, records.place(rank), report))
    sys.stdout.flush()
    sys.stderr.flush()
    if report["code"] or is_hanging():
        # Frames of the traceback hold process groups, and their destructors would abort.
        logging.shutdown()
        os._exit(report["code"])
    sys.exit(0)


def _work(job: Job, records: Records, rank: int, stop: StopFlag) -> int:
    from trainer.launch.session import joined, run_rank  # noqa: PLC0415 - imports torch

    board = Board(records.board(rank))
    board.write(replace(board.read(), pid=os.getpid()))
    # Signals that came before this rank could hear them are in the file.
    stop.is_set |= (records.folder / STOP_FILE).exists()
    member = Membership(
        rank=rank,
        size=job.size,
        local_rank=rank,
        local_size=job.size,
        address=str(records.folder / "rendezvous"),
        board=records.board(rank),
    )
    config = RunConfig.model_validate_json(json.dumps(job.config))
    with joined(config, member) as world:
        return run_rank(config, Path(job.folder), world, stop)


def _end_with(supervisor: int) -> None:
    """Let this process end when its supervisor does, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    else:
        threading.Thread(target=_poll, args=(supervisor,), daemon=True).start()
    if os.getppid() != supervisor:
        os._exit(1)


def _poll(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
