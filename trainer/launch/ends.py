"""Describe how each rank ended, and name in one line why the run did.

The ranks of one attempt share a folder. Each has a board in it, which says where the rank is, and a
file in which it describes its end. The supervisor of local ranks reads them; of ranks that torchrun
or srun started, the first rank does.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from trainer.config.secrets import without_secrets
from trainer.core import durable
from trainer.core.errors import (
    ConfigError,
    DataError,
    DoesNotFitError,
    RankLostError,
    TrainError,
    error_from_dict,
    error_to_dict,
)
from trainer.core.launcher import is_peer_failure
from trainer.core.rank_progress import Board, Phase, Place
from trainer.report.run_status import keep_traceback

TIMED_OUT = "Timed out"
"""What a collective says that waited for its whole time limit."""

_COLLECTIVES: tuple[Phase, ...] = ("agree", "reduce")
"""Phases of a step that are nothing but collectives."""


@final
@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a rank ended.

    Attributes:
        code: of its process; negative for the signal that killed it.
        report: what `describe_end` made of its end, empty where it left none; or `gone`, the whole
            reason, where nothing is left of the rank to ask.
        at: when, in seconds since the epoch.
        place: where it was.
        since: when it came there, in seconds since the epoch; clocks of machines differ by less
            than time limits.
        is_killed: whether it was ended because it did not go on, or since another one had ended.
    """

    rank: int
    code: int
    report: Mapping[str, Any]
    at: float
    place: Place
    since: float
    is_killed: bool = False

    @classmethod
    def now(
        cls, rank: int, place: Place, report: Mapping[str, Any], *, is_killed: bool = False
    ) -> Ended:
        """Describe the end of a rank of this machine at this moment."""
        at = time.time()
        return cls(
            rank=rank,
            code=report.get("code", 1),
            report=report,
            at=at,
            place=place,
            since=at - (time.monotonic() - place.since),
            is_killed=is_killed,
        )

    @property
    def has_failed(self) -> bool:
        """Whether it did not end well; a rank that is done says so."""
        return bool(self.code) or not self.report

    @property
    def has_timed_out(self) -> bool:
        """Whether a collective of this rank waited for its whole time limit."""
        return TIMED_OUT in self.report.get("lost", "")


