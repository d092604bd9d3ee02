"""Give each source of the data its share of the loss of a micro-batch, for the figures of a step.

Samples say where they come from by fields named `source:NAME`. Where each label counts at its own
logits the share is the loss of the same logits with the labels of all other samples left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from trainer.core.micro_batch import IGNORED, Fields
from trainer.data.collate import LABELS
from trainer.data.samples import SOURCE, without_marks

if TYPE_CHECKING:
    from trainer.objectives.base import ModelCall, Objective, Sums


def marks_by_source(objective: Objective, fields: Fields) -> dict[str, Tensor]:
    """Mark what is of each source, in the shape of the labels, to which it may be broadcast.

    Empty where samples have no source, or the objective is no sum over labels and their logits.
    """
    labels = fields.get(LABELS)
    if labels is None or not objective.sums_samples or objective.coupling.kind != "none":
        return {}
    found = {}
    for name, mark in fields.items():
        if name.startswith(SOURCE):
            own = mark
            # Where no documents are packed a row is of one sample, and so of one source.
            if "cu_seqlens" not in fields:
                first = mark[:, 0] if mark.dim() > 1 else mark
                own = first.reshape(-1, *[1] * (labels.dim() - 1))
            found[name.removeprefix(SOURCE)] = own
    return found


def figure_of(source: str, term: str, terms: int) -> str:
    """Name a source's share of a loss term: `loss_code`, or by the term where there are several."""
    return f"{'loss' if terms == 1 else term}_{source}"


def source_sums(
    objective: Objective, call: Recorded, fields: Fields, weights: Mapping[str, float], given: Sums
) -> dict[str, Tensor]:
    """Sum the loss terms of each source from what the model gave; without a graph.

    `call` is that by which the objective called the model, `given` what it gave of all samples. A
    source without a weight is not computed, nor is one alone.
    """
    marks, found, losses = marks_by_source(objective, fields), dict[str, Tensor](), given.losses
    zero = torch.zeros((), dtype=torch.float64, device=next(iter(losses.values())).device)
    # Names of figures, in the order of the losses.
    present = dict[str, list[str]]()
    for source in marks:
        figures = [figure_of(source, term, len(losses)) for term in losses]
        if any(weights[figure] for figure in figures):
            present[source] = figures
        else:
            found |= dict.fromkeys(figures, zero)
    for source, figures in present.items():
        # Right where a single source is here; of several they are summed apart.
        sums = [*losses.values()]
        if len(present) > 1 and given.terms is not None:
            whole = given.terms.where(marks[source], 0.0).sum(dtype=torch.float64)
            sums = [whole] * len(figures)
        elif len(present) > 1:
            labels = fields[LABELS].masked_fill(~marks[source], IGNORED)
            with torch.no_grad():
                own = objective.sums(call, {**without_marks(fields), LABELS: labels}).losses
            sums = [own[term] for term in losses]
        for figure, total in zip(figures, sums, strict=True):
            found[figure] = total.detach().double()
    return found


@final
class Recorded:
    """Calls a model once, and gives the same again when it is called again."""

    def __init__(self, call: ModelCall) -> None:
        self._call, self._outputs = call, dict[str, Any]()

    def __call__(self, fields: Fields) -> Any:  # noqa: ANN401 - any model
        """Call the model as it is."""
        if "whole" not in self._outputs:
            self._outputs["whole"] = self._call(fields)
        return self._outputs["whole"]

    def without_output_layer(self, fields: Fields) -> Any:  # noqa: ANN401 - any model
        """See `ModelRun`."""
        if "inner" not in self._outputs:
            self._outputs["inner"] = self._call.without_output_layer(fields)  # type: ignore[attr-defined]
        return self._outputs["inner"]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of any call
        return getattr(self._call, name)
