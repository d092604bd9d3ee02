"""Measure the gradient noise scale of a run: the feature that the engine asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, final

from trainer.assemble.features import EndOfRun, Feature
from trainer.assemble.run import Run
from trainer.assemble.run_plan import RunPlan
from trainer.checkpoint.store import Loaded
from trainer.config.run_config import RunConfig
from trainer.core.rows import Row, row
from trainer.core.stateful import Stateful
from trainer.features.batch_size.advice import NOISE, advice_at, saved_advice
from trainer.features.batch_size.noise_scale import NoiseScale, summing_norms
from trainer.features.batch_size.random_slots import steps_between, with_random_slots
from trainer.plan.cut import Plan
from trainer.training.batches import Feed
from trainer.training.context import Measuring


@final
@dataclass(frozen=True, kw_only=True)
class MeasuredNoise(Feature):
    """Measures on some steps how much the gradients of single micro-batches differ."""

    asked: int | str | None  # `log.noise_scale`
    unit: Literal["samples", "tokens"]  # what `batch.global` counts
    every: int | None = None  # steps between measurements; None where nothing is measured

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """See the base class."""
        return cls(asked=config.log.noise_scale, unit=config.batch.unit)

    def planned(self, run_plan: RunPlan) -> Self:
        """Choose the steps that measure."""
        return replace(self, every=steps_between(self.asked, run_plan))

    def saved_parts(self) -> Mapping[str, Stateful]:
        """See the base class."""
        return {} if self.asked is None else {NOISE: NoiseScale(self.unit)}

    def recut(self, plan: Plan, feed: Feed, step: int) -> Plan:
        """Give the steps that measure micro-batches of random samples."""
        if self.every is None or step % self.every:
            return plan
        return with_random_slots(plan, feed.cut, feed.layout, f"{feed.seed}\x1f{step}")

    def measuring(self) -> Sequence[Measuring]:
        """See the base class."""
        return () if self.every is None else [summing_norms]

    def end_rows(self, end: EndOfRun) -> Sequence[Row]:
        """Say whether another global batch would pay."""
        noise = next((p for p in end.opened.context.parts if isinstance(p, NoiseScale)), None)
        text = noise and advice_at(end.run, noise, end.opened.feed.cursor)
        return [row("noise", text, batch_advice=text)]

    def saved_rows(self, run: Run, loaded: Loaded) -> Sequence[Row]:
        """Say the same, or why nothing can be said."""
        return [saved_advice(run, loaded)]
