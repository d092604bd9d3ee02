"""Write metrics.jsonl, the truth about a run, and samples.jsonl, the ledger of its samples.

Numbers that JSON does not know (NaN, infinities) are written as null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple, final

import torch
from torch import Tensor

from trainer.core.durable import as_save_error
from trainer.report.journal import METRICS_FILE, Entry, Journal, read, truncate_after
from trainer.report.records import EVAL_SECONDS, EvalRecord, StepRecord, Value

SAMPLES_FILE = "samples.jsonl"

STEP_KEYS = {
    *("step", "epoch", "samples", "tokens", "loss", "lr", "grad_norm", "accum_steps"),
    *("micro_batches", "padding", "seconds", "tokens_per_second", "memory_bytes"),
    *("skipped", "replays"),
}
"""What an entry of a step holds whatever the objective is; the last two where they apply."""

RECENT_STEPS = 50
"""Whose time tells how long the next ones take."""


class _OnTheWay(NamedTuple):
    """A step whose numbers are being copied from an accelerator, and are there after `copied`."""

    record: StepRecord
    numbers: Tensor
    copied: torch.cuda.Event


@final
class MetricsLog:
    """Writes one object per optimizer step, and one per evaluation.

    On an accelerator the numbers of a step are copied behind its kernels and read when the next
    step arrives, so writing them never makes the host wait; the file lags by that one step. On a
    CPU it does not lag.

    Args:
        folder: the run folder.
        warn: called once when a line could not be written.
        resumed_step: entries beyond it are cut before the first is added; None in a fresh run,
            which cuts all that one without a checkpoint left there.
        keep_samples: whether to write samples.jsonl.

    Raises:
        SaveError: a log cannot be cut.
    """

    def __init__(
        self,
        folder: Path,
        warn: Callable[[str], None],
        *,
        resumed_step: int | None = None,
        keep_samples: bool = False,
    ) -> None:
        for name in (METRICS_FILE, SAMPLES_FILE):
            with as_save_error(folder / name):
                truncate_after(folder / name, -1 if resumed_step is None else resumed_step)
        self._metrics = Journal(folder / METRICS_FILE, warn)
        self._samples = Journal(folder / SAMPLES_FILE, warn) if keep_samples else None
        self._waiting: _OnTheWay | None = None

    def step(self, record: StepRecord) -> list[Entry]:
        """Take a step.

        Returns:
            The entries that were written: this step's, or on an accelerator the one before.
        """
        written = self.flush()
        values = _values(record)
        device = next((v.device for v in values if isinstance(v, Tensor) and v.is_cuda), None)
        if device is None:
            return [*written, self._write(record, [_number(value) for value in values])]
        packed = torch.stack([_on_device(value, device) for value in values])
        numbers = packed.to("cpu", non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(device))
        self._waiting = _OnTheWay(record, numbers, copied)
        return written

    def consumed(self, step: int, ids: Iterable[int], skipped: Iterable[int] = ()) -> None:
        """Enter the sample ids behind a step into the ledger, if there is one."""
        if self._samples is not None:
            entry: Entry = {"step": step, "ids": list(ids)}
            if bad := list(skipped):
                entry["skipped"] = bad
            self._samples.write(entry)

    def passed_over(self, count: int, records: Iterable[str]) -> None:
        """Enter records that are no samples into the ledger, if there is one, at step 0."""
        if self._samples is not None:
            entry: Entry = {"step": 0, "ids": [], "bad_records": count, "records": list(records)}
            self._samples.write(entry)

    def evaluation(self, record: EvalRecord) -> Entry:
        """Write an evaluation; steps before it must have been flushed."""
        entry = record.to_json()
        self._metrics.write(entry)
        return entry

    def flush(self) -> list[Entry]:
        """Write the step that is on its way, waiting for it.

        Returns:
            Its entry, or nothing.
        """
        if self._waiting is None:
            return []
        waiting, self._waiting = self._waiting, None
        waiting.copied.synchronize()
        return [self._write(waiting.record, waiting.numbers.tolist())]

    def sync(self) -> list[Entry]:
        """Write the step that is on its way, and wait until the disk holds all.

        Returns:
            As `flush`.

        Raises:
            SaveError: lines are left that cannot be written.
        """
        written = self.flush()
        self._metrics.sync()
        if self._samples is not None:
            self._samples.sync()
        return written

    def _write(self, record: StepRecord, numbers: Sequence[float]) -> Entry:
        entry = _entry(record, numbers)
        self._metrics.write(entry)
        return entry


def evaluation_at(folder: Path, step: int) -> dict[str, float] | None:
    """Find the evaluation of a step in metrics.jsonl; None where there is none.

    Returns:
        Means by name, as the record of the evaluation had them.
    """
    found = [e for e in read(folder / METRICS_FILE) if e["step"] == step and EVAL_SECONDS in e]
    return {
        name.removeprefix("eval_"): float("nan") if value is None else float(value)
        for entry in found
        for name, value in entry.items()
        if name not in {"step", EVAL_SECONDS} and isinstance(value, int | float | None)
    } or None


def step_seconds_at(folder: Path, step: int) -> float | None:
    """Find what a step typically took, up to this one; None where there was none."""
    entries = [entry for entry in read(folder / METRICS_FILE) if entry["step"] <= step]
    took = [each for entry in entries if isinstance(each := entry.get("seconds"), int | float)]
    return median(map(float, took[-RECENT_STEPS:])) if took else None


def metrics_of(entry: Entry) -> dict[str, float | None]:
    """Give what an entry of a step has beyond the figures that every step has."""
    return {name: value for name, value in entry.items() if name not in STEP_KEYS}


def _values(record: StepRecord) -> list[Value]:
    """Give what may live on a device: the loss, the gradient norm if any, then the metrics."""
    norm = () if record.grad_norm is None else (record.grad_norm,)
    return [record.loss, *norm, *record.metrics.values()]


def _on_device(value: Value, device: torch.device) -> Tensor:
    """Put a value beside the others; a number of the host is filled in, a copy would wait."""
    if isinstance(value, Tensor) and value.is_cuda:
        return value.detach().double()
    return torch.full((), _number(value), dtype=torch.float64, device=device)


def _number(value: Value) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)


def _entry(record: StepRecord, numbers: Sequence[float]) -> Entry:
    """Lay out one line of metrics.jsonl; `numbers` are those of `_values`."""
    values = iter(numbers)
    entry: Entry = {
        "step": record.step,
        "epoch": record.epoch,
        "samples": record.samples,
        "tokens": record.tokens,
        "loss": next(values),
        "lr": record.lr,
        "grad_norm": None if record.grad_norm is None else next(values),
        "accum_steps": record.accum_steps,
        "micro_batches": record.micro_batches,
        "padding": record.padding,
        "seconds": record.seconds,
        "tokens_per_second": record.step_tokens / record.seconds if record.seconds else None,
        "memory_bytes": record.memory_bytes,
    }
    if record.skipped is not None:
        entry["skipped"] = record.skipped
    if record.replays:
        entry["replays"] = record.replays
    for name, number in zip(record.metrics, values, strict=True):
        entry[name if name not in entry else f"metric_{name}"] = number
    return entry
