"""Try the model on the main rank before a run is cut; every rank goes by what came out there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, final

from trainer.build.parts import Parts
from trainer.data.loader import Request
from trainer.models.output_layer import IS_LAST, candidate
from trainer.tune.lookups import lookup_limits
from trainer.tune.predict import mark_output_layer
from trainer.tune.workload import Workload


@final
@dataclass(frozen=True, slots=True)
class Trials:
    """What the model showed on fake tensors.

    Attributes:
        limits: what whole numbers of a field must be below: the rows of the table they look up.
        gives_logits: whether the output layer's outputs are the logits, and nothing else.
    """

    limits: Mapping[str, int]
    gives_logits: bool

    @classmethod
    def run(cls, parts: Parts, work: Workload) -> Self:
        """Try the model; not collective."""
        limits = lookup_limits(work, parts.source.lengths.max(), parts.source.loader.limits)
        mark_output_layer(work)
        layer = candidate(parts.module)
        return cls(limits, layer is not None and IS_LAST in vars(layer))

    def apply(self, parts: Parts) -> None:
        """Have the loaders compare numbers with the limits, and losses know the output layer."""
        loader, lengths = parts.source.loader, parts.source.lengths
        for each in [loader, *([parts.held_out.loader] if parts.held_out else [])]:
            each.limit(self.limits)
        if self.limits:
            loader.load(Request((lengths.argmax(),), 0, lengths.max()))  # the example was without
        if self.gives_logits:
            setattr(candidate(parts.module), IS_LAST, True)
