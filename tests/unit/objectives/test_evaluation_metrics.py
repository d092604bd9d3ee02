"""Metrics from merged sums are those of all samples at once, by their definitions."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.config.metric_names import KNOWN_METRICS
from trainer.core.errors import ConfigError
from trainer.features.heads.model_loss import ModelLoss
from trainer.features.heads.numbers import Numbers
from trainer.objectives.base import Objective
from trainer.objectives.classify import Classify
from trainer.objectives.metrics import (
    METRIC_OF,
    add_statistics,
    metrics_of_sums,
    statistics_of,
    with_sums,
)
from trainer.objectives.next_token import NextToken

COUNT = 500


def measured(objective: Objective, logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Merge the sums of ragged pieces."""
    sums: dict[str, Tensor] = {}
    with torch.no_grad():
        for piece in torch.arange(COUNT).tensor_split([7, 8, 200, 201, 400]):
            add_statistics(sums, statistics_of(objective, logits[piece], labels[piece]))
    return metrics_of_sums(objective, {name: each.double() for name, each in sums.items()})


def drawn(classes: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(classes)
    logits = torch.randn(COUNT, classes, dtype=torch.float64)
    labels = torch.randint(classes, (COUNT,)) * (torch.rand(COUNT) < 0.7)
    logits[torch.arange(COUNT), labels] += 1
    return logits, labels.masked_fill(torch.arange(COUNT) % 9 == 0, -100)


def f1_of(found: np.ndarray, true: np.ndarray, number: int) -> float:
    right = ((found == number) & (true == number)).sum()
    return float(2 * right / ((found == number).sum() + (true == number).sum()))


@pytest.mark.parametrize("classes", [2, 6])
def test_classes_are_counted_as_each_metric_is_defined(classes):
    names = ["accuracy", "top_2", "f1", "f1_macro", "f1_micro", "mcc", "perplexity"]
    logits, labels = drawn(classes)
    measures = measured(with_sums(Classify(), names), logits, labels)
    kept = labels != -100
    scores, true = logits[kept].numpy(), labels[kept].numpy()
    found = scores.argmax(1)
    each = [f1_of(found, true, number) for number in range(classes)]
    log_probs = torch.tensor(scores).log_softmax(1).numpy()
    one, two = np.eye(classes)[found], np.eye(classes)[true]

    def covariance(x: Any, y: Any) -> float:
        return sum(np.cov(x[:, k], y[:, k])[0, 1] for k in range(classes))

    expected = {
        "accuracy": (found == true).mean(),
        "top_2": np.mean([t in np.argsort(s)[-2:] for s, t in zip(scores, true, strict=True)]),
        "f1": each[1] if classes == 2 else np.mean(each),
        "f1_macro": np.mean(each),
        "f1_micro": (found == true).mean(),
        "mcc": covariance(one, two) / math.sqrt(covariance(one, one) * covariance(two, two)),
        "perplexity": math.exp(-log_probs[np.arange(len(true)), true].mean()),
    }
    assert measures == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("change", [lambda x: x, lambda x: 1e-3 * x + 40], ids=["wide", "narrow"])
def test_auroc_is_the_share_of_pairs_in_order_where_scores_differ_by_more_than_a_bin(change):
    logits, labels = drawn(2)
    logits = change(logits)
    kept = labels != -100
    score = (logits[:, 1] - logits[:, 0])[kept]
    above = score[labels[kept] == 1][:, None] - score[labels[kept] == 0]
    pairs = ((above > 0).double() + (above == 0).double() / 2).mean()
    measures = measured(with_sums(Classify(), ["auroc"]), logits, labels)
    assert measures["auroc"] == pytest.approx(float(pairs), abs=1e-3)
    constant = measured(with_sums(Classify(), ["auroc"]), 0 * logits, labels)
    assert constant["auroc"] == 0.5


def test_numbers_have_the_moments_of_regression():
    torch.manual_seed(1)
    labels = torch.randn(COUNT, 2, dtype=torch.float64) + 3
    found = labels + torch.randn(COUNT, 2, dtype=torch.float64) / 2
    objective = with_sums(Numbers(), ["mse", "mae", "r2", "pearson"])
    gap, far = found - labels, labels - labels.mean(0)
    expected = {
        "mse": gap.square().mean(),
        "mae": gap.abs().mean(),
        "r2": (1 - gap.square().sum(0) / far.square().sum(0)).mean(),
        "pearson": np.mean([np.corrcoef(found[:, k], labels[:, k])[0, 1] for k in range(2)]),
    }
    measures = measured(objective, found, labels)
    assert measures == pytest.approx({n: float(v) for n, v in expected.items()}, rel=1e-10)


def test_labels_of_which_several_apply_are_counted_for_each_as_scikit_learn_does():
    """One of them is never true nor predicted."""
    from sklearn.metrics import f1_score  # noqa: PLC0415 - a second

    torch.manual_seed(3)
    labels = (torch.rand(COUNT, 4) < 0.4).double()
    logits = torch.randn(COUNT, 4) + labels
    labels[:, 3], logits[:, 3] = 0, -1
    found, true = logits > 0, labels > 0
    expected = {"accuracy": float((found == true).double().mean())}
    for average in ("macro", "micro"):
        expected[f"f1_{average}"] = f1_score(true, found, average=average, zero_division=0)
    objective = with_sums(Numbers(loss="binary_cross_entropy"), [*expected])
    assert measured(objective, logits, labels) == pytest.approx(expected, rel=1e-12)


class Near(NextToken):
    """Two metrics of one's own: a mean, and one that is no mean."""

    def metrics(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        gap = (logits.argmax(-1) - labels)[labels != -100]
        return {"near": (gap.abs() <= 1).sum(), "gaps": torch.stack([gap.sum(), gap.abs().sum()])}

    def figures(self, sums: Any) -> dict[str, float]:
        return {**super().figures(sums), "bias": float(sums["gaps"][0] / sums["gaps"][1])}


def test_metrics_of_one_s_own_are_means_over_labels_or_what_their_figures_make_of_them():
    logits, labels = drawn(6)
    gap = (logits.argmax(-1) - labels)[labels != -100].double()
    measures = measured(with_sums(Near(), ["accuracy"]), logits, labels)
    expected = {
        "accuracy": float((gap == 0).double().mean()),
        "near": float((gap.abs() <= 1).double().mean()),
        "bias": float(gap.sum() / gap.abs().sum()),
    }
    assert measures == pytest.approx(expected, rel=1e-12)


def test_a_metric_of_other_labels_is_refused():
    fault = r"\[top_5\]: no metric of ModelLoss: it shows no logits and labels"
    with pytest.raises(ConfigError, match=rf"^objective\.metrics={fault}"):
        with_sums(ModelLoss(), ["top_5"])


def test_nothing_is_summed_while_training():
    assert statistics_of(with_sums(Near(), ["f1"]), *drawn(6)) == {}
    assert METRIC_OF.keys() == {*KNOWN_METRICS["sums"]}, "what a config takes is what there is"
