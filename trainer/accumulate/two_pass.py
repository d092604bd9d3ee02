"""Accumulate in two passes the gradient of a loss over all samples of a step.

As GradCache (Gao et al. 2021, 2101.06983): `F(r_1, ..., r_B)` has the gradient
`sum_i <dF/dr_i, dr_i/dw>`, so that a micro-batch needs no more than `dF/dr_i` of its own samples.
The forward runs twice, which where a backward counts as two forwards is a third more computation.
Activations are those of one micro-batch; the rows of the whole global batch are on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from trainer.accumulate.base import (
    Computed,
    Divisors,
    GradientStrategy,
    Pass,
    Rows,
    divided,
    sum_of,
)
from trainer.accumulate.sum import Sum
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import MicroBatch
from trainer.core.rows import Row, RunFacts, row
from trainer.core.tensors import full_products
from trainer.objectives.base import Objective, checked
from trainer.objectives.coupled import CoupledObjective
from trainer.parallel.base import Parallel


@final
class GiveRows(Pass):
    """Give the rows of every sample, without gradients."""

    records_gradients = False

    def micro_batch(
        self,
        model: Parallel,
        objective: Objective,
        micro_batch: MicroBatch,
        divisors: Divisors,
        rows: Rows,
    ) -> Computed:
        """See the base class."""
        return Computed(rows=_coupled(objective).rows(model.call, micro_batch.fields))


@final
class TwoPass(GradientStrategy):
    """Exact for every `CoupledObjective`, however the batch is cut."""

    couplings = frozenset({"batch"})
    before = (GiveRows(),)

    def __init__(self, objective: Objective) -> None:
        _coupled(objective)

    def describe(self, facts: RunFacts) -> Sequence[Row]:
        """See the base class."""
        text = "in two passes: the rows of all samples, then the gradient"
        return [row("gradient", text, group="computed")]

    @full_products()
    def combine(self, objective: Objective, rows: Rows, divisors: Divisors) -> Computed:
        """Compute the loss of all samples, and its gradient by row."""
        coupled, num_samples = _coupled(objective), len(next(iter(rows.values())))
        if num_samples < coupled.min_samples:
            raise ConfigError(too_few(coupled, f"batch.global: a step of {num_samples} sample"))
        inputs = dict[str, Tensor]()
        for name, own in rows.items():
            # Of numbers such as labels there is no gradient.
            if own.is_floating_point():
                inputs[name] = own.requires_grad_()
        sums = checked(objective, coupled.sums_of_rows({**rows, **inputs}), divisors)
        loss = divided(sums.losses, divisors)
        # Of rows that the loss does not use, zeros.
        gradients = torch.autograd.grad(
            loss, [*inputs.values()], allow_unused=True, materialize_grads=True
        )
        found = dict(zip(inputs, gradients, strict=True))
        return Computed(loss=loss, metrics=sums.metrics, rows=found)

    def micro_batch(
        self,
        model: Parallel,
        objective: Objective,
        micro_batch: MicroBatch,
        divisors: Divisors,
        rows: Rows,
    ) -> Computed:
        """See the base class: the rows again, under the same draws, and backward from them."""
        again = _coupled(objective).rows(model.call, micro_batch.fields)
        # `<dF/dr, r>` with dF/dr constant has the gradient that the chain rule asks for.
        terms = [(again[name] * row).sum() for name, row in rows.items()]
        sum_of(terms).backward()  # type: ignore[no-untyped-call] # untyped in torch
        return Computed()


def by_coupling(objective: Objective) -> GradientStrategy:
    """Take two passes where the objective gives rows of samples that it couples, else one."""
    is_coupled = isinstance(objective, CoupledObjective) and objective.coupling.kind == "batch"
    return TwoPass(objective) if is_coupled else Sum()


def too_few(objective: CoupledObjective, what: str) -> str:
    """Say that a step has too few samples."""
    kind, least = type(objective).__name__, objective.min_samples
    return f"{what}, and {kind} compares at least {least}"


def _coupled(objective: Objective) -> CoupledObjective:
    if isinstance(objective, CoupledObjective):
        return objective
    raise ConfigError(
        f"accum.gradient: TwoPass is wrong for {type(objective).__name__}: it needs an objective "
        "that gives rows of all samples (trainer.objectives.coupled.CoupledObjective), such as "
        "contrastive; type accum.gradient=sum for a sum over samples"
    )
