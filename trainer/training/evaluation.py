"""Evaluation over the held-out data: named sums over named weights, exact for every split."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypedDict, TypeVar, final

import torch
from torch import Tensor

from trainer.accumulate.base import at_places, summed
from trainer.core.errors import DoesNotFitError, Preempted
from trainer.core.micro_batch import Fields, to_device
from trainer.core.out_of_memory import AllocationGuard, no_replay, release_memory
from trainer.core.tensors import full_products
from trainer.core.world import World
from trainer.data.loader import Loader, Request
from trainer.models.bind import Casts
from trainer.models.frozen import evaluating
from trainer.objectives.base import ModelCall, Objective, Sums, checked, sums_of, weights_of
from trainer.objectives.coupled import CoupledObjective
from trainer.objectives.metrics import metrics_of_sums
from trainer.parallel.base import Parallel
from trainer.training.context import StepContext
from trainer.training.data import HeldOut

FloatOrTensor = TypeVar("FloatOrTensor", float, Tensor)
_Numbers = Mapping[str, Sequence[float]]


class _Found(TypedDict):
    """What a rank found over its samples; as JSON, which ranks exchange."""

    # By name: one number, or one of each micro-batch where they are to be added exactly
    sums: _Numbers
    weights: _Numbers
    terms: Sequence[str]  # which of the names are loss terms
    statistics: Mapping[str, Sequence[Any]]  # of the objective
    was_asked: bool  # whether a signal asked to stop


def evaluate_parts(
    context: StepContext,
    parts: Mapping[str, HeldOut],
    was_asked: Callable[[], bool] = lambda: False,
) -> dict[str, dict[str, float]]:
    """Average every loss term and metric over each part of the held-out data. Collective.

    Sums are kept in float64; of a part that joins others theirs are added. Running out of memory
    halves the cap and begins again; the training plan stays as it is. `was_asked` tells whether a
    signal asked this rank to stop, and is called after each micro-batch. Gives `loss`, the sum of
    the loss terms, then every term and metric by name. A name whose weight is zero is NaN.
    """
    found: dict[str, list[_Found]] = {}
    for name, part in parts.items():
        if not part.joins:
            found[name] = _sums(context, part, was_asked)
    for name, part in parts.items():
        if part.joins:
            found[name] = [*chain.from_iterable(found[joined] for joined in part.joins)]
    means = {name: _means(context.model.objective, found[name]) for name in parts}
    for figures in context.figures:
        for name, more in figures(context, parts, was_asked).items():
            means[name] |= more
    return means


def _sums(context: StepContext, held_out: HeldOut, was_asked: Callable[[], bool]) -> list[_Found]:
    """Sum over the held-out data; what each rank found. Collective."""
    objective, world = context.model.objective, context.world
    world.note("evaluation")
    coupled, found = None, list[_Found]()
    if isinstance(objective, CoupledObjective):
        chosen = held_out.chosen(0, held_out.num_samples).tolist()
        coupled = CollectedRows(objective, {i: place for place, i in enumerate(chosen)})
    while None in (found := world.collect(_attempt(context, held_out, was_asked, coupled))):
        release_memory()
        longest = int(held_out.lengths.max())
        if held_out.max_tokens <= longest:
            raise DoesNotFitError(
                f"evaluation: no memory for one sample of {longest} tokens: lower data.max_length"
            )
        held_out = replace(held_out, max_tokens=held_out.max_tokens // 2)
    if any(each["was_asked"] for each in found):
        raise Preempted("stopped during an evaluation")
    if coupled is None:
        return found
    sums = coupled.sums(world, [each["weights"] for each in found])
    totals = {n: total.double() for n, total in chain(sums.losses.items(), sums.metrics.items())}
    # One transfer from the device for all of them.
    values = torch.stack([*totals.values()]).tolist()
    for each in found:
        each["sums"], each["terms"], each["statistics"] = {}, [*sums.losses], {}
    # They are of all samples at once: they stand in place of the first rank's.
    found[0]["sums"] = {name: [value] for name, value in zip(totals, values, strict=True)}
    return found


def _means(objective: Objective, found: Sequence[_Found]) -> dict[str, float]:
    """Divide the sums of all by their weights."""
    # A rank may hold none of the samples, and then knows no name.
    known = max(found, key=lambda each: len(each["weights"]))
    terms, means = known["terms"], dict[str, float]()
    for name in known["weights"]:  # in the objective's order
        numbers, counts = list[float](), list[float]()
        for each in found:
            numbers += each["sums"].get(name, ())
            counts += each["weights"].get(name, ())
        total, weight = _rounded_once(numbers), _rounded_once(counts)
        means[name] = total / (weight or math.nan)
    whole = {"loss": sum(means[name] for name in terms)}
    if len(terms) == 1:
        del means[terms[0]]  # which is the whole
    figures = metrics_of_sums(objective, _merged([each["statistics"] for each in found]))
    return whole | means | figures | whole  # first, and in place of a term that is called so


def _attempt(
    context: StepContext,
    held_out: HeldOut,
    was_asked: Callable[[], bool],
    coupled: CollectedRows | None = None,
) -> _Found | None:
    """Sum over this rank's samples; None when an allocation failed.

    The next micro-batches are loaded meanwhile. Sums stay on the device until the last. Those of
    an objective that couples samples are none yet, and its rows are collected.
    """
    model, objective, world = context.parallel, context.model.objective, context.world
    totals: dict[str, list[Tensor]] = defaultdict(list)
    weights: dict[str, list[float]] = defaultdict(list)
    statistics: dict[str, list[Tensor]] = defaultdict(list)
    losses: tuple[str, ...] = ()
    model.gather()
    guard, requests = AllocationGuard(), held_out.requests(world.rank)
    if coupled is not None:
        requests = coupled.noted(requests)
    with guard, forward_passes(model, held_out.loader, requests, world) as loaded:
        for fields in loaded:
            counted = weights_of(objective, fields)
            given = to_device(fields, world.device)
            if coupled is None:
                found = sums_of(objective, model.call, given, counted)
            else:
                found = coupled.add(model.call, given)
            losses = tuple(found.losses)
            for name, weight in counted.items():
                _add(weights[name], weight, apart=held_out.is_ordered)
            for name, total in chain(found.losses.items(), found.metrics.items()):
                _add(totals[name], total.double(), apart=held_out.is_ordered)
            for name, total in found.statistics.items():
                is_apart = held_out.is_ordered and total.is_floating_point()
                _add(statistics[name], total, apart=is_apart)
            if was_asked():
                break
        sums = {name: torch.stack(each).tolist() for name, each in totals.items()}
        merged = {name: torch.stack(each).tolist() for name, each in statistics.items()}
    model.release()
    if guard.failed:
        return None
    return {
        "sums": sums,
        "weights": weights,
        "terms": losses,
        "statistics": merged,
        "was_asked": was_asked(),
    }


def _add(numbers: list[FloatOrTensor], number: FloatOrTensor, *, apart: bool) -> None:
    """Add a micro-batch's number to the sum, or beside the others."""
    if apart or not numbers:
        numbers.append(number)
    else:
        numbers[0] = numbers[0] + number


