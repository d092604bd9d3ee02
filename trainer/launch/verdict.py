"""Why the ranks of a run ended, in one line that names rank, place and cause."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from trainer.core.errors import RankLostError, TrainError, heard
from trainer.launch.children import Ended
from trainer.launch.stall import TOGETHER

WAITED = "Timed out"
"""What a collective says that waited for its whole time limit."""


def verdict(ended: Mapping[int, Ended], folder: Path, timeout_s: float) -> TrainError | None:
    """Say why the ranks ended; None where all ended well.

    Args:
        ended: every rank.
        folder: the run folder, for stacks and tracebacks.
        timeout_s: how long a rank may be waited for.

    Returns:
        The reason that one of them gave, or a `RankLostError` where none of them could give one.
    """
    failed = [end for end in ended.values() if end.failed]
    if not failed:
        return None
    first = min(failed, key=lambda end: (_rank_of_cause(end), end.at))
    if "error" in first.told:
        text = first.told["text"]
        shared = all(other.told.get("text") == text for other in failed)
        if first.rank and not shared:
            text = f"rank {first.rank}, {first.place}: {text}"
        if "traceback" in first.told:
            text += f"; its traceback is in {first.told['traceback']}"
        return heard({**first.told, "text": text})
    if "gone" in first.told:
        where = f"; rank 0 was at {ended[0].place}" if first.rank else ""
        return RankLostError(f"{first.told['gone']}{where}")
    return RankLostError(_how(first, ended, folder, timeout_s))


def _rank_of_cause(end: Ended) -> int:
    """Tell how likely an end is the cause of the others; the smallest is."""
    if "error" in end.told:
        return 0
    if "gone" in end.told or "crash" in end.told:
        return 1
    if "lost" in end.told:
        return 5 if WAITED in end.told["lost"] else 4
    if end.stopped:
        return 3
    # Collectives abort the process when they find messages they did not expect.
    return 2 if end.code == -signal.SIGABRT else 1


def _how(end: Ended, ended: Mapping[int, Ended], folder: Path, timeout_s: float) -> str:
    who, stacks = f"rank {end.rank}", folder / "errors" / f"rank{end.rank}.txt"
    if "crash" in end.told:
        return f"{who} failed at {end.place}: {end.told['crash']}; its traceback is in {stacks}"
    if end.code == -signal.SIGABRT and not end.stopped:
        places = ", ".join(f"rank {rank} at {other.place}" for rank, other in sorted(ended.items()))
        return (
            f"{who} was killed by SIGABRT, as collectives do when ranks fell out of step: {places}"
        )
    if end.code < 0 and not end.stopped:
        name = signal.Signals(-end.code).name
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"{who} was killed by {name}{hint}, at {end.place}"
    waited = any(WAITED in other.told.get("lost", "") for other in ended.values())
    if end.stopped or (waited and WAITED not in end.told.get("lost", "")):
        return _hung(ended, folder, timeout_s)
    if not end.told:
        return f"{who} ended with exit code {end.code} and without a word, at {end.place}"
    return f"{who} lost the others at {end.place}: {end.told.get('lost', 'no reason')}"


def _waited(end: Ended) -> int:
    """Tell how sure it is that a rank only waited for others."""
    if WAITED in end.told.get("lost", ""):
        return 3
    return 2 if end.place.waits else int(end.place.phase in TOGETHER)


def _hung(ended: Mapping[int, Ended], folder: Path, timeout_s: float) -> str:
    """Name, of those that did not wait themselves, the one that was longest where it is."""
    failed = [end for end in ended.values() if end.failed]
    end = min(failed, key=lambda end: (_waited(end), end.place.since))
    stacks = folder / "errors" / f"rank{end.rank}.txt"
    where = f"; what it was doing is in {stacks}" if stacks.exists() else ""
    return (
        f"rank {end.rank} did not answer for {timeout_s:g} s (parallel.timeout_s), "
        f"at {end.place}{where}"
    )
