"""Report a run: what happened goes in; files, screen, W&B and hooks come out."""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from trainer.checkpoint.status import Status, write_status
from trainer.config.secrets import without_secrets
from trainer.core.errors import SaveError
from trainer.core.format import duration
from trainer.report.blocks import noun_of, start_block
from trainer.report.closing import end_block
from trainer.report.console import Screen, step_of
from trainer.report.journal import Entry
from trainer.report.metrics import MetricsLog
from trainer.report.records import EvalRecord, Record, RunEnd, StepRecord
from trainer.report.wandb import WandbMirror

Ids = Iterable[int]

WATCHED = ("on_step", "on_eval", "on_checkpoint")
"""Methods that a hook may have."""


class Hook(ABC):  # noqa: B024 - known by its methods
    """Whatever has a method of `WATCHED`; it sees what happened, and cannot change it."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        """Take a class for a hook by its methods, without inheritance."""
        return any(callable(getattr(kind, event, None)) for event in WATCHED)


@final
class RunReporter:
    """Reports a run into its folder, onto the screen, to W&B and to the user's hooks.

    Hooks are objects with any of the methods `on_step`, `on_eval` and `on_checkpoint`. Each takes
    a dict of plain values, its own copy: hooks watch, they cannot change a run. One that fails is
    reported once, and called again the next time.

    Args:
        folder: the run folder; it exists.
        screen: where to print.
        log_every: optimizer steps from one printed line to the next.
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
        log_every: int = 1,
        resumed_step: int | None = None,
        keep_samples: bool = False,
        hooks: Mapping[str, object] | None = None,
        wandb: WandbMirror | None = None,
    ) -> None:
        self._folder = folder
        self._screen = screen
        self._log_every = log_every
        self._hooks = dict(hooks or {})
        self._failed_hooks: set[str] = set()
        self._steps = 0
        self._noted_step = resumed_step or 0
        self._resumed_step = resumed_step
        self._summary: Record | None = None
        self._metrics = MetricsLog(
            folder, screen.warn, resumed_step=resumed_step, keep_samples=keep_samples
        )
        self._wandb = wandb or WandbMirror("disabled", folder, {}, screen.warn)
        self._wandb.start()

    @property
    def wandb_id(self) -> str | None:
        """The id of W&B's run; None where none is mirrored."""
        return self._wandb.run_id

    def start(self, plan: Record, *, name: str | None = None, threads: int | None = None) -> None:
        """Show what is about to happen, and begin to show progress.

        Args:
            plan: of plan.json.
            name: the user's word for the run.
            threads: of this rank.
        """
        self._steps, resumed_step = plan["steps"], self._resumed_step
        start = start_block(
            plan, self._folder, name=name, threads=threads, resumed_step=resumed_step
        )
        self._screen.show(start)
        self._screen.begin(resumed_step or 0, self._steps, noun_of(plan))

    def passed_over(self, count: int, records: Sequence[str]) -> None:
        """Take note of records of the data that could not be read and are no samples.

        Args:
            count: of them.
            records: the first of them, each with place and reason.
        """
        records = [without_secrets(record, os.environ) for record in records]
        noun = "record is" if count == 1 else "records are"
        first = "" if not records else f"; the first: {records[0]}"
        self._screen.warn(f"{count:,} bad {noun} passed over (data.on_bad=skip){first}")
        self._metrics.passed_over(count, records)

    def step(self, record: StepRecord, ids: Ids = (), skipped_ids: Ids = ()) -> None:
        """Take an optimizer step; on an accelerator it is shown when the next one comes.

        Args:
            record: what it did.
            ids: samples behind it, for the ledger.
            skipped_ids: those of them that changed nothing.
        """
        if record.replays:
            self.line(
                f"{self._at(record.step)}  out of memory: computed again, in "
                f"{record.micro_batches} micro-batches; nothing is lost or counted twice"
            )
        self._metrics.consumed(record.step, ids, skipped_ids)
        self._show(self._metrics.step(record))

    def evaluation(self, record: EvalRecord) -> None:
        """Take an evaluation."""
        self._show(self._metrics.flush())
        entry = self._metrics.evaluation(record)
        figures = "  ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
        took = duration(record.seconds)
        self._screen.line(f"{self._at(record.step)}  held out: {figures}  ({took})", "bold")
        self._note(record.step)
        self._call("on_eval", entry)

    def flush(self) -> None:
        """Bring every step so far to the disk; called before a checkpoint is written.

        Raises:
            SaveError: metrics cannot be written.
        """
        self._show(self._metrics.sync())

    def checkpoint(self, step: int, path: Path) -> None:
        """Take note of a checkpoint that has been written."""
        self._show(self._metrics.flush())
        shown = path.relative_to(self._folder) if path.is_relative_to(self._folder) else path
        self._screen.line(f"{self._at(step)}  saved {shown}", "dim")
        self._note(step)
        self._call("on_checkpoint", {"step": step, "path": str(path)})

    def line(self, text: str) -> None:
        """Print a line."""
        self._screen.line(text)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._screen.warn(text)

    def finish(self, end: RunEnd) -> None:
        """Show how the run ended. `close` follows."""
        self._show(self._metrics.flush())
        self._screen.end_progress()
        self._summary = end.result
        self._screen.show(end_block(end))
        for command in end.commands:  # unwrapped, so that they can be copied
            self._screen.line(f"  {command}", "cyan")

    def close(self) -> None:
        """Write and release everything, however the run ended. Closing twice does nothing.

        Raises:
            SaveError: metrics cannot be written.
        """
        self._screen.end_progress()
        try:
            self._show(self._metrics.sync())
        finally:
            self._wandb.close(self._summary)
            self._screen.close()

    def _note(self, step: int) -> None:
        """Let status.json say how far the run is, for who asks while it goes on or was killed."""
        if step > self._noted_step:
            self._noted_step = step
            with suppress(SaveError):  # a full disk is the checkpoints' matter
                write_status(self._folder, Status(state="running", step=step))

    def _at(self, step: int) -> str:
        return step_of(step, self._steps) if self._steps else f"step {step}"

    def _show(self, entries: Sequence[Entry]) -> None:
        """Show steps that have been written."""
        for entry in entries:
            step = entry["step"]
            if "skipped" in entry:
                self._screen.warn(f"step {step} updated nothing: {entry['skipped']}")
            is_due = step % self._log_every == 0 or step in {1, self._steps}
            self._screen.step(entry, is_due=is_due)
            self._call("on_step", entry)

    def _call(self, event: str, values: Entry) -> None:
        """Call one method of every hook that has it."""
        for name, hook in self._hooks.items():
            method = getattr(hook, event, None)
            if method is None:
                continue
            try:
                method(dict(values))
            except Exception as error:  # a watcher never stops what it watches
                call = f"{name}.{event}"
                if call not in self._failed_hooks:
                    self._failed_hooks.add(call)
                    self._screen.warn(
                        f"hook {call} failed (reported once): {type(error).__name__}: {error}"
                    )


@final
class SilentReporter:
    """Shows and writes nothing: for every rank but the first."""

    wandb_id = None

    def _pass(self, *_: object, **__: object) -> None:
        """Do nothing."""

    start = passed_over = step = evaluation = flush = checkpoint = _pass
    line = warn = finish = close = _pass


Reporter = RunReporter | SilentReporter
"""The loop calls it in the same way on every rank."""
