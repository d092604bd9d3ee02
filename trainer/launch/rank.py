"""What `trainer.launch.supervise` starts once per rank: `python -m trainer.launch.rank JOB RANK`.

The job is a private folder. It says what to run, and takes what the supervisor wants to know: where
the rank is, and how it ended. Nothing is printed about an end; the supervisor says it, once.
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
from trainer.config.secrets import mask_logs, without_secrets
from trainer.core import durable
from trainer.core.errors import ConfigError, DataError, DoesNotFitError, TrainError, said
from trainer.core.launcher import Membership, is_loss
from trainer.core.rank_progress import Board
from trainer.core.signals import StopFlag, stop_signals
from trainer.report.run_status import keep_traceback
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
        size: number of ranks, on all machines.
        local_size: on this one.
        supervisor: its process id; when it is gone, ranks are to go as well.
        meeting: where the ranks find each other.
        listener: open file of a socket that the first rank is to listen at; None where it needs
            none.
    """

    config: dict[str, Any]
    folder: str
    path: list[str]
    size: int
    local_size: int
    supervisor: int
    meeting: str
    listener: int | None = None


def main(arguments: list[str]) -> NoReturn:
    """Run as one rank, and exit."""
    place, rank = Path(arguments[0]), int(arguments[1])
    job = Job(**json.loads((place / JOB_FILE).read_bytes()))
    _end_with(job.supervisor)
    sys.path[:] = job.path
    stacks = (place / f"stacks-{rank}.txt").open("w")
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
    pipes = tempfile.mkdtemp(prefix="pymp-", dir=place)
    multiprocessing.current_process()._config["tempdir"] = pipes  # type: ignore[attr-defined]
    code, told = 1, {}
    try:
        with stop_signals(ends_at_second=False) as stop:
            code = _work(job, place, rank, stop)
    except BaseException as error:
        told = told_of(error, Path(job.folder), rank)
        code = told["code"]
    told["at"] = time.monotonic()
    durable.write_json(place / f"end-{rank}.json", {**told, "code": code})
    sys.stdout.flush()
    sys.stderr.flush()
    if code or is_hanging():
        # Frames of the traceback hold process groups, and their destructors would abort.
        logging.shutdown()
        os._exit(code)
    sys.exit(0)


def _work(job: Job, place: Path, rank: int, stop: StopFlag) -> int:
    from trainer.launch.session import (  # noqa: PLC0415 - imports torch
        joined,
        run_rank,
        settle_bits,
        share_cores,
    )

    board = Board(place / f"board-{rank}")
    board.write(replace(board.read(), pid=os.getpid()))
    # Signals that came before this rank could hear them are in the file.
    stop.is_set |= (place / STOP_FILE).exists()
    config = RunConfig.model_validate_json(json.dumps(job.config))
    share_cores(job.local_size)
    settle_bits(config)
    member = Membership(
        rank=rank,
        size=job.size,
        local_rank=rank % job.local_size,
        local_size=job.local_size,
        meeting=job.meeting,
        listener=job.listener if rank == 0 else None,
        board=place / f"board-{rank}",
    )
    with joined(config, member) as world:
        return run_rank(config, Path(job.folder), world, stop)


def told_of(error: BaseException, folder: Path, rank: int) -> dict[str, Any]:
    """Describe an end for whoever says it; the whole traceback of a crash goes to `errors/`.

    So does that of what broke in the user's own code, of which the line has the last word only.
    """
    from trainer.core.out_of_memory import is_out_of_memory  # noqa: PLC0415 - imports torch

    if is_out_of_memory(error):
        error = DoesNotFitError(f"out of memory outside of micro-batches: {error!s:.200}")
    if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
        # PyTorch's handler of SIGCHLD raises wherever the rank is at that moment.
        text = " ".join(str(error).split())
        error = DataError(f"data: a loading process was lost: {text:.200}")
    if isinstance(error, TrainError):
        if isinstance(error, ConfigError) and error.__cause__ is not None:
            path = keep_traceback(error, folder, rank)
            return said(error) if path is None else {**said(error), "traceback": str(path)}
        return said(error)
    text = without_secrets(" ".join(f"{type(error).__name__}: {error}".split()), os.environ)
    lost = is_loss(error)
    keep_traceback(error, folder, rank)
    return {"lost" if lost else "crash": text[:300], "code": 1}


def _end_with(supervisor: int) -> None:
    """Let this process end when its supervisor does, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(supervisor,), daemon=True).start()
    if os.getppid() != supervisor:
        os._exit(1)


def _watch(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
