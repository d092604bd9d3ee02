"""Describe how each rank ended, and name in one line why the run did.

One supervisor sees all ranks of a local run, and names the one that the others followed. Under a
launcher each sees one rank, and prints how that ended.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, final

from trainer.config.messages import first_of
from trainer.config.secrets import without_secrets
from trainer.core import durable, errors
from trainer.core.rank_progress import RankPosition
from trainer.core.run_folder import RunFolder
from trainer.core.user_code import described, excerpt
from trainer.report.run_status import keep_traceback

STACKS_SIGNAL = signal.SIGUSR2

GRACE_S = 1.0  # for others to notice that a rank failed, and to say how theirs ended
LOOK_S = 0.1  # how often to look for what another host says
ENDED, WAITED = ".json", ".waited.json"  # ends of files, by what a rank did when it ended

_SENT = {
    "SIGKILL": ", as the system often does when memory runs out",
    "SIGABRT": ", as collectives do that time out, or when ranks call different ones (a desync)",
}

# `[.../pair.cc:537] Read error [10.0.0.2]:32900: Connection reset by peer. This is typically ...`
_GLOO = re.compile(
    r"\.cc:\d+\] (?P<what>[A-Z][a-z ]+) \[(?P<address>[\w.:]+)\]:\d+(: (?P<why>[\w ]+))?"
)


@final
@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    rank: int
    code: int  # of its process; negative for the signal that killed it
    report: Mapping[str, Any]  # what `describe_end` made of its end, empty where it left none
    at: float  # in seconds since the epoch; clocks differ by less than time limits
    place: RankPosition  # where it was; one supervisor's ranks have one machine's clock
    is_killed: bool = False  # since it did not go on, or another one had ended

    @classmethod
    def now(cls, rank: int, place: RankPosition, report: Mapping[str, Any]) -> Ended:
        """Describe the end of a rank of this machine at this moment."""
        return cls(rank, report.get("code", 1), report, time.time(), place)

    @property
    def has_failed(self) -> bool:
        """Whether it did not end well; a rank that is done writes so."""
        return bool(self.code) or not self.report


@final
@dataclass(frozen=True)
class Records:
    """A folder in which ranks find what to run, and leave their progress and ends."""

    JOB = "job.json"  # what to run, as `_attempt` in supervise.py writes it
    JOINED = "joined.json"  # the first rank's run folder, and each rank's host, under a launcher

    folder: Path

    def rank_progress(self, rank: int) -> Path:
        """Name the file in which a rank notes its place."""
        return self.folder / f"progress-{rank}"

    def stacks(self, rank: int) -> Path:
        """Name the file in which a rank dumps its stacks."""
        return self.folder / f"stacks-{rank}.txt"

    def write(self, end: Ended) -> None:
        """Leave a rank's end; nobody asks for it where the folder is gone."""
        with suppress(OSError):
            (self.folder / f"end-{end.rank}.json").write_text(json.dumps(asdict(end)))

    def read(self, rank: int) -> Ended | None:
        """Read a rank's end; None where it left none."""
        try:
            found = json.loads((self.folder / f"end-{rank}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return Ended(**{**found, "place": RankPosition(**found["place"])})


def lost_rank(text: str, rank: int, hosts: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """Read from what gloo says on one rank which other one it lost; empty where it says none.

    Gives `crash`, which says so, and `lost`, which ranks it may be. `hosts` are what the host of
    each rank is called, the name that a person knows first.
    """
    found = _GLOO.search(text)
    if found is None:
        return {}
    address = found["address"].removeprefix("::ffff:")
    there, host = list[int](), address
    for other, names in hosts.items():
        if address in names and other != rank:
            there.append(other)
            host = names[0]
    who = "another rank"
    if there:
        listed = ", ".join(map(str, there))
        who = f"one of the ranks {listed}" if there[1:] else f"rank {listed}"
    return {"crash": f"lost {who} on {host} ({found['why'] or found['what']})", "lost": there}


def describe_end(
    error: BaseException, folder: Path, rank: int, hosts: Mapping[int, Sequence[str]]
) -> dict[str, Any]:
    """Describe an error: `code`, and what it is.

    That is `error` and `text` of what a user can act on, or `crash` of anything else. Tracebacks of
    crashes and of the user's code go to `errors/` of the run folder, which a rank on another
    machine may not have yet.
    """
    from trainer.core.out_of_memory import is_out_of_memory  # noqa: PLC0415 - imports torch

    text = " ".join(str(error).split())
    if is_out_of_memory(error):  # before the command began
        error = errors.DoesNotFitError(f"out of memory while the ranks joined: {text:.200}")
    is_crash = not isinstance(error, errors.TrainError)
    is_users = isinstance(error, errors.ConfigError) and error.__cause__ is not None
    keeps = is_crash or is_users or excerpt(error) != ""
    # Ranks on other machines know the folder when they have met.
    path, where = None, ""
    if keeps and folder.is_dir():
        path = keep_traceback(error, folder, rank)
    if path is not None:
        where = f"; its traceback is in {path}"
    if isinstance(error, errors.TrainError):
        report = errors.error_to_dict(error)
        return {**report, "text": report["text"] + where}
    text = without_secrets(described(error), os.environ)
    report = {"crash": text[:300], **lost_rank(text, rank, hosts), "code": 1}
    return {**report, "crash": report["crash"] + where}


def verdict(
    ended: Mapping[int, Ended], folder: Path, timeout_s: float, host: str = ""
) -> errors.TrainError | None:
    """Name why ranks ended: as one of them gave it, else by what is known; None where all is well.

    Of every rank, or of those of which there is word; stacks are looked for in the run folder. Of
    a run that a launcher started, `host` is where the ranks are.
    """
    on = f" on {host}" * bool(host)
    failed = [*filter(attrgetter("has_failed"), ended.values())]
    if not failed:
        return None
    first = min(failed, key=lambda end: (_order(end), end.at))
    if "error" in first.report:
        text = first.report["text"]
        is_shared = failed[1:] and all(end.report.get("text") == text for end in failed)
        if first.rank and not is_shared:
            text = f"rank {first.rank}{on}, {first.place}: {text}"
        return errors.error_from_dict({**first.report, "text": text})
    if first.is_killed:
        return errors.RankFailedError(_name_hung(failed, folder, timeout_s, on))
    return errors.RankFailedError(_name(first, f"rank {first.rank}{on}"))


def among_hosts(
    error: errors.TrainError | None, end: Ended, folder: Path, local_rank: int, hosts: Sequence[str]
) -> errors.TrainError | None:
    """Write how a launcher's rank ended, and name whom it lost; `hosts` are those of all ranks."""
    text = "ended" if error is None else str(error)
    if end.is_killed and end.place.waits:
        leave_end(folder, end, "")
        time.sleep(GRACE_S)
        text = who_is_lost(folder, hosts, end.rank, text)
        error = errors.RankFailedError(text)
    log_file = RunFolder(folder).host_log(socket.gethostname())
    with suppress(OSError), durable.open_log(log_file) as log:
        log.write(f"[{datetime.now():%Y-%m-%d %H:%M:%S}][rank {end.rank}] {text}\n")
    if error is None or isinstance(error, errors.Preempted):  # with which all ranks end
        return error
    leave_end(folder, end, text)
    if "lost" in end.report:
        why = find_end(folder, end.report["lost"], 2 * GRACE_S) or "its own output may say why"
        error = errors.RankFailedError(f"{text}: {why}")
    # Once ranks have met, all give most reasons; of its own are those of a rank's samples.
    is_shared = "error" in end.report and end.report["has_met"]
    is_shared &= end.place.phase not in {"data", "compute", "evaluation"}
    error.is_own = not is_shared or local_rank == 0
    return error


def who_is_lost(folder: Path, hosts: Sequence[str], own: int, text: str) -> str:
    """Name whom a rank waited for: one that says what else it did, or those that say nothing."""
    silent, elsewhere, left = list[str](), list[str](), set[Path]()
    with suppress(OSError):  # by their names alone: many ranks look at once
        left = {*_end_file(folder, own).parent.iterdir()}
    for rank, host in enumerate(hosts):
        if _end_file(folder, rank) in left:
            return find_end(folder, [rank], GRACE_S)
        has_waited = _end_file(folder, rank, WAITED) in left
        if not has_waited or host != hosts[own]:
            (elsewhere if has_waited else silent).append(f"rank {rank} on {host}")
    # Where all of them waited, the way between hosts is cut.
    lost = silent or elsewhere
    return f"no word from {first_of(lost)}: {text}" if lost else text


def leave_end(folder: Path, end: Ended, text: str) -> None:
    """Say in the run folder, which all hosts see, why a rank of this one ended."""
    has_waited = end.place.waits and (end.is_killed or "crash" in end.report)
    path = _end_file(folder, end.rank, WAITED if has_waited else ENDED)
    if folder.is_dir():
        with suppress(OSError):
            durable.make_folders(path.parent)
            durable.write_json(path, {"text": text})


def find_end(folder: Path, ranks: Sequence[int], wait_s: float) -> str:
    """Read why one of other hosts' ranks ended; empty where nobody says so in time."""
    until = time.monotonic() + wait_s
    while ranks and time.monotonic() < until:
        for rank, ended in product(ranks, (ENDED, WAITED)):
            if text := durable.read_json(_end_file(folder, rank, ended)).get("text"):
                return str(text)
        time.sleep(LOOK_S)
    return ""


def _end_file(folder: Path, rank: int, ended: str = ENDED) -> Path:
    return RunFolder(folder).traceback(rank).with_suffix(ended)


def _order(end: Ended) -> int:
    """Tell how likely an end is the cause of the others; the smallest is, and of equal the first.

    A rank that loses another raises in its next collective, in words that differ by library and
    version: where it was tells more than what it says.
    """
    if "error" in end.report:
        return 0
    if "crash" in end.report:
        return 4 if end.place.waits else 2
    if end.is_killed:
        return 5
    # Collectives abort the process when they find messages they did not expect.
    if end.code == -signal.SIGABRT:
        return 3
    return 1


def _name(end: Ended, rank: str) -> str:
    if "lost" in end.report:  # it waited, and the other one is who matters
        return f"{end.report['crash']}, at {end.place}"
    if "crash" in end.report:
        what = "failed in a collective" if end.place.waits else "failed"
        return f"{rank} {what} at {end.place}: {end.report['crash']}"
    if end.code >= 0:
        return f"{rank} exited with code {end.code} and no error report, at {end.place}"
    name = signal.Signals(-end.code).name
    return f"{rank} was killed by {name}{_SENT.get(name, '')}, at {end.place}"


def _name_hung(failed: list[Ended], folder: Path, timeout_s: float, on: str) -> str:
    """Name, of those that did not wait themselves, the one that is behind, or the longest there."""
    end = min(failed, key=lambda end: (end.place.waits, *end.place.progress, end.place.since))
    stacks = RunFolder(folder).traceback(end.rank)
    where = f"; what it was doing is in {stacks}" if stacks.exists() else ""
    limit_s, key = end.place.limit_s(timeout_s), "parallel.timeout_s"
    if end.place.is_first:
        key = f"ten times {key} in the first step"
    waited = f"for {limit_s:g} s ({key})" if limit_s != float("inf") else "in time"
    what = "waited for other ranks" if end.place.waits else "did not answer"
    return f"rank {end.rank}{on} {what} {waited}, at {end.place}{where}"
