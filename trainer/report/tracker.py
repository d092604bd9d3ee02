"""Define what shows a run elsewhere: a tracker, and what it is given of the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

from trainer.report.journal import EVAL_SECONDS, Entry


@final
@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is given of a run."""

    id: str  # random; the same when the run goes on
    name: str | None  # as the user typed it
    group: str | None  # the sweep's folder; None outside of one
    config: Mapping[str, Any]  # plain values without secrets, as config.yaml has them
    plan: Mapping[str, Any]  # as plan.json has it
    run_folder: Path
    folder: Path  # the tracker's own, in the run folder
    outputs: Path  # where runs are
    after: int  # the last step that does not come again; -1 where the run begins
    warn: Callable[[str], None]  # with one line


class Tracker(ABC):
    """Shows what a run logs; all methods are called in one thread that no step waits for.

    One that raises is reported once and called no more; so is one that hangs when the run ends.
    """

    package: ClassVar[str] = ""  # imported before `start`; a run is refused where it is not there
    install: ClassVar[str] = ""  # what pip takes to bring it
    is_on: bool = True  # False: the run is not shown
    patience_s: float = 7.0  # for which the end of a run waits; a command is over within 10 s

    @abstractmethod
    def start(self, run: TrackedRun) -> int | None:
        """Begin to show a run, or go on with it.

        Steps behind `run.after` come again where a killed process logged them. So drop what is
        there of them, or pass over what comes twice.

        Returns:
            Another step to go on behind, such as -1 for all; None for `run.after`.
        """

    @abstractmethod
    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Show figures of a step, by names such as `train/loss`; an evaluation comes by itself."""

    def flush(self) -> None:  # noqa: B027 - may be left out
        """Bring what was logged to where it survives this process; called after new figures."""

    def attach(self, file: Path) -> None:  # noqa: B027 - may be left out
        """Show a file of the run: plan.json after `start`, report.html before `finish`."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:  # noqa: B027 - may be left out
        """End, with what result.json holds; None without an end. Not called in a killed process."""


def figures_of(entry: Entry) -> dict[str, float]:
    """Name the figures of an entry: `train/loss`, `eval/loss`; a step that was skipped counts 1."""
    kind = "eval" if EVAL_SECONDS in entry else "train"
    figures: dict[str, float] = {}
    for key, value in entry.items():
        name = f"{kind}/{key.removeprefix('eval_')}"
        if isinstance(value, str):
            # Why a step was skipped; trackers draw numbers.
            figures[name] = 1
        elif key != "step" and isinstance(value, int | float):
            figures[name] = value
    return figures
