"""Write metrics.jsonl, the truth about a run, samples.jsonl, its ledger, and other journals.

Numbers that JSON does not know (NaN, infinities) are written as null.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from trainer.core import gpu
from trainer.core.durable import as_save_error
from trainer.core.format import figure_name, named_means
from trainer.core.run_folder import RunFolder
from trainer.report.journal import EVAL_SECONDS, Entry, Journal, read, truncate_after

Means = Mapping[str, Mapping[str, float]]
"""Of an evaluation: by the name of what is held out, then by that of the figure."""


@final
class MetricsLog:
    """Writes one object per optimizer step, and one per evaluation.

    On an accelerator the numbers of a step are copied behind its kernels and read when the next
    step arrives, so writing them never makes the host wait; the file lags by that one step.
    Entries beyond `resumed_step` are cut before the first is added; in a fresh run, for None, all
    that one without a checkpoint left there. `more_of` is called with `on_step` or `on_eval` and
    an entry, and gives further figures of it.
    """

    def __init__(
        self,
        folder: Path,
        warn: Callable[[str], None],
        *,
        resumed_step: int | None = None,
        keep_samples: bool = False,
        more_of: Callable[[str, Entry], Mapping[str, float]] = lambda *_: {},
    ) -> None:
        self._more_of = more_of
        # Bad records stand at step 0, which a fresh run cuts as well.
        last_step = -1
        if resumed_step is not None:
            last_step = resumed_step
        for name in RunFolder.JOURNALS:
            with as_save_error(folder / name):
                truncate_after(folder / name, last_step)
        self._folder, self._warn = folder, warn
        names = [RunFolder.METRICS, *[RunFolder.SAMPLES] * keep_samples]
        self._journals = {name: Journal(folder / name, warn) for name in names}
        # A step whose numbers, by name, are there once they have been copied.
        self._waiting: tuple[Entry, list[str], Tensor, Any] | None = None

    def step(self, entry: Mapping[str, Any]) -> list[Entry]:
        """Take a step, whose tensors are 0-d; give the entries that were written meanwhile."""
        written, entry = self.flush(), dict(entry)
        remote, tensors = list[str](), list[Tensor]()
        for name, value in entry.items():
            if isinstance(value, Tensor) and gpu.is_gpu(value.device):
                remote.append(name)
                tensors.append(value.detach().double())
        if remote:
            # One copy for all of them: each costs the host a launch.
            numbers = torch.stack(tensors).to("cpu", non_blocking=True)
            self._waiting = entry, remote, numbers, gpu.mark()
            return written
        return [*written, self._write("on_step", entry)]

    def consumed(
        self, step: int, ids: Iterable[int], skipped: Iterable[int] = (), **more: object
    ) -> None:
        """Enter what a step consumed into the ledger, where one is kept.

        Ids are in the order of the global batch; its update left out those that are `skipped`.
        Step 0 has bad records that were found before the first.
        """
        if RunFolder.SAMPLES in self._journals:
            if bad := list(skipped):
                more["skipped"] = bad
            self.record(RunFolder.SAMPLES, {"step": step, "ids": list(ids), **more})

    def evaluation(self, step: int, means: Means, seconds: float) -> Entry:
        """Write an evaluation, its means as `eval_...`; steps before it must be flushed."""
        entry: Entry = {"step": step}
        entry |= {figure_name(name): float(value) for name, value in named_means(means).items()}
        return self._write("on_eval", entry | {EVAL_SECONDS: round(seconds, 6)})

    def record(self, name: str, entry: Mapping[str, Any]) -> None:
        """Append what is known of a step to a journal, one of `RunFolder.JOURNALS`."""
        if name not in self._journals:
            self._journals[name] = Journal(self._folder / name, self._warn)
        self._journals[name].write(entry)

    def flush(self) -> list[Entry]:
        """Write the step that is on its way, waiting for it; give its entry, or nothing."""
        if self._waiting is None:
            return []
        (entry, names, numbers, copied), self._waiting = self._waiting, None
        copied.synchronize()
        entry |= zip(names, numbers.tolist(), strict=True)
        return [self._write("on_step", entry)]

    def sync(self) -> list[Entry]:
        """Write the step that is on its way, as `flush`, and wait until the disk has everything."""
        written = self.flush()
        for journal in self._journals.values():
            journal.sync()
        return written

    def _write(self, event: str, entry: Entry) -> Entry:
        plain = dict(entry)
        for name, value in entry.items():
            if isinstance(value, Tensor):
                plain[name] = value.item()
        plain |= self._more_of(event, plain)
        self.record(RunFolder.METRICS, plain)
        return plain


def evaluation_at(folder: Path, step: int) -> dict[str, float] | None:
    """Find the means of a step's evaluation in metrics.jsonl; None where there is none."""
    means = {}
    for entry in read(folder / RunFolder.METRICS):
        if entry["step"] != step or EVAL_SECONDS not in entry:
            continue
        for name, value in entry.items():
            if name not in {"step", EVAL_SECONDS} and isinstance(value, int | float | None):
                # What JSON does not know, NaN and infinities, is written as null.
                mean = math.nan
                if value is not None:
                    mean = float(value)
                means[name.removeprefix("eval_")] = mean
    return means or None
