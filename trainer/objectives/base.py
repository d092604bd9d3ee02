"""Say what an objective is: named loss sums over named, data-only weights. It never divides.

The step's loss is `sum_k S_k / D_k`: `S_k` the sum of term `k` over the whole global batch, `D_k`
its denominator, also over the whole global batch and all ranks, known before the first backward.
A coefficient belongs into the sum. Metrics are sums over weights in the same way, so evaluation
is exact for every split. One of your own names its metrics; every other name is a loss:

    class Regression(Objective):
        metric_names = ("error",)

        def weights(self, fields):
            count = float(len(fields["target"]))
            return {"square": count, "error": count}

        def sums(self, model, fields):
            gap = model({"x": fields["x"]}) - fields["target"]
            return Sums(losses={"square": gap.square().sum()}, metrics={"error": gap.abs().sum()})
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self, final

import torch
from torch import Tensor, nn

from trainer.core.coupling import NONE, Coupling
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import IGNORED, Fields, output_part
from trainer.core.rows import Described
from trainer.core.stateful import STEP_KEYS
from trainer.data.collate import LABELS, WEIGHT
from trainer.data.samples import LabelKind, without_marks
from trainer.objectives.by_source import Recorded, figure_of, marks_by_source, source_sums
from trainer.objectives.text_output import TextOutput

ModelCall = Callable[[Fields], Any]
"""Calls the model with those fields its `forward` names; gives what the model gives."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What one micro-batch adds to the step."""

    # Named 0-d sums with a graph, the same names for every micro-batch: one without a loss term
    # gives a sum over nothing
    losses: Mapping[str, Tensor]
    # Named 0-d sums without one. Those given while gradients are recorded are figures of the step,
    # in metrics.jsonl, on the screen and in W&B. An evaluation, under `no_grad`, needs them all;
    # the built-in objectives give theirs there alone, where they are free.
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    # Of an evaluation, what `statistics_of` gives: sums of any shape, of which metrics are made
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    # The one loss at each label, without a graph, where it costs nothing to tell; 0 where none is
    terms: Tensor | None = None


