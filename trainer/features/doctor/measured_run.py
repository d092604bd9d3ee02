"""Set what was predicted of a run beside what it took: for result.json, and for later runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, final

from trainer.assemble.features import EndOfRun, Feature
from trainer.assemble.run_plan import RunPlan
from trainer.core import gpu
from trainer.core.out_of_memory import peak_bytes
from trainer.core.rows import Row, row
from trainer.report.records import device_name
from trainer.tune import history
from trainer.tune.memory_limit import OVERHEAD

_MOST_STEPS = 500  # that a median is taken of


@final
@dataclass(frozen=True, kw_only=True)
class MeasuredRun(Feature):
    """Writes predicted and measured peak and seconds of a step, once a run ends."""

    predicted_bytes: int | None = None
    counted_bytes: int | None = None  # of the limit
    predicted_seconds: float | None = None
    other_bytes: int = 0  # on a CPU, what the process has beside its model before the first step
    # Of the last steps
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_STEPS))

    def planned(self, run_plan: RunPlan) -> MeasuredRun:
        """Note what is predicted, and what memory is taken already."""
        predicted, run = run_plan.predicted, run_plan.run
        counted, other = None, 0
        if predicted is not None:
            overhead = OVERHEAD[gpu.kind_of(run.world.device)]
            counted = predicted.peak_bytes + int(overhead * predicted.activations)
        if not gpu.is_gpu(run.world.device):
            tensors = (*run.model.module.parameters(), *run.model.module.buffers())
            model = sum(each.nbytes for each in tensors if not each.is_meta)
            other = peak_bytes(run.world.device) - model
        return MeasuredRun(
            predicted_bytes=predicted and predicted.peak_bytes,
            counted_bytes=counted,
            predicted_seconds=run_plan.step_seconds,
            other_bytes=other,
        )

    def remark(self, entry: Mapping[str, Any], ids: Sequence[int], folder: Path) -> str | None:
        """Note how long a step took, and remark nothing."""
        self.seconds.append(entry["seconds"])
        return None

    def end_rows(self, end: EndOfRun) -> Sequence[Row]:
        """See the base class; the history of this machine has the same."""
        device, steps = end.run.world.device, end.opened.progress.taken
        if not self.seconds:
            return []
        measured = taken = peak_bytes(device) - self.other_bytes
        if gpu.is_gpu(device):
            taken = int(gpu.backend().max_memory_reserved(device))
        past = history.PastRun(
            ended=f"{datetime.now():%Y-%m-%d %H:%M}",
            folder=end.opened.checkpointer.writer.store.folder.parent.name,
            device=device_name(device),
            steps=steps,
            predicted_bytes=self.predicted_bytes,
            measured_bytes=max(measured, 0),
            counted_bytes=self.counted_bytes,
            taken_bytes=max(taken, 0),
            predicted_seconds=self.predicted_seconds,
            measured_seconds=median(self.seconds),
        )
        history.add(past)
        runs = history.past_runs(past.device)[-history.LAST_RUNS :]
        record = {"this_run": asdict(past), "num_runs": len(runs)}
        for name in ("bytes", "seconds"):
            record[f"{name}_over_predicted"] = shares_of(runs, name)
        return [row("", None, predicted=record)]


def shares_of(runs: Sequence[history.PastRun], name: str) -> list[float]:
    """Give what runs took over what was predicted, of `bytes` or `seconds`, least to most."""
    names = (f"measured_{name}", f"predicted_{name}")
    pairs = [[getattr(run, name) for name in names] for run in runs]
    return sorted(round(took / foreseen, 3) for took, foreseen in pairs if took and foreseen)