def _merged(found: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, Tensor]:
    """Add the statistics of all ranks, in float64 and so that the order does not matter."""
    by_name: dict[str, list[Any]] = defaultdict(list)
    for each in found:
        for name, values in each.items():
            by_name[name] += values
    merged = dict[str, Tensor]()
    for name, values in by_name.items():
        parts = torch.tensor(values, dtype=torch.float64)
        merged[name] = parts.sum(0)
        # Counts are exact in any order.
        if parts.frac().any():
            columns = parts.flatten(1).T.tolist()
            sums = torch.tensor([*map(_rounded_once, columns)], dtype=torch.float64)
            merged[name] = sums.view(parts.shape[1:])
    return merged


def _rounded_once(numbers: Sequence[float]) -> float:
    """Add numbers so that the sum does not depend on their order."""
    # `fsum` raises over an infinity that meets its opposite.
    if not all(map(math.isfinite, numbers)):
        return sum(numbers)
    return math.fsum(numbers)


@contextmanager
def forward_passes(
    model: Parallel, loader: Loader, requests: Iterator[Request], world: World
) -> Iterator[Iterator[Fields]]:
    """Load micro-batches, of which the model is to run forward passes alone."""
    stream = closing(loader.stream(requests))
    with inference(model, world), closing(loader), stream as loaded:
        yield loaded


@contextmanager
def inference(model: Parallel, world: World) -> Iterator[None]:
    """Run forward passes alone: no dropout, no graph, each weight cast once."""
    casts = Casts(model.module).once(world.device.type)
    with evaluating(model.module), casts, torch.no_grad():
        yield


@final
@dataclass(eq=False)
class CollectedRows:
    """Collects the rows of held-out samples, to be summed once all are there."""

    objective: CoupledObjective
    places: Mapping[int, int]  # of a held-out sample, among those that are evaluated
    _rows: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list), init=False)
    _ids: list[int] = field(default_factory=list, init=False)

    def noted(self, requests: Iterator[Request]) -> Iterator[Request]:
        """Begin; pass requests on, whose micro-batches are to be added in this order."""
        self._rows.clear()
        self._ids.clear()
        for request in requests:
            self._ids += request.ids
            yield request

    def add(self, model: ModelCall, fields: Fields) -> Sums:
        """Run the model on the next micro-batch, which has no sums of its own."""
        for name, own in self.objective.rows(model, fields).items():
            # A view of a parameter is gone once the model gives its shards back.
            self._rows[name].append(own.clone())
        return Sums(losses={})

    @full_products()
    def sums(self, world: World, weights: Sequence[Mapping[str, Sequence[float]]]) -> Sums:
        """Sum over the samples of all ranks, the same on each. Collective."""
        counted: dict[str, float] = defaultdict(float)
        for name, counts in chain.from_iterable(each.items() for each in weights):
            counted[name] += sum(counts)
        with no_replay("in an evaluation: set a smaller eval.samples"), torch.no_grad():
            mine = {name: torch.cat(parts) for name, parts in self._rows.items()}
            at = [self.places[i] for i in self._ids]
            rows = summed(at_places(mine, at, len(self.places)), world, "evaluation")
            return checked(self.objective, self.objective.sums_of_rows(rows), counted)
