"""Write a run's figures as TensorBoard's event files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, final

import yaml

from trainer.config.components import Address
from trainer.core.run_folder import RunFolder
from trainer.report.tracker import TrackedRun, Tracker


@final
class TensorBoardTracker(Tracker):
    """Writes an event file for each process of a run; a reader leaves out what came twice.

    Jobs of a sweep have what was typed for them as HParams, beside their losses.

    Args:
        folder: where they go; None: `tensorboard/` in the run folder. In a folder of the user's
            each run has a folder of its own.
    """

    package: ClassVar[str] = "tensorboard"
    install: ClassVar[str] = ".[tensorboard]"

    def __init__(self, folder: Address | None = None) -> None:
        self._folder = folder

    def start(self, run: TrackedRun) -> None:
        """See the base class."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - seconds
        from torch.utils.tensorboard.summary import hparams  # noqa: PLC0415

        folder = run.folder
        if self._folder is not None:
            name = f"{run.name or run.run_folder.name}-{run.id}"
            folder = Path(self._folder, run.group or "", name)
        # Of what killed processes wrote a reader passes over the steps from this one on.
        self._writer = SummaryWriter(folder, purge_step=run.after + 1)
        if run.after < 0:
            self._show("config.yaml", yaml.safe_dump(dict(run.config), sort_keys=False))
        self._last = None
        if run.group is not None:
            losses = dict.fromkeys(("train/loss", "eval/loss"), 0)
            typed = _values(RunFolder(run.run_folder).typed())
            *first, self._last = hparams(typed, losses)  # type: ignore[no-untyped-call] # untyped in torch
            for each in first:
                self._add(each)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """See the base class."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """See the base class."""
        self._writer.flush()

    def attach(self, file: Path) -> None:
        """See the base class; a page has no place in TensorBoard."""
        if file.suffix == ".json":
            self._show(file.name, file.read_text())

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """See the base class."""
        self._show("result.json", json.dumps(summary, indent=2))
        if self._last is not None and summary is not None:
            self._add(self._last)
        self._writer.close()

    def _add(self, summary: Any) -> None:  # noqa: ANN401 - untyped in torch
        file: Any = self._writer.file_writer
        file.add_summary(summary)

    def _show(self, name: str, text: str) -> None:
        self._writer.add_text(name, f"```\n{text}\n```")


def _values(typed: Sequence[str]) -> dict[str, float | str]:
    """Read settings as they were typed: numbers as numbers, all else as words."""
    found = dict[str, float | str]()
    for each in typed:
        key, _, value = each.partition("=")
        found[key] = value
        with suppress(ValueError):
            found[key] = float(value)
    return found
