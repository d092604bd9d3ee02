"""Try the model on the main rank before a run is cut; every rank goes by what came out there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, final

from trainer.assemble.components import Components
from trainer.data.collate import LABELS, Limits
from trainer.data.loader import Request
from trainer.models.first_weights import is_on_meta
from trainer.models.output_layer import IS_LAST, candidate
from trainer.objectives.metrics import check_classes
from trainer.tune.flops import ComputeCounts, count_compute
from trainer.tune.predict import CannotRunFake
from trainer.tune.workload import Workload


@final
@dataclass(frozen=True, slots=True)
class Trials:
    """What the model showed on fake tensors."""

    limits: Limits  # rows of the table that looks token ids up, and classes of the labels
    gives_logits: bool  # whether the output layer's outputs are the logits, and nothing else
    # What the longest samples compute; None where the model cannot run fake, and on other ranks,
    # which go by the cost that the main rank found
    counts: ComputeCounts | None = None

    @classmethod
    def run(cls, components: Components, work: Workload) -> Self:
        """Try the model; not collective.

        Raises:
            CannotRunFake: the model was built without weights, and needs more than shapes.
        """
        longest = components.source.lengths.max()
        counts = count_compute(work, longest)
        if counts is None and is_on_meta(components.module) and components.weights is None:
            raise CannotRunFake("the model was built without weights")
        layer = candidate(components.module)
        limits = {} if counts is None else counts.limits
        return cls(limits, layer is not None and IS_LAST in vars(layer), counts)

    def apply(self, components: Components) -> None:
        """Have the loaders compare numbers with the limits, and losses know the output layer.

        Raises:
            TrainError: the classes do not fit a metric, or the longest sample is beyond a limit.
        """
        if LABELS in self.limits:
            check_classes(components.objective.named_metrics, self.limits[LABELS])
        loader, lengths = components.source.loader, components.source.lengths
        for each in [loader, *(part.loader for part in components.held_out.values())]:
            each.limit(self.limits)
        if self.limits:
            loader.load(Request((lengths.argmax(),), 0, lengths.max()))  # the example was without
        if self.gives_logits:
            setattr(candidate(components.module), IS_LAST, True)
