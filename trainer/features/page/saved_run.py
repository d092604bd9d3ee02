"""Read what a run left behind, whole or not, for a page."""

from __future__ import annotations

import math
import os
import re
import shlex
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, final

from trainer.config.messages import by_key, flat
from trainer.config.secrets import without_secrets
from trainer.core.format import number, shown_path
from trainer.core.run_folder import RunFolder
from trainer.report import journal
from trainer.report.journal import Entry, is_number

SHOWN_SAMPLES = 8  # with the largest loss, that are shown
_QUOTED = re.compile(r"^([^=]+=)'([\w./:~-]*)'$")


@final
class SavedRun:
    """What a page shows of a run, read once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, RunFolder(folder)
        files = self.files
        # The resolved config by dotted keys; empty where there is none
        self.config: dict[str, Any] = flat(files.config())
        # The user's word for the run, else that of its folder
        self.name = str(self.config.get("name") or folder.name)
        # The command line, without secrets; of the latest start, where the run went on. Without
        # Hydra's own quotes around a path, which a shell does not need
        words = ["train"]
        for word in files.typed():
            # A class of one's own chooses this option by itself.
            if not word.endswith("=own"):
                words.append(_quoted(_QUOTED.sub(r"\1\2", word)))
        self.typed = without_secrets(" ".join(words), os.environ)
        # The keys of the same
        self.typed_keys = [*by_key(files.typed())]
        # How it goes, or ended
        self.status = files.status()
        self.state = str(self.status.get("state", "unknown"))
        # What was planned, and the figures of a run that completed; one that went on has some of
        # before
        self.plan = files.record(RunFolder.PLAN)
        self.result: dict[str, Any] = {}
        if self.state == "completed":
            self.result = files.record(RunFolder.RESULT)
        counts = self.plan.get("num_tokens"), self.plan.get("num_samples")
        # What lengths count
        self.noun = "token"
        if counts[0] == counts[1] and is_number(counts[0]):
            self.noun = "sample"
        self._entries = _read(folder / RunFolder.METRICS)
        self.steps, self.evaluations, times = list[Entry](), list[Entry](), list[float]()
        for entry in self._entries:
            # Of a step; an evaluation has `eval_loss` alone.
            if "loss" in entry:
                self.steps.append(entry)
            else:
                self.evaluations.append(entry)
            time = entry.get("seconds", entry.get("eval_seconds"))
            if is_number(time):
                times.append(time)
        # In metrics.jsonl
        self.last_step = 0
        if self.steps:
            self.last_step = self.steps[-1]["step"]
        # In steps and evaluations, without what lies between them
        self.seconds = math.fsum(times)
        # The samples with the largest loss, where `train evaluate` wrote them
        self.worst = _worst(files)
        # What followed each prompt, by step
        self.generated = _read(folder / RunFolder.TEXTS)
        # What the steps depended on, as the newest checkpoint has it
        self.terms = files.terms()
        # In the time of this machine
        self.started: str | None = None
        with suppress(OSError, OverflowError, ValueError):
            if began := files.began():
                self.started = datetime.fromtimestamp(began).strftime("%Y-%m-%d %H:%M")

    def continuation(self) -> list[str]:
        """Say from which run and step it went on, where it did."""
        found, fork = list[str](), self.files.record(RunFolder.FORK)
        step, resumed = fork.get("step"), self.plan.get("resumed_step", "")
        if run := fork.get("run"):
            found.append(f"forked from {shown_path(Path(str(run)))} at step {step}")
        if is_number(resumed) and resumed != step:
            found.append(f"resumed after step {number(resumed)}")
        # Null stands there where the run began anew; without a plan nobody knows.
        elif resumed is None and (self.folder / RunFolder.RESUMED).is_dir():
            found.append("begun again: nothing had been saved")
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


def _worst(files: RunFolder) -> list[dict[str, Any]]:
    """Read the samples with the largest loss."""
    found = list[dict[str, Any]]()
    for entry in as_list(files.record(RunFolder.EVALUATION).get("worst")):
        if "loss" in as_mapping(entry):
            found.append(entry)
    return found[:SHOWN_SAMPLES]


def _quoted(word: str) -> str:
    """Quote a word for a shell, in the marks that leave more of it as it is."""
    if "'" in word and not re.search(r'["$`\\!]', word):
        return f'"{word}"'
    return shlex.quote(word)


def _read(file: Path) -> list[Entry]:
    with suppress(OSError):
        return journal.read(file)
    return []


def numbers_of(record: object) -> dict[str, float]:
    """Give the finite numbers of a mapping in a record; none where it is no mapping."""
    return {name: value for name, value in as_mapping(record).items() if is_number(value)}


def as_list(value: object) -> list[Any]:
    """Give a list of a record; an empty one where it is something else."""
    return value if isinstance(value, list) else []


def as_mapping(value: object) -> dict[str, Any]:
    """Give a mapping of a record; an empty one where it is something else."""
    return value if isinstance(value, dict) else {}
