"""Report a run: what happened goes in; files, screen, W&B and hooks come out."""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from trainer.checkpoint.status import write_status
from trainer.config.cadence import is_due
from trainer.config.secrets import without_secrets
from trainer.core.errors import SaveError
from trainer.core.format import duration, plural
from trainer.core.rows import Row
from trainer.core.user_code import described
from trainer.report.blocks import end_block, noun_of, start_block
from trainer.report.console import Screen, step_of
from trainer.report.journal import Entry
from trainer.report.metrics import Means, MetricsLog
from trainer.report.records import Record
from trainer.report.wandb import WandbMirror
from trainer.report.watch import EarlyWatch

Ids = Sequence[int]

WATCHED = ("on_step", "on_eval", "on_checkpoint")


class Hook(ABC):  # noqa: B024 - known by its methods
    """Whatever has a method of `WATCHED`; it sees what happened, and cannot change it."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        """Whether a class has one, without inheritance."""
        return any(callable(getattr(kind, event, None)) for event in WATCHED)


@final
class RunReporter:
    """Reports a run into its folder, onto the screen, to W&B and to the user's hooks.

    Every hook gets a dict of plain values, its own copy. One that fails is reported once, and
    called again the next time.

    Args:
        folder: the run folder; it exists.
        screen: where to print.
        log_every: from one printed line to the next, as `log.every` has it.
        resumed_step: step of the checkpoint this process goes on from; None in a fresh run.
        keep_samples: whether to write samples.jsonl.
        hooks: by the name the user gave them.
        wandb: the mirror; None mirrors nothing.
    """

    def __init__(
        self,
        folder: Path,
        screen: Screen,
        *,
        log_every: float | str = 1,
        resumed_step: int | None = None,
        keep_samples: bool = False,
        hooks: Mapping[str, object] | None = None,
        wandb: WandbMirror | None = None,
    ) -> None:
        self._folder, self._screen, self._log_every = folder, screen, log_every
        self._hooks, self._failed_hooks = dict(hooks or {}), set[str]()
        self._steps, self._noted_step, self._resumed_step = 0, resumed_step or 0, resumed_step
        self._epochs = 0.0  # that were over behind the step shown last
        self._plan: Record = {}
        self._keeps_samples = keep_samples
        self._watch = EarlyWatch(keeps_samples=keep_samples)
        self._batch_size: int | None = None  # of the last step, where sizes change
        self._summary: Record | None = None
        self._metrics = MetricsLog(
            folder,
            screen.warn,
            resumed_step=resumed_step,
            keep_samples=keep_samples,
        )
        self._wandb = wandb or WandbMirror("disabled", folder, {}, screen.warn)
        self._wandb.start()
        self.line, self.warn = screen.line, screen.warn

    def start(self, rows: Sequence[Row], plan: Record, *, name: str | None = None) -> None:
        """Show what is about to happen, by the rows of the run, and begin to show progress."""
        self._plan, self._steps, step = plan, plan["steps"], self._resumed_step
        self._watch = EarlyWatch(plan.get("warmup_steps", 0), keeps_samples=self._keeps_samples)
        warnings = plan["warnings"]
        block = start_block(rows, warnings, self._folder, name=name, resumed_step=step)
        self._screen.show(block)
        self._screen.begin(step or 0, self._steps, noun_of(plan))

    def passed_over(self, count: int, records: Sequence[str]) -> None:
        """Report records of the data that could not be read, the first with their reasons."""
        records = [without_secrets(record, os.environ) for record in records]
        first = f"; the first: {records[0]}" if records else ""
        self.warn(f"{plural(count, 'bad record')} skipped (data.on_bad=skip){first}")
        self._metrics.consumed(0, (), bad_records=count, records=records)

    def step(self, entry: Mapping[str, Any], ids: Ids = (), skipped_ids: Ids = ()) -> None:
        """Take an optimizer step; on an accelerator it is shown when the next one comes.

        Args:
            entry: the line of metrics.jsonl; numbers may be 0-d tensors.
            ids: of the samples behind it.
            skipped_ids: of those that its update left out.
        """
        step = entry["step"]
        if "replays" in entry:
            self.line(
                f"{step_of(step, self._steps)}  out of memory: computed again, in "
                f"{entry['micro_batches']} micro-batches; nothing is lost or counted twice"
            )
        size, before = entry.get("batch_size"), self._batch_size
        if before is not None and size != before:
            self.line(f"{step_of(step, self._steps)}  the global batch is {size:,} from here on")
        self._batch_size = size
        self._metrics.consumed(step, ids, skipped_ids)
        self._watch.consumed(step, ids)
        self._show(self._metrics.step(entry))

    def evaluation(self, step: int, means: Means, seconds: float) -> None:
        """Take a pass over all that is held out after a step, and its seconds."""
        self._show(self._metrics.flush())
        entry = self._metrics.evaluation(step, means, seconds)
        times = [*[""] * (len(means) - 1), f"  ({duration(seconds)})"]
        for (part, metrics), time in zip(means.items(), times, strict=True):
            figures = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            text = f"{step_of(step, self._steps)}  {part or 'held out'}: {figures}{time}"
            self._screen.line(text, "bold")
        self._note(step, "on_eval", entry)

    def generated(self, step: int, texts: Sequence[tuple[str, str]] | None) -> None:
        """Take how prompts were continued after a step; None where memory ran out."""
        if texts is None:
            self.warn("log.generate: out of memory; nothing was continued, and the run goes on")
        for prompt, text in texts or ():
            self._metrics.generated(step, prompt, text)
            self._screen.line(f"{step_of(step, self._steps)}  {prompt!r} -> {text!r}")

    def flush(self) -> None:
        """Bring every step so far to the disk, before a checkpoint; `SaveError` if it refuses."""
        self._show(self._metrics.sync())

    def checkpoint(self, step: int, path: Path) -> None:
        """Take note of a checkpoint that has been written."""
        self._show(self._metrics.flush())
        shown = path.relative_to(self._folder) if path.is_relative_to(self._folder) else path
        self._screen.line(f"{step_of(step, self._steps)}  saved {shown}", "dim")
        self._note(step, "on_checkpoint", {"step": step, "path": str(path)})

    def finish(self, result: Record, commands: Sequence[str]) -> None:
        """Show how the run ended. `close` follows.

        Args:
            result: what result.json holds; W&B's summary, too.
            commands: lines to look further with.
        """
        self._show(self._metrics.flush())
        self._screen.end_progress()
        self._summary = result
        self._screen.show(end_block(self._plan, result))
        for command in commands:  # unwrapped, so that they can be copied
            self._screen.line(f"  {command}", "cyan")

    def close(self) -> None:
        """Write and release everything, however the run ended; `SaveError` if the disk refuses."""
        self._screen.end_progress()
        try:
            self._show(self._metrics.sync())
        finally:
            self._wandb.close(self._summary)
            self._screen.close()

    def _note(self, step: int, event: str, values: Entry) -> None:
        """Let status.json say how far the run is, and hooks see it."""
        if step > self._noted_step:
            self._noted_step = step
            with suppress(SaveError):  # a full disk is the checkpoints' matter
                write_status(self._folder, "running", step)
        self._call(event, values)

    def _show(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            step = entry["step"]
            if "skipped" in entry:
                self.warn(f"step {step} updated nothing: {entry['skipped']}")
            before, self._epochs = self._epochs, entry["epoch"]
            due = is_due(self._log_every, step, self._steps, before, self._epochs)
            self._screen.step(entry, is_due=due or step in {1, self._steps})
            if (odd := self._watch.see(entry)) is not None:
                self._screen.line(f"{step_of(step, self._steps)}  {odd}", "yellow")
            self._call("on_step", entry)

    def _call(self, event: str, values: Entry) -> None:
        """Call one method of every hook that has it."""
        for name, hook in self._hooks.items():
            call = f"{name}.{event}"
            try:
                if hasattr(hook, event):
                    getattr(hook, event)(dict(values))
            except Exception as error:  # a watcher never stops what it watches
                if call not in self._failed_hooks:
                    self.warn(f"hook {call} failed (reported once): {described(error)}")
                self._failed_hooks.add(call)


@final
class SilentReporter:
    """Shows and writes nothing: for every rank but the first."""

    def _pass(self, *_: object, **__: object) -> None:
        """Do nothing."""

    start = passed_over = step = evaluation = generated = flush = checkpoint = _pass
    line = warn = finish = close = _pass


Reporter = RunReporter | SilentReporter
"""The loop calls it in the same way on every rank."""
