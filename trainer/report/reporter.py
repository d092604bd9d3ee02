"""Report a run: what happened goes in; files, screen, trackers and hooks come out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from trainer.config.amounts import is_due
from trainer.config.secrets import without_secrets
from trainer.core.errors import SaveError
from trainer.core.format import METRIC_TITLES, duration, figure_texts, part_title, plural
from trainer.core.rows import Row
from trainer.core.run_folder import RunFolder
from trainer.report.blocks import end_block, noun_of, start_block
from trainer.report.console import Screen, figure, step_text
from trainer.report.hooks import Hooks
from trainer.report.journal import EVAL_SECONDS, Entry
from trainer.report.metrics import Means, MetricsLog
from trainer.report.mirror import Mirror, close_all
from trainer.report.records import PlanRecord
from trainer.report.views import write_views

Ids = Sequence[int]
Remark = Callable[[Entry, Ids, Path], str | None]
"""Says what is odd about a step, by its entry and its samples."""


@final
class RunReporter:
    """Reports a run into its folder, onto the screen, to trackers and to the user's hooks.

    `resumed_step` is that of the checkpoint this process goes on from; None in a fresh run.
    """

    def __init__(
        self,
        folder: Path,
        screen: Screen,
        *,
        log_every: float | str = 1,
        resumed_step: int | None = None,
        keep_samples: bool = False,
        hooks: Hooks | None = None,
        mirrors: Sequence[Mirror] = (),
    ) -> None:
        self._folder, self._screen, self._log_every = folder, screen, log_every
        self._hooks = hooks or Hooks({}, screen.warn)
        self._steps, self._noted_step, self._resumed_step = 0, resumed_step or 0, resumed_step
        # How many were over after the step shown last
        self._epochs = 0.0
        self._plan: PlanRecord = {}
        self._remarks: Sequence[Remark] = ()
        # Samples of steps that are yet to be shown
        self._ids = dict[int, Ids]()
        # Of the last step, where sizes change
        self._batch_size: int | None = None
        self._summary: PlanRecord | None = None
        self._metrics = MetricsLog(
            folder,
            screen.warn,
            resumed_step=resumed_step,
            keep_samples=keep_samples,
            more_of=self._hooks.call,
        )
        self._mirrors = mirrors
        for mirror in mirrors:
            mirror.start()
        self.line, self.warn, self.record = screen.line, screen.warn, self._metrics.record

    def start(
        self, rows: Sequence[Row], plan: PlanRecord, remarks: Sequence[Remark] = (), name: str = ""
    ) -> None:
        """Show what is about to happen, by the rows of the run, and begin to show progress."""
        self._remarks = remarks
        self._plan, self._steps, step = plan, plan["steps"], self._resumed_step
        warnings = plan["warnings"]
        block = start_block(rows, warnings, self._folder, name=name, resumed_step=step)
        self._screen.show(block)
        self._screen.begin(step or 0, self._steps, noun_of(plan))

    def passed_over(self, count: int, records: Sequence[str]) -> None:
        """Report records of the data that could not be read, the first with their reasons."""
        records = [without_secrets(record, os.environ) for record in records]
        text = f"{plural(count, 'bad record')} skipped (data.on_bad=skip)"
        if records:
            text += f"; the first: {records[0]}"
        self.warn(text)
        self._metrics.consumed(0, (), bad_records=count, records=records)

    def step(
        self, entry: Mapping[str, Any], ids: Ids = (), skipped_ids: Ids = (), **ledger: object
    ) -> None:
        """Take an optimizer step; on an accelerator it is shown when the next one comes.

        Numbers of the entry may be 0-d tensors. The update left out samples of `skipped_ids`; the
        `ledger` is what else samples.jsonl has of the step, by name.
        """
        step = entry["step"]
        if "replays" in entry:
            text = f"computed again, in {entry['micro_batches']} micro-batches"
            text += "; nothing is lost or counted twice"
            self.line(f"{step_text(step, self._steps)}  out of memory: {text}")
        size, before = entry.get("batch_size"), self._batch_size
        if before is not None and size != before:
            self.line(f"{step_text(step, self._steps)}  the global batch is {size:,} from here on")
        self._batch_size = size
        self._metrics.consumed(step, ids, skipped_ids, **ledger)
        self._ids[step] = ids
        self._show(self._metrics.step(entry))

    def evaluation(self, step: int, means: Means, seconds: float) -> None:
        """Take a pass over all that is held out after a step, and its seconds."""
        self._show(self._metrics.flush())
        entry = self._metrics.evaluation(step, means, seconds)
        # Names of figures of hooks
        own = [*entry][[*entry].index(EVAL_SECONDS) + 1 :]
        last = [*(f"{name} {figure(entry[name])}" for name in own), f"({duration(seconds)})"]
        times = [*[""] * (len(means) - 1), "  " + "  ".join(last)]
        for (part, metrics), time in zip(means.items(), times, strict=True):
            figures = "  ".join(figure_texts(metrics, self._plan.get(METRIC_TITLES, {})))
            text = f"{step_text(step, self._steps)}  {part_title(part)}: {figures}{time}"
            self._screen.line(text, "bold")
        self._note(step)

    def flush(self) -> None:
        """Bring every step so far to the disk, before a checkpoint; `SaveError` if it refuses."""
        self._show(self._metrics.sync())

    def checkpoint(self, step: int, path: Path) -> None:
        """Take note of a checkpoint that has been written."""
        self._show(self._metrics.flush())
        # Checkpoints may be outside of the run folder.
        shown = path
        if path.is_relative_to(self._folder):
            shown = path.relative_to(self._folder)
        self._screen.line(f"{step_text(step, self._steps)}  saved {shown}", "dim")
        self._note(step)
        self._hooks.call("on_checkpoint", {"step": step, "path": str(path)})

    def finish(self, result: PlanRecord, commands: Sequence[str], rows: Sequence[Row] = ()) -> None:
        """Show how the run ended, with rows and lines to look further with. `close` follows."""
        self._show(self._metrics.flush())
        self._screen.end_progress()
        self._summary = result
        self._screen.show(end_block(self._plan, result, rows))
        for command in commands:
            self._screen.line(f"  {command}", "cyan", is_command=command.startswith("train "))

    def close(self) -> None:
        """Write and release everything, however the run ended; `SaveError` if the disk refuses."""
        self._screen.end_progress()
        try:
            self._show(self._metrics.sync())
            # Before the mirrors end, since trackers show the page, too.
            if self._summary is not None:
                RunFolder(self._folder).write_status("completed", self._summary["step"], 0)
                write_views(self._folder)
        finally:
            close_all(self._mirrors, self._summary)
            self._screen.close()

    def _note(self, step: int) -> None:
        """Let status.json say how far the run is."""
        if step > self._noted_step:
            self._noted_step = step
            # A full disk is the checkpoints' matter.
            with suppress(SaveError):
                RunFolder(self._folder).write_status("running", step)

    def _show(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            step = entry["step"]
            if "skipped" in entry:
                self.warn(f"step {step} changed no weight: {entry['skipped']}")
            before, self._epochs = self._epochs, entry["epoch"]
            due = is_due(self._log_every, step, self._steps, before, self._epochs)
            self._screen.step(entry, is_due=due or step in {1, self._steps})
            ids = self._ids.pop(step, ())
            for remark in self._remarks:
                if (text := remark(entry, ids, self._folder)) is not None:
                    self._screen.line(f"{step_text(step, self._steps)}  {text}", "yellow")


@final
class SilentReporter:
    """Shows and writes nothing: for every rank but the first."""

    def _pass(self, *_: object, **__: object) -> None:
        """Do nothing."""

    start = passed_over = step = evaluation = record = flush = checkpoint = _pass
    line = warn = finish = close = _pass


Reporter = RunReporter | SilentReporter
"""The loop calls it in the same way on every rank."""
