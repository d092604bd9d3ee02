"""Run a command on ranks, again where one failed and that is allowed, and conclude why it ended.

Each rank is a process of this program, started by a command and never by a function, so that a
notebook, joblib or a sweep can start it too. Ranks of our own talk over the loopback interface
alone. Why this is not torchrun's: docs/decisions/local-ranks.md.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from trainer.checkpoint import lock
from trainer.config.run_config import RunConfig
from trainer.core import signals
from trainer.core.errors import Preempted, RankFailedError, TrainError
from trainer.launch.ends import Ended, Records, verdict
from trainer.launch.membership import Membership
from trainer.launch.rank import JOB_FILE, SHARED
from trainer.launch.start import READING
from trainer.launch.watch import Watch, start
from trainer.report import journal
from trainer.report.run_status import drop_empty, rank_log, recorded, saved_step, to_go_on

WORD_S = 2.0  # that the first rank's supervisor waits for the cause, where its rank has none
FIRST_S = 10.0  # that those of others wait for the first, which then says why the run ended


def supervise(
    config: RunConfig, folder: Path, members: Sequence[Membership], stop: signals.StopFlag
) -> int:
    """Run one command on some ranks, and give the exit code; after one failed again, where allowed.

    Args:
        config: composed and valid.
        folder: the run folder; it exists where the first rank is.
        members: the ranks to start: all of the run, or the one that a launcher meant.
        stop: whether a signal asked to stop.

    Raises:
        RankFailedError: a rank failed more often than `parallel.max_restarts` allows.
        TrainError: how the run ended otherwise, where it did not end well. Of one that this
            process is to print, though it is not the first, `is_own` is true.
    """
    is_ours, trains = members[0].is_ours, config.command == "train"
    most = config.parallel.max_restarts if trains and is_ours else 0
    restarts = 0
    with ExitStack() as opened:
        if members[0].rank == 0 and config.command not in READING:
            opened.enter_context(lock.hold(folder))
            opened.enter_context(recorded(folder))
        while True:
            try:
                _attempt(config, folder, members, stop)
                return 0
            except RankFailedError as error:
                step = saved_step(folder) if trains and is_ours else 0
                if restarts == most or stop():
                    command = to_go_on(config, folder)
                    saved = f"; saved up to step {step}: go on with: {command}" if step else ""
                    error.args = (f"{error}{saved}",)
                    raise
                restarts += 1
                counted = f"({restarts} of {most} restarts)"
                sys.stderr.write(f"train: {error}; starting again after step {step} {counted}\n")
            if step:
                config = config.model_copy(update={"resume": str(folder)})
            else:  # nothing is saved: the metrics begin anew
                journal.truncate_after(folder / journal.METRICS_FILE, 0)


def _attempt(
    config: RunConfig, folder: Path, members: Sequence[Membership], stop: signals.StopFlag
) -> None:
    """Start the ranks once, and wait for them.

    Raises:
        error: how it ended, where it did not end well.
    """
    again = to_go_on(config, folder)
    with tempfile.TemporaryDirectory(prefix="train-", ignore_cleanup_errors=True) as name:
        records, is_ours = Records(Path(name)), members[0].is_ours
        if is_ours:
            members = [replace(each, address=f"{name}/rendezvous") for each in members]
        job = {
            "config": config.model_dump(mode="json", by_alias=True),
            "folder": str(folder),
            "path": sys.path,
            "supervisor": os.getpid(),
            "members": {each.rank: asdict(each) for each in members},
        }
        (records.folder / JOB_FILE).write_text(json.dumps(job))
        timeout_s, shared = config.parallel.timeout_s, Records(records.folder / SHARED)
        watch = Watch(
            records=records,
            shared=shared,
            timeout_s=timeout_s,
            unbegun=f"{signals.UNBEGUN}: go on with: {again}",
            stop=stop,
            poll_s=0.05 if is_ours else 0.5,  # where a folder is looked at, too
        )
        try:
            for member in members:
                watch.children.append(start(records, member))
            watch.run()
        finally:
            # Where a launcher started us, the first rank's folder counts, once the ranks have met.
            place = shared.folder.resolve().parent if shared.folder.is_symlink() else folder
            watch.end(place)
            for log in filter(None, (rank_log(config, place, each.rank) for each in members)):
                drop_empty(log)
        if is_ours:
            error = verdict(watch.ended, place, timeout_s)
        else:
            own = watch.ended[members[0].rank]
            error = conclude(own, shared, members[0].size, place, timeout_s)
    if error is not None:
        raise error


def conclude(
    own: Ended, shared: Records, size: int, folder: Path, timeout_s: float
) -> TrainError | None:
    """Find out why the run ended, among supervisors that know of one rank each.

    That of the lowest rank that is left says it: `is_own` of its error is true.

    Args:
        own: how the rank ended that this process started.
        shared: where supervisors leave word; missing before the ranks have met.
        size: number of ranks.
        folder: the run folder.
        timeout_s: `parallel.timeout_s`.
    """
    error, is_first = verdict({own.rank: own}, folder, timeout_s), own.rank == 0
    if error is not None and not shared.folder.exists():
        error.is_own |= own.has_reason and "error" not in own.report
    elif error is not None and own.code != Preempted.exit_code:  # which every rank ends with
        shared.write(own)
        ended = _wait_for_word(own, shared, size)
        error = verdict(ended, folder, timeout_s) or error
        silent = sorted(set(range(size)) - ended.keys())
        if silent and "peer" in own.report and not any(end.has_reason for end in ended.values()):
            error.args = (f"rank {silent[0]} died or is out of reach: {error}",)
        error.is_own = min(ended) == own.rank and shared.folder.exists()
    if is_first:
        shutil.rmtree(shared.folder.resolve(), ignore_errors=True)
    return error


def _wait_for_word(own: Ended, shared: Records, size: int) -> dict[int, Ended]:
    """Read how other ranks ended, until one of them explains the end of this one.

    Those beside the first need only know that the first is there to say it.
    """
    ended, is_first = {own.rank: own}, own.rank == 0
    limit = time.monotonic() + (WORD_S if is_first else FIRST_S)
    while len(ended) < size and shared.folder.exists() and time.monotonic() < limit:
        if any(end.has_reason for end in ended.values()) if is_first else 0 in ended:
            break
        time.sleep(signals.TOGETHER_S)
        found = (shared.read(rank) for rank in range(size))
        ended |= {end.rank: end for end in found if end is not None}
    return ended
