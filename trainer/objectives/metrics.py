"""Compute the metrics of an evaluation from sums, which are exact for every cut and rank.

A metric is the sums that it needs, of any shape, and a function of them once they are merged. The
classes of `f1` and the others are counted for each class: how often it was right, predicted, true.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from trainer.config.metric_names import sum_metrics
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import IGNORED
from trainer.data.samples import LabelKind
from trainer.objectives.base import Objective
from trainer.objectives.weighting import summed_entropy, weighted

SumOf = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Logits and labels, of labels that count alone, and how often each does, to what is summed."""

AUROC = "auroc"
BINS = 2**17  # of the histogram of scores, which are told apart to 0.02 %, or to 4e-6 near 0
# Scores below 1/64 are binned evenly, those above by their logarithm.
_STEEP = 64.0
# Larger scores share the last bin.
_WIDEST = math.asinh(_STEEP * 1e4)


@final
@dataclass(frozen=True)
class Metric:
    """What is summed for each kind of labels, and what becomes of the sums."""

    sums: Mapping[LabelKind, SumOf]
    figure: Callable[[Tensor], float]


def _hits(logits: Tensor, labels: Tensor, weight: Tensor | None, k: int = 1) -> Tensor:
    best = logits.topk(min(k, logits.shape[-1])).indices
    right = (best == labels[:, None]).any(-1)
    every = right.new_ones(len(right))
    return torch.stack([weighted(right, weight).sum(), weighted(every, weight).sum()])


