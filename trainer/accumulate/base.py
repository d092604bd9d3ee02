"""Define gradient strategies: what is done with each micro-batch, in one pass over them or several.

A strategy leaves this rank's share of the step's gradient in `.grad`. Everything around it is the
step's, in one place: devices, seeds, sync, empty slots, running out of memory, agreeing over ranks,
bringing rows of samples from one pass to the next, reducing, replaying and skipping.

To add one, subclass `GradientStrategy` and name the class in a YAML file of `accum/gradient`.
"""

from __future__ import annotations

import functools
import itertools
import operator
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NoReturn, cast, final

import torch
from torch import Tensor

from trainer.core import gpu
from trainer.core.coupling import CouplingKind
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import MicroBatch, to_device
from trainer.core.rows import Described
from trainer.core.tensors import dtype_name
from trainer.core.world import World
from trainer.data import samples
from trainer.models.check import unmoved
from trainer.objectives.base import Objective, at_least_single
from trainer.objectives.metrics import add_statistics
from trainer.parallel.base import Parallel

Divisors = Mapping[str, float]
"""What each named loss sum of one micro-batch is divided by."""

WeightUnit = Literal["tokens", "samples", "micro_batches"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepDivisors:
    """What the named sums of one step are divided by."""

    weights: Divisors  # of every term in the global batch, by which metrics are divided
    whole: Divisors  # of sums over the whole global batch
    each: Sequence[Divisors]  # of this rank's micro-batches
    num_samples: int  # of the micro-batches of all ranks

    def over(self, scale: float) -> StepDivisors:
        """Give divisors whose losses are `scale` times larger."""

        def smaller(part: Divisors) -> Divisors:
            return {name: divisor / scale for name, divisor in part.items()}

        return replace(self, whole=smaller(self.whole), each=[*map(smaller, self.each)])


def divisors(
    kind: WeightUnit, terms: Sequence[str], micro_batches: Sequence[MicroBatch], world: World
) -> StepDivisors:
    """Compute what a loss sum is divided by, here and nowhere else. Collective: one small vector.

    * `tokens`: the named weights of the whole global batch over all ranks. With it the gradient
      is that of one big batch, however it is cut.
    * `samples`: the number of samples of the whole global batch, for every term.
    * `micro_batches`: each micro-batch's own weight times the number of micro-batches, the mean
      of means. It depends on the cut; for comparison only.

    `terms` are every name that the objective weighs, equal on all ranks.
    """
    local = list[float]()
    for name in terms:
        local.append(sum(m.weights[name] for m in micro_batches))
    num_own = sum(len(m.ids) for m in micro_batches)
    # One vector for all: a message of a few numbers costs as much as one of a single number.
    *sums, samples, count = world.sum_numbers([*local, float(num_own), float(len(micro_batches))])
    weights = whole = dict(zip(terms, sums, strict=True))
    if kind == "samples":
        whole = dict.fromkeys(terms, samples)
        # A term that no sample weighs has no samples, and adds nothing to the loss.
        for name, weight in weights.items():
            if not weight:
                whole[name] = 0.0
    each = [whole] * len(micro_batches)
    if kind == "micro_batches":
        each = []
        for micro_batch in micro_batches:
            each.append({name: micro_batch.weights[name] * count for name in terms})
    return StepDivisors(weights=weights, whole=whole, each=each, num_samples=int(samples))


def reference_kind(kind: WeightUnit) -> WeightUnit:
    """Name the normalizer of the whole-batch step that one approximates: mostly itself."""
    return "tokens" if kind == "micro_batches" else kind


Rows = Mapping[str, Tensor]
"""Tensors by name whose first dimension is samples."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What a pass gives: for one micro-batch or, from `combine`, for the whole global batch."""

    # Share of the step's loss, 0-d and divided; in the last pass alone
    loss: Tensor | None = None
    # Named 0-d sums, those that the objective gives in training; in the last pass alone
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Rows = field(default_factory=dict)  # one row for each sample, for the next pass


class Pass(ABC):
    """One walk over the micro-batches of a step.

    It may be walked again on the same micro-batches: every random draw is keyed to its micro-batch,
    so a replay, and a later pass, draw the same. It runs no collective, divides by nothing but the
    divisors it is given, and does not catch allocation failures.
    """

    records_gradients: ClassVar[bool] = True
    """Whether micro-batches run with a graph. A pass without one writes no `.grad`."""

    def combine(self, objective: Objective, rows: Rows, divisors: Divisors) -> Computed:
        """Work on what the pass before gave, before the first micro-batch of this one.

        Every rank does the same, on the same rows. By default they are handed on. It is not called
        where the pass before gave no rows.

        Args:
            objective: gives the named sums.
            rows: of the whole global batch over all ranks, `(global batch, ...)`, in sample order.
            divisors: of sums over the whole global batch.

        Returns:
            The loss and metrics of the whole global batch, which count once, and rows of which
            each micro-batch gets its own samples'.
        """
        return Computed(rows=rows)

    @abstractmethod
    def micro_batch(
        self,
        model: Parallel,
        objective: Objective,
        micro_batch: MicroBatch,
        divisors: Divisors,
        rows: Rows,
    ) -> Computed:
        """Compute one micro-batch; with gradients, call `backward()` on its share.

        Args:
            model: laid out over ranks; `model.call(fields)` runs it.
            objective: gives the named sums.
            micro_batch: on its device.
            divisors: what its sums are divided by, of the whole global batch over all ranks.
            rows: what `combine` gave for its samples; none in the first pass.
        """

    def walk(
        self,
        model: Parallel,
        objective: Objective,
        micro_batches: Sequence[MicroBatch],
        divisors: StepDivisors,
        rows: Rows,
        *,
        is_last: bool,
    ) -> Computed:
        """Compute every micro-batch, on its device, under its seed and within its sync.

        `rows` are of the whole global batch, from the pass before; none in the first. The last pass
        gives this rank's share of the loss, in float64, and of the metrics; the others its samples'
        rows.
        """
        device, metrics = model.world.device, dict[str, Tensor]()
        total, loss = torch.zeros((), dtype=torch.float64, device=device), None
        found = defaultdict[str, list[Tensor]](list)
        if rows:
            whole = _checked(self.combine(objective, rows, divisors.whole), self, "combine")
            rows, loss = whole.rows, whole.loss
            # All ranks computed the same, and sums over ranks follow.
            if model.world.is_main:
                total += 0.0 if loss is None else loss.detach()
                add_statistics(metrics, whole.metrics)
        for index, micro_batch in enumerate(micro_batches):
            seed_draws(micro_batch.rng_key, device)
            # In lockstep a rank with fewer micro-batches fills up with some of no samples.
            aside = nullcontext() if micro_batch.ids else unmoved(model.module)
            recording: AbstractContextManager[Any] = torch.no_grad()
            if self.records_gradients:
                ends = is_last and index == len(micro_batches) - 1
                recording = model.micro_batch(is_last=ends)
            else:
                model.world.rank_progress.next_micro_batch()
            with recording, aside:
                here = replace(micro_batch, fields=to_device(micro_batch.fields, device))
                own = _taken(rows, micro_batch.positions)
                given = self.micro_batch(model, objective, here, divisors.each[index], own)
                given = _checked(given, self, "micro_batch", num_samples=len(micro_batch.ids))
            if given.loss is not None:
                # In float64: of thousands of shares a float32 sum would lose three digits. Without
                # its graph, whose tensors would stay.
                loss = given.loss.detach()
                total += loss
            add_statistics(metrics, given.metrics)
            for name, value in given.rows.items():
                found[name].append(value.detach())
        if is_last and loss is None and micro_batches:
            _refuse(self, "micro_batch", None)
        joined = {name: torch.cat(values) for name, values in found.items()}
        return Computed(loss=total, metrics=metrics, rows=joined)


class GradientStrategy(Pass, Described):
    """How the gradients of micro-batches become the step's gradient: passes, the last its own."""

    couplings: ClassVar[frozenset[CouplingKind]] = frozenset({"none", "group", "micro_batch"})
    """The couplings of an objective that it is exact for."""

    single_backward: ClassVar[bool] = False
    """Whether a micro-batch has one backward, so that the last may send gradients as it goes on."""

    before: ClassVar[tuple[Pass, ...]] = ()
    """Passes before this one, in order; what each gives as `rows` reaches the next one."""

    @property
    def passes(self) -> tuple[Pass, ...]:
        """All passes of a step, in order."""
        return (*self.before, self)


def seed_draws(key: int, device: torch.device) -> None:
    """Tie every random draw that follows to a key: of PyTorch, NumPy and Python (10 us)."""
    samples.seed_cpu_draws(key)
    if gpu.is_gpu(device):
        gpu.backend().manual_seed(key)


def divided(losses: Mapping[str, Tensor], divisors: Divisors) -> Tensor:
    """Turn named sums into their share of the step's loss, 0-d.

    A term without a single weight in the global batch has a sum of zero and adds zero. Sums in half
    precision are widened, where a quotient by small divisors may not fit.
    """
    shares = list[Tensor]()
    for name, loss_sum in losses.items():
        shares.append(at_least_single(loss_sum) / (divisors[name] or 1.0))
    return sum_of(shares)


def sum_of(terms: Sequence[Tensor]) -> Tensor:
    """Add 0-d tensors, in order."""
    return functools.reduce(operator.add, terms)


def _taken(rows: Rows, places: Sequence[int]) -> Rows:
    """Take the rows of some samples, without a wait for the device."""
    # As in every step of one pass.
    if not rows:
        return {}
    at, taken = torch.tensor(places), dict[str, Tensor]()
    for name, of_all in rows.items():
        taken[name] = of_all[at.to(of_all.device, non_blocking=True)]
    return taken


def at_places(rows: Rows, places: Sequence[int], num_samples: int) -> Rows:
    """Put rows to the places of their samples among all, and zeros to others.

    So that a plain sum over ranks gathers them, however many each rank has, and their order does
    not depend on the cut. It sends twice what a gathering would.
    """
    at, whole = torch.tensor(places), dict[str, Tensor]()
    for name, own in rows.items():
        whole[name] = own.new_zeros((num_samples, *own.shape[1:]))
        whole[name][at.to(own.device, non_blocking=True)] = own
    return whole


def at_positions(rows: Rows, micro_batches: Sequence[MicroBatch], num_samples: int) -> Rows:
    """Put the rows of a rank's micro-batches to the places of their samples in the global batch."""
    places = itertools.chain.from_iterable(each.positions for each in micro_batches)
    return at_places(rows, [*places], num_samples)


def summed(rows: Rows, world: World, name: str) -> Rows:
    """Add what ranks put to their places; a rank without samples may have none. Collective."""
    whole = dict(sorted(rows.items()))
    forms = [[key, list(own.shape), dtype_name(own.dtype)] for key, own in whole.items()]
    given = [*filter(None, world.collect(forms))]
    if any(each != given[0] for each in given):
        raise ConfigError(f"{name}: ranks gave rows of different names, shapes or dtypes: {given}")
    if given and not whole:
        # A rank without samples takes part in the sums, with zeros of the shapes of others.
        for key, shape, dtype in given[0]:
            whole[key] = torch.zeros(shape, dtype=getattr(torch, dtype), device=world.device)
    for own in whole.values():
        world.sum(own)
    return whole


def _checked(given: object, each: Pass, method: str, num_samples: int | None = None) -> Computed:
    """Refuse what a pass of the user's own may not return."""
    if not isinstance(given, Computed):
        _refuse(each, method, given)
    loss = cast(object, given.loss)
    if loss is not None and (not isinstance(loss, Tensor) or loss.ndim):
        _refuse(each, method, loss)
    for name, rows in cast(Mapping[str, object], given.rows).items():
        if num_samples is not None and (not isinstance(rows, Tensor) or len(rows) != num_samples):
            raise ConfigError(
                f"accum.gradient: {method} of {type(each).__name__}, rows {name}: give a tensor "
                f"with one row for each of the {num_samples} samples"
            )
    return given


def _refuse(each: Pass, method: str, given: object) -> NoReturn:
    raise ConfigError(
        f"accum.gradient: {method} of {type(each).__name__} returned a {type(given).__name__}; "
        "return Computed(loss=...) with a share of the step's loss, a 0-d tensor"
    )
