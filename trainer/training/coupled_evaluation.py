"""Evaluate an objective that couples samples over all that is held out, however it is cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import final

import torch
from torch import Tensor

from trainer.accumulate.base import at_places, summed
from trainer.core.micro_batch import Fields
from trainer.core.out_of_memory import no_replay
from trainer.core.tensors import full_products
from trainer.core.world import World
from trainer.data.loader import Request
from trainer.objectives.base import ModelCall, Sums, checked
from trainer.objectives.coupled import CoupledObjective


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