def _flag_hits(logits: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
    valid = labels != IGNORED
    right = (logits > 0) == (labels > 0)
    return torch.stack([weighted(right & valid, weight).sum(), weighted(valid, weight).sum()])


def _class_counts(logits: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
    """Count for each class how often it was right, predicted, true: `(3, classes)`."""
    best, count = logits.argmax(-1), partial(_count, length=logits.shape[-1])
    is_right = best == labels
    of_right = None if weight is None else weight[is_right]
    right = count(labels[is_right], of_right)
    return torch.stack([right, count(best, weight), count(labels, weight)])


def _count(places: Tensor, weight: Tensor | None, length: int) -> Tensor:
    """Count how often each place occurs. With weights `bincount` has no order on a GPU."""
    if weight is None:
        return torch.bincount(places, minlength=length)
    return weight.new_zeros(length).index_add_(0, places, weight)


def _flag_counts(logits: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
    """Count the same for labels of which several may apply, and the labels: `(4, flags)`."""
    valid = labels != IGNORED
    found, true = (logits > 0) & valid, (labels > 0) & valid
    return torch.stack([weighted(x, weight).sum(0) for x in (found & true, found, true, valid)])


def _entropy(logits: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
    every = weighted(torch.ones_like(labels), weight)
    return torch.stack([summed_entropy(logits.double(), labels, weight), every.sum()])


def _score_counts(logits: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
    """Count the scores of either class in bins, `(2, BINS)`: the second logit over the first."""
    check_classes([AUROC], logits.shape[-1])
    # `bincount` takes no NaN: it counts as a score of 0, and infinity as the largest number.
    scores = (logits[:, 1] - logits[:, 0]).double().nan_to_num()
    places = torch.asinh(_STEEP * scores).clamp(-_WIDEST, _WIDEST) / _WIDEST
    bins = ((places + 1) / 2 * (BINS - 1)).round().long() + BINS * labels
    return _count(bins, weight, 2 * BINS).view(2, BINS)


def _moments(logits: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
    """Sum what regression needs for each number: `(8, numbers)`."""
    # In fp64: differences of large sums, as of squares and a mean, lose half of the digits.
    valid = (labels != IGNORED).double()
    p, y = logits.double() * valid, labels.double() * valid
    sums = [valid, (p - y).square(), (p - y).abs(), y, p, y.square(), p.square(), y * p]
    return weighted(torch.stack(sums), weight).sum(1)


def _ratio(sums: Tensor) -> float:
    return float(sums[0] / sums[1])


def _f1(counts: Tensor, average: str = "") -> float:
    """Compute F1 as scikit-learn does: of the second of two classes, or the mean over classes.

    The mean is over the classes that occur, in labels or predictions, and over all flags that have
    labels; one that is never true nor predicted counts as 0.
    """
    right, found, true, *labelled = counts
    if average == "micro":
        return float(2 * right.sum() / (found.sum() + true.sum()))
    if not average and len(right) == 2:  # noqa: PLR2004
        right, found, true = right[1:], found[1:], true[1:]
    # 2 P R / (P + R), in counts: precision is right / found, recall is right / true.
    both = found + true
    each = 2 * right / both.where(both > 0, 1)
    counted = each[(labelled[0] if labelled else both) > 0]
    return float(counted.mean()) if len(counted) else 0.0


def _mcc(counts: Tensor) -> float:
    """Compute Matthews' correlation of several classes (Gorodkin 2004); 0 where none is defined."""
    right, found, true = counts
    total = true.sum()
    # Like the covariance times a power of the number of labels, which cancels out.
    variances = (total**2 - (found**2).sum()) * (total**2 - (true**2).sum())
    above = right.sum() * total - (found * true).sum()
    return float(above / variances.sqrt()) if variances > 0 else 0.0


def _auroc(counts: Tensor) -> float:
    """Compute the chance that a score of class 1 is above one of class 0; ties count half."""
    # The zeros in the bin of a one tie with it, and half of them count.
    below, (zeros, ones) = counts[0].cumsum(0) - counts[0] / 2, counts
    return float((ones * below).sum() / (ones.sum() * zeros.sum()))


def _r2(sums: Tensor) -> float:
    n, squares, _, y, _, yy, _, _ = sums
    # yy - y y / n is the sum of squares around the mean.
    return float((1 - squares / (yy - y * y / n)).mean())


def _pearson(sums: Tensor) -> float:
    n, _, _, y, p, yy, pp, yp = sums
    # The covariance over the root of both variances; the factors 1 / n cancel out.
    return float(((yp - y * p / n) / ((yy - y * y / n) * (pp - p * p / n)).sqrt()).mean())


_COUNTS: Mapping[LabelKind, SumOf] = {"classes": _class_counts, "flags": _flag_counts}
_MOMENTS: Mapping[LabelKind, SumOf] = {"numbers": _moments}
METRIC_OF: Mapping[str, Metric] = {
    "accuracy": Metric({"classes": _hits, "flags": _flag_hits}, _ratio),
    "f1": Metric({"classes": _class_counts}, _f1),
    "f1_macro": Metric(_COUNTS, partial(_f1, average="macro")),
    "f1_micro": Metric(_COUNTS, partial(_f1, average="micro")),
    "mcc": Metric({"classes": _class_counts}, _mcc),
    AUROC: Metric({"classes": _score_counts}, _auroc),
    "perplexity": Metric({"classes": _entropy}, lambda sums: float((sums[0] / sums[1]).exp())),
    "mse": Metric(_MOMENTS, lambda sums: float(sums[1].sum() / sums[0].sum())),
    "mae": Metric(_MOMENTS, lambda sums: float(sums[2].sum() / sums[0].sum())),
    "r2": Metric(_MOMENTS, _r2),
    "pearson": Metric(_MOMENTS, _pearson),
}


def _metric(name: str) -> Metric:
    if name.startswith("top_"):
        return Metric({"classes": partial(_hits, k=int(name.removeprefix("top_")))}, _ratio)
    return METRIC_OF[name]


def with_sums(objective: Objective, metrics: Sequence[object]) -> Objective:
    """Give an objective the metrics of a run that are sums; its labels need a place for each."""
    names = sum_metrics(metrics)
    kind, name = objective.label_kind, type(objective).__name__
    known = [each for each, metric in METRIC_OF.items() if kind in metric.sums]
    if odd := [each for each in names if kind not in _metric(each).sums]:
        which = f"it has {', '.join(known)}" if known else "it shows no logits and labels"
        raise ConfigError(
            f"objective.metrics=[{', '.join(odd)}]: no metric of {name}: {which}; or write one in "
            "`metrics` of a class of your own"
        )
    return objective.with_metrics(names)


def check_classes(names: Sequence[str], classes: int) -> None:
    """Refuse metrics of two classes for a model that gives another number."""
    if AUROC in names and classes != 2:  # noqa: PLR2004
        text = f"the model gives {classes} classes, and it is of two: leave it out"
        raise ConfigError(f"objective.metrics=[{AUROC}]: {text}")


def statistics_of(
    objective: Objective, logits: Tensor, labels: Tensor, weight: Tensor | None = None
) -> dict[str, Tensor]:
    """Sum what the metrics of an objective with a `label_kind` need; nothing while training.

    `logits` are `(positions, classes)`, or as the labels; `labels` `(positions,)`, -100 where there
    is none, or `(positions, numbers)`; `weight`, in their shape, says how often each counts.
    """
    if torch.is_grad_enabled():
        return {}
    kind, found = objective.label_kind, dict(objective.metrics(logits, labels))
    if found:
        found["labels"] = (labels != IGNORED).sum()
    if objective.named_metrics and kind == "classes":
        # A boolean index waits for the device, so it is taken once for all metrics.
        valid = labels != IGNORED
        logits, labels = logits[valid], labels[valid]
        weight = None if weight is None else weight[valid].double()
    for name in objective.named_metrics:
        assert kind is not None
        found[f"{name} of {kind}"] = _metric(name).sums[kind](logits, labels, weight)
    return {name: total.detach() for name, total in found.items()}


def add_statistics(total: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Add sums to those of the same names."""
    for name, each in more.items():
        total[name] = total[name] + each if name in total else each


def metrics_of_sums(objective: Objective, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Turn the sums of a whole evaluation into metrics by name."""
    named = {f"{n} of {objective.label_kind}": n for n in objective.named_metrics}
    own = {name: each for name, each in sums.items() if name not in named}
    found = {}
    for key, name in named.items():
        if key in sums:
            found[name] = _metric(name).figure(sums[key])
    return {**found, **objective.figures(own)} if own else found
