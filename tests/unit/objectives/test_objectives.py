"""Objectives are sums over data-only weights; that cuts agree stands in tests/contract."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.core.errors import ConfigError
from trainer.features.heads.model_loss import ModelLoss
from trainer.objectives.base import Objective, Sums, sums_of
from trainer.objectives.classify import Classify
from trainer.objectives.next_token import NextToken

CLOSE = {"rtol": 1e-12, "atol": 1e-14}
VOCAB = 7


def linear(weight: Tensor):
    """Make a model of one matrix, so that gradients can be compared."""
    return lambda fields: F.one_hot(fields["input_ids"], VOCAB).to(weight.dtype) @ weight


def ragged_fields(lengths: list[int], seed: int, masked: float = 0.2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    time = max(lengths)
    ids = torch.randint(VOCAB, (len(lengths), time), generator=generator)
    padding = torch.arange(time) >= torch.tensor(lengths)[:, None]
    hidden = torch.rand(ids.shape, generator=generator) < masked
    return {
        "input_ids": ids.masked_fill(padding, 0),
        "labels": ids.masked_fill(padding | hidden, -100),
        "boxes": torch.randint(0, 3, (len(lengths),), generator=generator),
    }


def weight(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=generator, requires_grad=True)


@pytest.mark.parametrize("form", [dict, SimpleNamespace])
def test_a_model_may_give_its_logits_or_its_loss_as_a_part_of_an_object_or_of_a_dict(form):
    fields, theta, seen = ragged_fields([6, 3, 1], seed=3), weight(), []

    def model(given):
        seen.append(set(given))
        return form(logits=linear(theta)(given), loss=theta.sum())

    assert NextToken().sums(model, fields).losses == NextToken().sums(linear(theta), fields).losses
    assert seen == [{"input_ids", "boxes"}], "a model never sees the labels"
    own = ModelLoss(reduction="sum", causal=False)
    (loss,) = own.sums(lambda _: form(loss=theta.sum()), fields).losses.values()
    assert loss == theta.sum()
    with pytest.raises(ConfigError, match=r"without logits; return logits, or an object or dict"):
        NextToken().sums(lambda _: form(scores=theta), fields)


def test_next_token_shifts_labels_itself_and_ignores_minus_100():
    fields, theta = ragged_fields([6, 3, 1], seed=3), weight()
    objective = NextToken(label_smoothing=0.1, z_loss=0.1)
    found = objective.sums(linear(theta), fields)
    assert not found.metrics, "a step does not pay for what only an evaluation reads"
    logits, labels = linear(theta)(fields)[:, :-1], fields["labels"][:, 1:]
    reference = F.cross_entropy(
        logits.transpose(1, 2), labels, reduction="sum", label_smoothing=0.1
    )
    torch.testing.assert_close(found.losses["cross_entropy"], reference, **CLOSE)
    penalty = 0.1 * logits[labels != -100].logsumexp(-1).square().sum()
    torch.testing.assert_close(found.losses["z_loss"], penalty, **CLOSE)
    assert found.losses["cross_entropy"].dtype == torch.float64
    right = (logits.argmax(-1) == labels)[labels != -100]
    with torch.no_grad():
        evaluated = objective.sums(linear(theta), fields)
    assert int(evaluated.metrics["accuracy"]) == int(right.sum())
    names = ("cross_entropy", "accuracy", "z_loss")
    assert objective.weights(fields) == dict.fromkeys(names, right.numel())
    assert NextToken().weights(fields).keys() == {"cross_entropy", "accuracy"}


def test_a_micro_batch_without_a_loss_term_weighs_nothing_and_adds_an_exact_zero():
    fields, theta = ragged_fields([1, 1], seed=0), weight()
    objective = NextToken(z_loss=0.1, label_smoothing=0.1)
    found = objective.sums(linear(theta), fields)
    assert set(objective.weights(fields).values()) == {0.0}
    with torch.no_grad():
        evaluated = objective.sums(linear(theta), fields)
    assert objective.weights(fields).keys() == {*evaluated.losses, *evaluated.metrics}
    for term in found.losses.values():
        assert float(term.detach()) == 0.0
        (gradient,) = torch.autograd.grad(term, theta, retain_graph=True)
        assert not gradient.any()


def test_half_precision_logits_are_summed_in_single_precision():
    fields = ragged_fields([9] * 8, seed=2)
    theta = weight().detach().bfloat16()
    exact = NextToken().sums(linear(theta.double()), fields).losses["cross_entropy"]
    half = NextToken().sums(linear(theta), fields).losses["cross_entropy"]
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), exact, rtol=1e-6, atol=0)


OUTPUTS = [torch.tensor(1.0), (torch.zeros(1, 2, 3),), SimpleNamespace(loss=torch.tensor(1.0))]


@pytest.mark.parametrize("objective", [NextToken(), Classify()])
def test_missing_labels_and_what_is_no_logits_are_refused_with_a_remedy(objective):
    ids = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"no field named labels .*input_ids"):
        objective.sums(linear(weight()), {"input_ids": ids})
    with pytest.raises(ConfigError, match=r"^model: logits of shape"):
        objective.sums(lambda _: torch.zeros(2, 5, 7, 1), {"input_ids": ids, "labels": ids})
    for output in OUTPUTS:
        with pytest.raises(ConfigError, match=r"^model: forward returned .* leave the loss to the"):
            objective.sums(lambda _, output=output: output, {"input_ids": ids, "labels": ids})


WEIGHED = Classify(class_weights=[1.0, 1.0])


@pytest.mark.parametrize(
    ("objective", "labels", "classes", "fault"),
    [
        (NextToken(), [1, 2], 5, r"labels of shape \(2,\) .*use objective=classify"),
        (WEIGHED, [1, 2], 2, "2 weights, and labels from 1 to 2"),
        (WEIGHED, [0, 1], 7, "2 weights for 7 classes"),
    ],
)
def test_labels_of_another_objective_are_one_line_with_shapes_and_remedy(
    objective, labels, classes, fault
):
    fields = {"x": torch.zeros(2), "labels": torch.tensor(labels)}

    def compute():
        objective.weights(fields)
        objective.sums(lambda _: torch.zeros(2, classes), fields)

    with pytest.raises(ConfigError, match=f"^objective[.=:].*{fault}"):
        compute()


def test_classify_takes_a_label_per_pixel():
    logits = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.arange(18).view(2, 3, 3) % 4
    with torch.no_grad():
        found = Classify().sums(lambda _: logits, {"labels": labels})
    expected = F.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(found.losses["cross_entropy"], expected, **CLOSE)
    assert int(found.metrics["accuracy"]) == int((logits.argmax(1) == labels).sum())
    assert Classify().weights({"labels": labels}) == {"cross_entropy": 18.0, "accuracy": 18.0}


def test_a_mean_of_the_model_is_weighed_by_what_the_host_counted():
    # Whoever asks this device for a value gets an error.
    loss = torch.ones((), device="meta", requires_grad=True)
    fields = {"labels": torch.zeros(2, 5, dtype=torch.int64, device="meta")}
    objective, model = ModelLoss(reduction="mean"), lambda _: SimpleNamespace(loss=2 * loss)
    sums = sums_of(objective, model, fields, {"model_loss": 8.0})
    assert sums.losses["model_loss"].device.type == "meta"
    with pytest.raises(RuntimeError, match="meta"):
        sums_of(objective, model, fields, None)


def test_a_scope_of_embeddings_is_a_coupling_of_the_whole_batch():
    class Contrast(Objective):
        scope = "embedding"

        def weights(self, fields):
            return {"contrast": 1.0}

        def sums(self, model, fields):
            return Sums(losses={})

    class Tempered(Contrast):
        temperature = 0.1

    assert Contrast().coupling.kind == Tempered().coupling.kind == "batch"
    assert NextToken().coupling.kind == "none"
