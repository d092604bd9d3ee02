"""Compute what a loss sum is divided by, here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from trainer.accumulate.base import StepDivisors
from trainer.core.micro_batch import MicroBatch
from trainer.core.world import World

WeightUnit = Literal["tokens", "samples", "micro_batches"]


def divisors(
    kind: WeightUnit, terms: Sequence[str], micro_batches: Sequence[MicroBatch], world: World
) -> StepDivisors:
    """Compute the divisors of every micro-batch of one step. Collective: one small vector.

    * `tokens`: the named weights of the whole global batch over all ranks. With it the gradient
      is that of one big batch, however it is cut.
    * `samples`: the number of samples of the whole global batch, for every term.
    * `micro_batches`: each micro-batch's own weight times the number of micro-batches, the mean
      of means. It depends on the cut; for comparison only.

    `terms` are every name that the objective weighs, equal on all ranks.
    """
    local = [sum(m.weights[name] for m in micro_batches) for name in terms]
    *sums, samples, count = world.sum_numbers(
        [*local, float(sum(len(m.ids) for m in micro_batches)), float(len(micro_batches))]
    )
    weights = whole = dict(zip(terms, sums, strict=True))
    if kind == "samples":
        whole = {name: samples if weight else 0.0 for name, weight in weights.items()}
    each = [whole] * len(micro_batches)
    if kind == "micro_batches":
        each = [{name: m.weights[name] * count for name in terms} for m in micro_batches]
    return StepDivisors(weights=weights, whole=whole, each=each, num_samples=int(samples))


def reference_kind(kind: WeightUnit) -> WeightUnit:
    """Name the normalizer of the whole-batch step that one approximates: mostly itself."""
    return "tokens" if kind == "micro_batches" else kind
