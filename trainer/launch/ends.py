"""Describe how each rank ended, and name in one line why the run did.

One supervisor sees all ranks of a local run, and names the one that the others followed. Under a
launcher each sees one rank, and prints how that ended.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, final

from trainer.config.secrets import without_secrets
from trainer.core import errors
from trainer.core.rank_progress import RankPosition
from trainer.core.run_folder import RunFolder
from trainer.core.user_code import described, excerpt
from trainer.report.run_status import keep_traceback

STACKS_SIGNAL = signal.SIGUSR2

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
    RUN = "run"  # a link to the first rank's run folder, which a launcher's others learn from it

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


def lost_rank(text: str, rank: int, hosts: Mapping[int, Sequence[str]]) -> str | None:
    """Read from what gloo says on one rank which other one it lost; None where it says none.

    `hosts` are what the host of each rank is called, the name that a person knows first.
    """
    found = _GLOO.search(text)
    if found is None:
        return None
    address = found["address"].removeprefix("::ffff:")
    there, host = list[str](), address
    for other, names in hosts.items():
        if address in names and other != rank:
            there.append(str(other))
            host = names[0]
    who = "another rank"
    if there:
        who = f"one of the ranks {', '.join(there)}" if there[1:] else f"rank {there[0]}"
    return f"lost {who} on {host} ({found['why'] or found['what']}), whose own output says why"


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
    text = lost_rank(text, rank, hosts) or text[:300]
    return {"crash": text + where, "code": 1}


def verdict(ended: Mapping[int, Ended], folder: Path, timeout_s: float) -> errors.TrainError | None:
    """Name why ranks ended: as one of them gave it, else by what is known; None where all is well.

    Of every rank, or of those of which there is word; stacks are looked for in the run folder.
    """
    failed = [*filter(attrgetter("has_failed"), ended.values())]
    if not failed:
        return None
    first = min(failed, key=lambda end: (_order(end), end.at))
    if "error" in first.report:
        text = first.report["text"]
        is_shared = failed[1:] and all(end.report.get("text") == text for end in failed)
        if first.rank and not is_shared:
            text = f"rank {first.rank}, {first.place}: {text}"
        return errors.error_from_dict({**first.report, "text": text})
    if first.is_killed:
        return errors.RankFailedError(_name_hung(failed, folder, timeout_s))
    return errors.RankFailedError(_name(first))


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


def _name(end: Ended) -> str:
    if "crash" in end.report:
        what = "failed in a collective" if end.place.waits else "failed"
        return f"rank {end.rank} {what} at {end.place}: {end.report['crash']}"
    if end.code >= 0:
        return f"rank {end.rank} exited with code {end.code} and no error report, at {end.place}"
    name = signal.Signals(-end.code).name
    return f"rank {end.rank} was killed by {name}{_SENT.get(name, '')}, at {end.place}"


def _name_hung(failed: list[Ended], folder: Path, timeout_s: float) -> str:
    """Name, of those that did not wait themselves, the one that is behind, or the longest there."""
    end = min(failed, key=lambda end: (end.place.waits, *end.place.progress, end.place.since))
    stacks = RunFolder(folder).traceback(end.rank)
    where = f"; what it was doing is in {stacks}" if stacks.exists() else ""
    limit_s, key = end.place.limit_s(timeout_s), "parallel.timeout_s"
    if end.place.is_first:
        key = f"ten times {key} in the first step"
    waited = f"for {limit_s:g} s ({key})" if limit_s != float("inf") else "in time"
    what = "waited for other ranks" if end.place.waits else "did not answer"
    return f"rank {end.rank} {what} {waited}, at {end.place}{where}"