class Objective(Described, ABC):
    """Turns a model and a micro-batch into named sums, and a micro-batch into named weights."""

    coupling: Coupling = NONE
    """Which samples its loss couples. By default none: it is a sum over samples.

    Under `Coupling("group", n)` that many consecutive samples of a step form a group, in the order
    in which the step takes them, the last of which may be short; a micro-batch holds whole groups,
    one after the other. Under `Coupling("batch")` it couples all samples of a step (contrastive),
    and only a gradient strategy that lists `batch` in its `couplings` computes it."""

    scope: str = "sample"
    """In a subclass, `embedding` is short for `coupling = Coupling("batch")`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if vars(cls).get("scope") == "embedding" and "coupling" not in vars(cls):
            cls.coupling = Coupling("batch", why=f"{cls.__name__} compares all samples of a step")

    metric_names: Collection[str] = ()
    """Which names of `weights` are metrics, as a tuple; a subclass adds its own to its parent's.

    A step in which no loss has a weight updates nothing, and only a metric named here may be left
    out while training."""

    class_axis: int | None = None
    """Axis of the logits that `labels` choose a class on, so that a label without a class is named
    with its sample; None where labels mean something else."""
    sums_samples: bool = False
    """Whether it adds samples up whatever the model gives, each label at its own logits: then no
    start tries it on a sample and on the same sample twice."""

    named_metrics: Sequence[str] = ()
    """Those that `objective.metrics` names, set for a run."""

    gives_rows: bool = False
    """Whether it couples samples by rows of them, of which an evaluation brings all together."""

    predicts_next: bool = False
    """Whether logits are of the token behind their position, so that text can be continued."""

    rate_share: float = 1.0
    """The share it takes of the default learning rate of loaded weights, or of an adapter."""

    writes_labels: bool = False
    """Whether `predict` writes the labels, as a text of its own."""

    is_of_model: bool = False
    """Whether the model computes the loss, as it likes."""

    def with_metrics(self, names: Sequence[str]) -> Self:
        """Give the same objective with metrics of a run, as `objective.metrics` names them."""
        same = copy(self)
        vars(same)["named_metrics"] = tuple(names)
        return same

    @property
    def label_kind(self) -> LabelKind | None:
        """What its labels are, where its `sums` give the `statistics_of` logits and labels."""
        return None

    def frozen_model(self, module: nn.Module, *, has_base: bool) -> nn.Module | None:
        """Make the frozen model that the loss needs beside the trained one; None where it has all.

        Called once, with the model as training begins. What is given is laid out, saved and copied
        with the model. In `sums`, `with model.frozen() as frozen:` lends its call; where there is
        none, that of the model as its adapter leaves it, which `has_base` says is how it began.
        """
        return None

    def prepare(self, sample: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """Change one sample before it is collated, in the process that loads it.

        What PyTorch, NumPy and Python draw here follows from (seed, epoch, sample) alone: it is the
        same for every cut, rank, loading process and resumption. A held-out sample draws as in
        epoch 0. The sample keeps its number of tokens.
        """
        return sample

    @abstractmethod
    def weights(self, fields: Fields) -> Mapping[str, float]:
        """Count what each loss and metric is divided by, from the data alone.

        Returns:
            A weight for every name that `sums` gives, for every micro-batch: 0 where a name has
            nothing to count.
        """

    @abstractmethod
    def sums(self, model: ModelCall, fields: Fields) -> Sums:
        """Run the model on one micro-batch and sum, dividing by nothing."""

    def metrics(self, logits: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Sum metrics of one's own in an evaluation; a subclass gives them by name.

        Called with some of the positions at a time, as often as it takes.

        Args:
            logits: `(positions, classes)`.
            labels: `(positions,)`, -100 where there is none; of numbers `(positions, numbers)`.

        Returns:
            0-d sums, which are divided by the number of labels; or sums of any shape, of which
            `figures` of the subclass makes metrics.
        """
        return {}

    def figures(self, sums: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Turn what `metrics` gave, summed over the evaluation in float64, into metrics."""
        count = sums["labels"]
        return {name: float(s / count) for name, s in sums.items() if not s.ndim and s is not count}

    def sums_weighed(self, model: ModelCall, fields: Fields, weights: Mapping[str, float]) -> Sums:
        """Run `sums`, or the same with what `weights` counted on the host."""
        return self.sums(model, fields)

    def predictions(self, output: Any, fields: Fields) -> Sequence[tuple[Any, Any]]:  # noqa: ANN401
        """Give label and prediction of each sample of a micro-batch, as predictions.jsonl has them.

        `output` is what the model gave. Plain values; none where only the loss tells something.
        """
        return ()

    def predict(
        self, model: ModelCall, fields: Fields, text: TextOutput
    ) -> Sequence[Mapping[str, Any]]:
        """Run the model on samples that need no labels, and give what it predicts of each.

        Nothing is padded in the samples, but for the ends of rows that `attention_mask` leaves
        out. Labels, where they are there, are no part of the answer; of a class for each token
        they may say by -100 where none is wanted.

        Returns:
            For each sample plain values by name: `prediction`, classes by their numbers, and
            `probability` or `probabilities` where there are chances. None at all where only the
            loss tells something, as for a text.
        """
        return ()


def weights_of(objective: Objective, fields: Fields) -> dict[str, float]:
    """Count what the sums of an objective are divided by, finite numbers from 0 on."""
    given: object = objective.weights(own := without_marks(fields))
    method = f"weights of {type(objective).__name__}"
    if not isinstance(given, Mapping) or not given:
        _refuse(method, given, "return a number for every name that `sums` gives")
    weights = {}
    for name, value in given.items():
        number = value
        # A tensor made of a plain number would take 10 us.
        if type(value) not in (int, float):
            number = _number(f"{method}, {name}", value)
        weights[name] = float(number)
        if not 0.0 <= weights[name] < math.inf:
            _refuse(f"{method}, {name}", value, "return a finite number, 0 or more")
    if len(own) == len(fields):
        return weights
    terms = [name for name in weights if name not in objective.metric_names]
    for source, mark in marks_by_source(objective, fields).items():
        # Hidden is all that is of another source.
        labels = fields[LABELS].masked_fill(~mark, IGNORED)
        of_source = objective.weights({**own, LABELS: labels})
        weights |= {figure_of(source, t, len(terms)): float(of_source[t]) for t in terms}
    return weights


def sums_of(
    objective: Objective, model: ModelCall, fields: Fields, weights: Mapping[str, float] | None
) -> Sums:
    """Run an objective on a micro-batch, and sum its losses by source where samples have one.

    `weights` are None where they do not matter.
    """
    own = without_marks(fields)
    if weights is None:
        return checked(objective, objective.sums(model, own), None)
    if len(own) == len(fields):
        return checked(objective, objective.sums_weighed(model, own, weights), weights)
    sums = objective.sums_weighed(call := Recorded(model), own, weights)
    by_source = source_sums(objective, call, fields, weights, sums)
    return checked(objective, sums, weights, by_source)


def checked(
    objective: Objective,
    sums: Sums,
    weights: Mapping[str, float] | None,
    by_source: Mapping[str, Tensor] | None = None,
) -> Sums:
    """Refuse sums that are none, and names without a weight; metrics become 0-d float64."""
    method = f"sums of {type(objective).__name__}"
    losses: object = getattr(sums, "losses", None)
    if not isinstance(losses, Mapping) or not losses:
        _refuse(method, sums, "return Sums(losses={name: sum, ...})")
    for name, loss in losses.items():
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            remedy = "return the sum over its terms, a 0-d float tensor"
            _refuse(f"{method}, {name}", loss, remedy)
    metrics = {n: _number(f"{method}, {n}", value) for n, value in sums.metrics.items()}
    metrics |= by_source or {}
    named = {*metrics}
    # One alone is written as `loss`, whatever its name.
    if len(losses) > 1:
        named |= losses.keys() - {"loss"}
    if taken := sorted(n for n in named if n in STEP_KEYS or n.startswith("eval_")):
        raise ConfigError(f"objective: {method}: {taken[0]} is a built-in metric; rename it")
    if weights is not None:
        _check_names(objective, weights, [*losses, *metrics])
    if torch.is_grad_enabled() and not any(loss.requires_grad for loss in losses.values()):
        if any(map((weights or {}).get, losses)):
            raise ConfigError(
                f"objective: {method} returned losses without a gradient: compute them from what "
                "the model gives, with no detach(), item() or no_grad() on the way"
            )
        losses = {name: loss.clone().requires_grad_() for name, loss in losses.items()}
    return Sums(losses=losses, metrics=metrics, statistics=sums.statistics)


def _check_names(objective: Objective, weights: Mapping[str, float], given: Sequence[str]) -> None:
    """Refuse a sum without a weight, and a weight without its sum, which would count as 0."""
    kind = type(objective).__name__
    if missing := [name for name in given if name not in weights]:
        raise ConfigError(
            f"objective: `weights` of {kind} returns {', '.join(weights)} but not "
            f"{', '.join(missing)}, which `sums` returns: return a divisor for each"
        )
    spared = {*given}
    # A step does without metrics.
    if torch.is_grad_enabled():
        spared |= {*objective.metric_names}
    if left_out := [name for name, weight in weights.items() if weight and name not in spared]:
        raise ConfigError(
            f"objective: `sums` of {kind} lacks {', '.join(left_out)}, which `weights` returns: "
            "return a sum for each, and list in `metric_names` what only an evaluation gives"
        )


def _number(place: str, value: object) -> Tensor:
    """Read a number of Python, NumPy or PyTorch, as 0-d float64."""
    number = None
    with suppress(TypeError, ValueError, RuntimeError):
        number = torch.as_tensor(value, dtype=torch.float64)
    if number is None or number.ndim:
        _refuse(place, value, "return one number: a sum over terms, or their count")
    return number.detach()


def _refuse(method: str, value: object, remedy: str) -> NoReturn:
    raise ConfigError(f"objective: {method}: {' '.join(repr(value).split()):.60}; {remedy}")


def without_labels(fields: Fields) -> Fields:
    """Leave out labels, of which a model could compute a loss of its own, and their weights."""
    return {name: value for name, value in fields.items() if name not in {LABELS, WEIGHT}}


def logits_from(model: ModelCall, fields: Fields) -> Tensor:
    """Call a model without the labels, and take its logits."""
    return logits_of(model(without_labels(fields)))


def logits_of(output: Any) -> Tensor:  # noqa: ANN401 - models return what they like
    """Take the logits out of the output of a model: the output itself or its part `logits`."""
    logits = output if isinstance(output, Tensor) else output_part(output, "logits")
    if isinstance(logits, Tensor) and logits.ndim > 1:
        return logits
    raise ConfigError(
        f"model: forward returned a {type(output).__name__} without logits; return logits, or an "
        "object or dict with logits, and leave the loss to the objective, which sums it so that "
        "every split gives the same step"
    )


def given_labels(fields: Fields) -> Tensor:
    """Take the labels out of a micro-batch; they must be there."""
    if LABELS not in fields:
        raise ConfigError(
            f"objective: the data give no field named labels (they give: {', '.join(fields)})"
        )
    return fields[LABELS]


def labels_of(fields: Fields) -> Tensor:
    """Take the labels out of a micro-batch; they must be there and whole numbers."""
    labels = given_labels(fields)
    if labels.is_floating_point() or labels.is_complex():
        raise ConfigError(
            f"objective: labels are {labels.dtype}, but classes and tokens are whole numbers: give "
            "integers, or use an objective that takes real numbers"
        )
    return labels


def at_least_single(logits: Tensor) -> Tensor:
    """Widen half precision to float32; wider logits are returned as they are, uncopied."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
