"""Read what a run left behind, whole or not, for a page."""

from __future__ import annotations

import math
import os
import re
import shlex
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeGuard, final

from trainer.config.messages import flat
from trainer.config.secrets import without_secrets
from trainer.core.format import number, shown_path
from trainer.core.run_folder import RunFolder
from trainer.report import journal
from trainer.report.journal import Entry

SHOWN_SAMPLES = 8  # with the largest loss, that are shown
LARGEST = 1e300
_QUOTED = re.compile(r"^([^=]+=)'([\w./:~-]*)'$")


@final
class SavedRun:
    """What a page shows of a run, read once."""

    def __init__(self, folder: Path) -> None:
        files = RunFolder(folder)
        self.folder = folder
        # The resolved config by dotted keys; empty where there is none
        self.config: dict[str, Any] = flat(files.config())
        # The user's word for the run, else that of its folder
        self.name = str(self.config.get("name") or folder.name)
        # The command line, without secrets; of the latest start, where the run went on. Without
        # Hydra's own quotes around a path, which a shell does not need
        words = [_QUOTED.sub(r"\1\2", word) for word in files.typed()]
        self.typed = without_secrets(shlex.join(["train", *words]), os.environ)
        # How it goes, or ended
        self.status = files.status()
        self.state = str(self.status.get("state", "unknown"))
        # What was planned, and the figures of a run that completed; one that went on has some of
        # before
        self.plan = files.record(RunFolder.PLAN)
        self.result = files.record(RunFolder.RESULT) if self.state == "completed" else {}
        counts = self.plan.get("num_tokens"), self.plan.get("num_samples")
        # What lengths count
        self.noun = "sample" if counts[0] == counts[1] and is_number(counts[0]) else "token"
        self._entries = _read(folder / RunFolder.METRICS)
        self.steps = [entry for entry in self._entries if "loss" in entry]
        self.evaluations = [entry for entry in self._entries if "loss" not in entry]
        self.last_step: int = self.steps[-1]["step"] if self.steps else 0  # in metrics.jsonl
        times = (entry.get("seconds", entry.get("eval_seconds")) for entry in self._entries)
        self.seconds = math.fsum(filter(is_number, times))  # in steps and evaluations
        # The samples with the largest loss, with texts where `train evaluate` wrote them
        worst = as_list(files.record(RunFolder.EVALUATION).get("worst"))
        self.worst = [entry for entry in worst if "loss" in as_mapping(entry)][:SHOWN_SAMPLES]
        # What prompts gave at the last evaluation that continued any
        texts = _read(folder / RunFolder.TEXTS)
        self.generated = [entry for entry in texts if entry["step"] == texts[-1]["step"]]
        self.started: str | None = None  # in the time of this machine
        with suppress(OSError, OverflowError, ValueError):
            if began := files.began():
                self.started = datetime.fromtimestamp(began).strftime("%Y-%m-%d %H:%M")

    def continuation(self) -> list[str]:
        """Say from which run and step it went on, where it did."""
        files, found = RunFolder(self.folder), list[str]()
        fork = files.record(RunFolder.FORK)
        # A resumed run's config has none.
        words = (word.partition("=") for word in files.typed(first=True))
        typed = {key: value.strip("'") for key, _, value in words}
        init = self.config.get("init") or typed.get("init") or "null"
        step, resumed = fork.get("step"), self.plan.get("resumed_step")
        if init != "null":
            found.append(f"begun with the weights of {shown_path(Path(str(init)))}")
        if run := fork.get("run"):
            found.append(f"forked from {shown_path(Path(str(run)))} at step {step}")
        if is_number(resumed) and resumed != step:
            none = ", and took none since" if resumed == self.last_step else ""
            found.append(f"resumed after step {number(resumed)}{none}")
        elif resumed is None and (self.folder / RunFolder.RESUMED).is_dir():
            was_new = "resumed_step" in self.plan
            found.append("begun again: nothing had been saved" if was_new else "resumed")
        return found

    def peak_bytes(self) -> float | None:
        """Give the most memory measured."""
        return numbers_of(self.result).get("peak_bytes") or self.last("memory_bytes")

    def last(self, name: str) -> float | None:
        """Give the last number of a metric; None where there is none."""
        for entry in reversed(self._entries):
            if is_number(value := entry.get(name)):
                return value
        return None

    def best(self) -> tuple[float, int] | None:
        """Give the least held-out loss, and its step."""
        losses = list[tuple[float, int]]()
        for entry in self.evaluations:
            if is_number(value := entry.get("eval_loss")):
                losses.append((value, entry["step"]))
        return min(losses, default=None)


def _read(file: Path) -> list[Entry]:
    with suppress(OSError):
        return journal.read(file)
    return []


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a file is a number that can be rounded, added and drawn."""
    return type(value) in (float, int) and abs(value) < LARGEST  # type: ignore[arg-type] # one of both


def numbers_of(record: object) -> dict[str, float]:
    """Give the finite numbers of a mapping in a record; none where it is no mapping."""
    return {name: value for name, value in as_mapping(record).items() if is_number(value)}


def as_list(value: object) -> list[Any]:
    """Give a list of a record; an empty one where it is something else."""
    return value if isinstance(value, list) else []


def as_mapping(value: object) -> dict[str, Any]:
    """Give a mapping of a record; an empty one where it is something else."""
    return value if isinstance(value, dict) else {}
