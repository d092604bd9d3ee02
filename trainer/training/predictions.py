"""Tell of each held-out sample what the model predicts, and what its loss is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from trainer.config.amounts import whole
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import Fields, to_device
from trainer.core.world import World
from trainer.data.loader import Request
from trainer.objectives.base import ModelCall, Objective, sums_of, weights_of
from trainer.objectives.coupled import CoupledObjective
from trainer.parallel.base import Parallel
from trainer.plan.cut import IntArray
from trainer.plan.partition import pad_lengths
from trainer.training.data import HeldOut
from trainer.training.evaluation import forward_passes

Line = dict[str, Any]
EXCHANGED_AT_ONCE = 1024  # samples between two exchanges of what the ranks found


def predict(
    model: Parallel,
    objective: Objective,
    part: HeldOut,
    world: World,
    was_asked: Callable[[], bool] = lambda: False,
) -> list[Line]:
    """Give the lines of predictions.jsonl for what is held out, in the order of ids. Collective.

    A sample is computed alone, so that its figures are the same for every cut and number of ranks.
    Gives `id`; `label` and `prediction`, by the names of the classes where the data have
    `label_names`, and None where the objective tells nothing but a loss; `loss`, the mean over the
    loss terms, or None without one; `terms`, their number.
    """
    coupling, kind = objective.coupling, type(objective).__name__
    if coupling.kind != "none" and not tells_by_rows(objective):
        raise ConfigError(f"eval.predictions=true: {kind} gives no sample a loss: {coupling.why}")
    return lines_of_all(part, world, was_asked, partial(_lines, model, objective, part, world))


def lines_of_all(
    part: HeldOut,
    world: World,
    was_asked: Callable[[], bool],
    lines_of: Callable[[IntArray], Iterator[Line]],
) -> list[Line]:
    """Give the lines of all samples by their ids; `lines_of` gives a rank's own. Collective."""
    found = list[Line]()
    for start in range(0, part.num_samples, EXCHANGED_AT_ONCE):
        places = part.chosen(start, start + EXCHANGED_AT_ONCE)
        compute: Callable[[], list[Line]] = partial(list, lines_of(places))
        for each in world.on_all(compute):
            found += each
        world.end_if(was_asked(), "stopped during an evaluation")
    return sorted(found, key=lambda line: int(line["id"]))


def _lines(
    model: Parallel, objective: Objective, part: HeldOut, world: World, places: IntArray
) -> Iterator[Line]:
    """Compute this rank's samples of those at some places, one after the other."""
    data, packed = part.loader.dataset, part.layout.packed
    places = places[world.rank :: world.size]
    padded = pad_lengths(part.lengths[places], part.layout).tolist()
    requests = (
        Request(ids=(place,), epoch=0, pad_to=length, packed=packed)
        for place, length in zip(places.tolist(), padded, strict=True)
    )
    # Numbers are names of classes only where the objective chooses among classes.
    names = data.facts.label_names if objective.class_axis is not None else None
    model.gather()
    with forward_passes(model, part.loader, requests, world) as loaded:
        for place, loaded_fields in zip(places, loaded, strict=True):
            call, fields = _Recorder(model.call), to_device(loaded_fields, world.device)
            # A sample has no loss of its own where all are coupled.
            found: dict[str, Any] = {"loss": None, "terms": 0}
            if objective.coupling.kind == "none":
                found = loss_of(objective, call, loaded_fields, world.device)
            if isinstance(objective, CoupledObjective):
                pairs = objective.row_predictions(objective.rows(model.call, fields))
            else:
                pairs = objective.predictions(call.output, fields)
            label, prediction = next(iter(pairs), (None, None))
            line: Line = {"id": int(data.original_ids(place))}
            if (source := data.source_of(place)) is not None:
                line["source"] = source
            line["label"] = named_classes(label, names)
            line["prediction"] = named_classes(prediction, names)
            yield line | found
    model.release()


def loss_of(
    objective: Objective, call: ModelCall, loaded: Fields, device: torch.device
) -> dict[str, Any]:
    """Give `loss`, the mean over the loss terms of a sample or None, and `terms`, their number."""
    weights, means = weights_of(objective, loaded), list[Tensor]()
    losses = sums_of(objective, call, to_device(loaded, device), weights).losses
    for name, loss in losses.items():
        if weights[name]:
            means.append(loss.double() / weights[name])
    found: dict[str, Any] = {"loss": None, "terms": whole(max(weights[n] for n in losses))}
    if means:
        found["loss"] = float(torch.stack(means).sum())
    return found


def tells_by_rows(objective: Objective) -> bool:
    """Whether an objective that couples samples predicts something of each."""
    method = getattr(type(objective), "row_predictions", None)
    return method not in {None, CoupledObjective.row_predictions}


def named_classes(value: Any, names: Sequence[str] | None) -> Any:  # noqa: ANN401 - any JSON
    """Put the names of classes for their numbers, where there are any."""
    if isinstance(value, list):
        return [named_classes(each, names) for each in value]
    # A label of -100 is none.
    if names is not None and isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    return value


@final
class _Recorder:
    """Calls a model, and has what it gave."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self.output: Any = None

    def __call__(self, fields: Fields) -> Any:  # noqa: ANN401 - any model
        self.output = self._call(fields)
        return self.output

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of any call
        return getattr(self._call, name)
