"""Read what a run left behind, whole or not, for a page."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
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
@dataclass(frozen=True)
class SavedRun:
    """What a page shows of a run."""

    folder: Path

    @cached_property
    def _files(self) -> RunFolder:
        return RunFolder(self.folder)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config by dotted keys; empty where there is none."""
        return flat(self._files.config())

    @cached_property
    def typed(self) -> str:
        """The command line, without secrets; of the latest start, where the run went on."""
        # Hydra's own quotes around a path, which a shell does not need.
        words = [_QUOTED.sub(r"\1\2", word) for word in self._files.typed()]
        return without_secrets(shlex.join(["train", *words]), os.environ)

    @cached_property
    def name(self) -> str:
        """The user's word for the run, else that of its folder."""
        return str(self.config.get("name") or self.folder.name)

    @cached_property
    def status(self) -> dict[str, Any]:
        """How the run goes, or ended."""
        return self._files.status()

    @cached_property
    def result(self) -> dict[str, Any]:
        """The figures of a run that completed; a run that went on has some of before."""
        return self._files.record(RunFolder.RESULT) if self.state == "completed" else {}

    @cached_property
    def plan(self) -> dict[str, Any]:
        """What was planned."""
        return self._files.record(RunFolder.PLAN)

    @property
    def continuation(self) -> Iterator[str]:
        """Say from which run and step it went on, where it did."""
        fork = self._files.record(RunFolder.FORK)
        # A resumed run's config has none.
        words = (word.partition("=") for word in self._files.typed(first=True))
        typed = {key: value.strip("'") for key, _, value in words}
        init = self.config.get("init") or typed.get("init") or "null"
        step, resumed = fork.get("step"), self.plan.get("resumed_step")
        if init != "null":
            yield f"begun with the weights of {shown_path(Path(str(init)))}"
        if run := fork.get("run"):
            yield f"forked from {shown_path(Path(str(run)))} at step {step}"
        if is_number(resumed) and resumed != step:
            none = ", and took none since" if resumed == self.last_step else ""
            yield f"resumed after step {number(resumed)}{none}"
        elif resumed is None and (self.folder / RunFolder.RESUMED).is_dir():
            yield (
                "begun again: nothing had been saved" if "resumed_step" in self.plan else "resumed"
            )

    @cached_property
    def worst(self) -> list[Entry]:
        """The samples with the largest loss, with texts where `train evaluate` wrote them."""
        found = as_list(self._files.record(RunFolder.EVALUATION).get("worst"))
        return [entry for entry in found if "loss" in as_mapping(entry)][:SHOWN_SAMPLES]

    @cached_property
    def generated(self) -> list[Entry]:
        """What prompts gave at the last evaluation that continued any."""
        with suppress(OSError):
            found = journal.read(self.folder / RunFolder.TEXTS)
            return [entry for entry in found if entry["step"] == found[-1]["step"]]
        return []

    @cached_property
    def _entries(self) -> list[Entry]:
        with suppress(OSError):
            return journal.read(self.folder / RunFolder.METRICS)
        return []

    @cached_property
    def steps(self) -> list[Entry]:
        """The entries of optimizer steps."""
        return [entry for entry in self._entries if "loss" in entry]

    @cached_property
    def evaluations(self) -> list[Entry]:
        """The entries of evaluations."""
        return [entry for entry in self._entries if "loss" not in entry]

    @property
    def state(self) -> str:
        """How it goes, or ended."""
        return str(self.status.get("state", "unknown"))

    @property
    def noun(self) -> str:
        """What lengths count."""
        counts = self.plan.get("num_tokens"), self.plan.get("num_samples")
        return "sample" if counts[0] == counts[1] and is_number(counts[0]) else "token"

    @property
    def started(self) -> str | None:
        """When it began, in the time of this machine."""
        began = self._files.began()
        with suppress(OSError, OverflowError, ValueError):
            return datetime.fromtimestamp(began).strftime("%Y-%m-%d %H:%M") if began else None
        return None

    @property
    def seconds(self) -> float:
        """Seconds in steps and evaluations."""
        times = (entry.get("seconds", entry.get("eval_seconds")) for entry in self._entries)
        return math.fsum(filter(is_number, times))

    @property
    def last_step(self) -> int:
        """The last step in metrics.jsonl; 0 where there is none."""
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def peak_bytes(self) -> float | None:
        """The most memory measured."""
        return numbers_of(self.result).get("peak_bytes") or self.last("memory_bytes")

    def last(self, name: str) -> float | None:
        """The last number of a metric; None where there is none."""
        for entry in reversed(self._entries):
            if is_number(value := entry.get(name)):
                return value
        return None

    @property
    def best(self) -> tuple[float, int] | None:
        """The least held-out loss, and its step."""
        losses = list[tuple[float, int]]()
        for entry in self.evaluations:
            if is_number(value := entry.get("eval_loss")):
                losses.append((value, entry["step"]))
        return min(losses, default=None)


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