@final
@dataclass(frozen=True)
class Records:
    """The folder in which the ranks of an attempt leave their boards and ends."""

    folder: Path

    def board(self, rank: int) -> Path:
        """Name the file of a rank's board."""
        return self.folder / f"board-{rank}"

    def stacks(self, rank: int) -> Path:
        """Name the file in which a local rank dumps its stacks."""
        return self.folder / f"stacks-{rank}.txt"

    def place(self, rank: int) -> Place:
        """Read where a rank is, or was."""
        path = self.board(rank)
        return Board(path).read() if path.exists() else Place()

    def write(self, end: Ended) -> None:
        """Leave a rank's end; nobody asks for it where the folder is gone."""
        with suppress(OSError, TrainError):
            durable.write_json(self.folder / f"end-{end.rank}.json", asdict(end))

    def read(self, rank: int) -> Ended | None:
        """Read a rank's end; None where it left none."""
        try:
            found = json.loads((self.folder / f"end-{rank}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return Ended(**{**found, "place": Place(**found["place"])})


def describe_end(error: BaseException, folder: Path, rank: int) -> dict[str, Any]:
    """Describe an error for whoever reports it; the traceback of a crash goes to `errors/`.

    So does that of what broke in the user's own code, of which the line has the last word only.

    Returns:
        `code`, and `error` with `text` of what a user can act on, or `lost` of a collective that
        another rank left, or `crash` of anything else.
    """
    from trainer.core.out_of_memory import is_out_of_memory  # noqa: PLC0415 - imports torch

    if is_out_of_memory(error):
        error = DoesNotFitError(f"out of memory outside of micro-batches: {error!s:.200}")
    text = " ".join(str(error).split())
    if isinstance(error, RuntimeError) and "DataLoader worker" in text:
        # PyTorch's handler of SIGCHLD raises wherever the rank is at that moment.
        error = DataError(f"data: a loading process was lost: {text:.200}")
    if not isinstance(error, TrainError):
        keep_traceback(error, folder, rank)
        text = without_secrets(f"{type(error).__name__}: {text}", os.environ)
        return {"lost" if is_peer_failure(error) else "crash": text[:300], "code": 1}
    if isinstance(error, ConfigError) and error.__cause__ is not None:
        path = keep_traceback(error, folder, rank)
        return (
            error_to_dict(error)
            if path is None
            else {**error_to_dict(error), "traceback": str(path)}
        )
    return error_to_dict(error)


def verdict(ended: Mapping[int, Ended], folder: Path, timeout_s: float) -> TrainError | None:
    """Name why the ranks ended; None where all ended well.

    Args:
        ended: every rank.
        folder: the run folder, for stacks and tracebacks.
        timeout_s: `parallel.timeout_s`.

    Returns:
        The reason that one of them gave, or a `RankLostError` where none of them could give one.
    """
    failed = [end for end in ended.values() if end.has_failed]
    if not failed:
        return None
    first = min(failed, key=lambda end: (_order(end), end.at))
    if "error" in first.report:
        text = first.report["text"]
        if first.rank and any(end.report.get("text") != text for end in failed):
            text = f"rank {first.rank}, {first.place}: {text}"
        if "traceback" in first.report:
            text += f"; its traceback is in {first.report['traceback']}"
        return error_from_dict({**first.report, "text": text})
    if "gone" in first.report:
        where = f"; rank 0 was at {ended[0].place}" if first.rank else ""
        return RankLostError(f"{first.report['gone']}{where}")
    is_unlike = "lost" in first.report and not first.has_timed_out
    if first.is_killed or (is_unlike and any(end.has_timed_out for end in failed)):
        return RankLostError(_name_hung(failed, folder, timeout_s))
    return RankLostError(_name_failed(first, ended, folder))


def _order(end: Ended) -> int:
    """Tell how likely an end is the cause of the others; the smallest is."""
    if "error" in end.report:
        return 0
    if "gone" in end.report or "crash" in end.report:
        return 1
    if "lost" in end.report:
        return 5 if end.has_timed_out else 4
    if end.is_killed:
        return 3
    # Collectives abort the process when they find messages they did not expect.
    return 2 if end.code == -signal.SIGABRT else 1


def _name_failed(end: Ended, ended: Mapping[int, Ended], folder: Path) -> str:
    who = f"rank {end.rank}"
    if "crash" in end.report:
        path = folder / "errors" / f"rank{end.rank}.txt"
        return f"{who} failed at {end.place}: {end.report['crash']}; its traceback is in {path}"
    if "lost" in end.report:
        return f"{who} lost the others at {end.place}: {end.report['lost']}"
    if end.code == -signal.SIGABRT:
        places = ", ".join(f"rank {rank} at {other.place}" for rank, other in sorted(ended.items()))
        return (
            f"{who} was killed by SIGABRT, as collectives do when ranks fell out of step: {places}"
        )
    if end.code < 0:
        name = signal.Signals(-end.code).name
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"{who} was killed by {name}{hint}, at {end.place}"
    return f"{who} ended with exit code {end.code} and without a word, at {end.place}"


def _name_hung(failed: list[Ended], folder: Path, timeout_s: float) -> str:
    """Name, of those that did not wait themselves, the one that was longest where it is."""

    def order(end: Ended) -> tuple[int, float]:
        if end.has_timed_out:
            return 3, end.since
        return 2 if end.place.waits else int(end.place.phase in _COLLECTIVES), end.since

    end = min(failed, key=order)
    stacks = folder / "errors" / f"rank{end.rank}.txt"
    where = f"; what it was doing is in {stacks}" if stacks.exists() else ""
    limit_s = end.place.limit_s(timeout_s)
    key = "parallel.timeout_s"
    if end.place.is_first:
        key = f"ten times {key} in the first step"
    waited = f"for {limit_s:g} s ({key})" if limit_s != float("inf") else "in time"
    return f"rank {end.rank} did not answer {waited}, at {end.place}{where}"
