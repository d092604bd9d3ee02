"""Compute what a loss sum is divided by, here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from trainer.accumulate.base import Divisors
from trainer.core.micro_batch import MicroBatch
from trainer.core.world import World

Kind = Literal["tokens", "samples", "micro_batches"]


def divisors(
    kind: Kind, terms: Sequence[str], micro_batches: Sequence[MicroBatch], world: World
) -> tuple[dict[str, float], list[Divisors]]:
    """Compute the divisors of every micro-batch of one step. Collective: one small vector.

    * `tokens`: the named weights of the whole global batch over all ranks. With it the gradient
      is that of one big batch, however it is cut.
    * `samples`: the number of samples of the whole global batch, for every term.
    * `micro_batches`: each micro-batch's own weight times the number of micro-batches, the mean
      of means. It depends on the cut; for comparison only.

    `terms` are every name that the objective weighs, equal on all ranks.

    Returns:
        The weight of every term in the global batch, and one mapping from term to divisor per
        micro-batch.
    """
    local = [sum(m.weights[name] for m in micro_batches) for name in terms]
    *weights, samples, count = world.sum_numbers(
        [*local, float(sum(len(m.ids) for m in micro_batches)), float(len(micro_batches))]
    )
    whole = dict(zip(terms, weights, strict=True))
    if kind == "micro_batches":
        return whole, [{name: m.weights[name] * count for name in terms} for m in micro_batches]
    divisor = whole
    if kind == "samples":
        divisor = {name: samples if weight else 0.0 for name, weight in whole.items()}
    return whole, [divisor] * len(micro_batches)
