"""Count how far a run has come, and write down what each step did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from trainer.plan.order import Order
from trainer.training.step import NOT_FINITE, StepReport
from trainer.tune.memory_limit import peak_bytes


@final
@dataclass(kw_only=True)
class Trained:
    """How far the loop has come.

    Attributes:
        step: optimizer steps taken, from the start of the run.
        total_tokens: real input positions consumed, from the start of the run.
        tokens: likewise, in this process.
        seconds: spent on steps in this process; evaluation and saving do not count.
        loss: of the last step, 0-d.
        evaluation: the last one's metrics by name.
        skipped_steps: steps without an update.
        replays: times a step ran out of memory and was computed again.
        failures: steps in a row, up to the last one, that were not finite.
        taken: optimizer steps taken in this process.
    """

    step: int
    total_tokens: int
    tokens: int = 0
    seconds: float = 0.0
    loss: Tensor | None = None
    evaluation: Mapping[str, float] = field(default_factory=dict)
    evaluated_at: int | None = None
    saved_at: int | None = None
    skipped_steps: int = 0
    replays: int = 0
    failures: int = 0
    taken: int = 0

    def add(self, report: StepReport, seconds: float) -> None:
        """Count a step."""
        self.step = report.batch.step
        self.total_tokens += report.batch.num_tokens
        self.tokens += report.batch.num_tokens
        self.seconds += seconds
        self.loss = report.loss
        self.skipped_steps += report.skipped is not None
        self.replays += report.replays
        self.failures = self.failures + 1 if report.skipped == NOT_FINITE else 0
        self.taken += 1


def record_of(order: Order, report: StepReport, tokens: int, seconds: float) -> dict[str, Any]:
    """Give what metrics.jsonl holds of a step, of whose numbers 0-d tensors may take the place.

    `tokens` are those consumed from the start of the run.
    """
    batch = report.batch
    entry = {
        "step": batch.step,
        "epoch": order.fractional_epoch(batch.samples.after),
        "samples": batch.samples.after.samples,
        "tokens": tokens,
        "loss": report.loss,
        "lr": report.lr,
        "grad_norm": report.grad_norm,
        "accum_steps": batch.plan.accum_steps,
        "micro_batches": batch.plan.num_micro_batches,
        "padding": batch.plan.padding,
        "seconds": seconds,
        "tokens_per_second": batch.num_tokens / seconds if seconds else None,
        "memory_bytes": peak_bytes(report.loss.device),
    }
    entry |= {} if report.skipped is None else {"skipped": report.skipped}
    entry |= {"replays": report.replays} if report.replays else {}
    named = {f"metric_{n}" if n in entry else n: value for n, value in report.metrics.items()}
    return entry | named
