"""Objectives are sums over data-only weights: equal to one batch for every split."""

import itertools
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.core.errors import ConfigError
from trainer.objectives.base import Objective, Sums, shapes_named
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


def split_value(
    objective: Objective, parts: list[Mapping[str, Tensor]], weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Add up a step from its micro-batches, as the trainer does: divide once, by the whole."""
    totals: dict[str, float] = {}
    for part in parts:
        for name, count in objective.weights(part).items():
            totals[name] = totals.get(name, 0.0) + count
    sums = [objective.sums(linear(weight), part).losses for part in parts]
    terms = (term / totals[name] for found in sums for name, term in found.items() if totals[name])
    value = sum(terms, start=(weight * 0.0).sum())
    (gradient,) = torch.autograd.grad(value, weight)
    return value.detach(), gradient


class ThreeTerms(Objective):
    """Cross entropy, z-loss, and a term per box: three denominators of three kinds."""

    language = NextToken(z_loss=0.1, label_smoothing=0.2)

    def weights(self, fields):
        return {**self.language.weights(fields), "boxes": float(fields["boxes"].sum())}

    def sums(self, model, fields):
        found = self.language.sums(model, fields)
        per_sample = model(fields).square().mean((1, 2))
        return Sums(
            losses={**found.losses, "boxes": 0.3 * (per_sample * fields["boxes"]).sum()},
            metrics=found.metrics,
        )


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 8), max_size=4),
    seed=st.integers(0, 99),
)
def test_three_terms_with_denominators_of_their_own_equal_one_batch_for_every_split(
    lengths, cuts, seed
):
    fields = ragged_fields(lengths, seed)
    edges = sorted({0, len(lengths), *(min(cut, len(lengths)) for cut in cuts)})
    parts = [
        {name: field[a:b] for name, field in fields.items()} for a, b in itertools.pairwise(edges)
    ]
    theta = weight()
    whole = one_batch_reference(fields, theta)
    torch.testing.assert_close(split_value(ThreeTerms(), parts, theta), whole, **CLOSE)


def one_batch_reference(fields: Mapping[str, Tensor], theta: Tensor) -> tuple[Tensor, Tensor]:
    """Write the three terms with PyTorch's own means over the whole batch."""
    logits = linear(theta)(fields)
    flat, labels = logits[:, :-1].flatten(0, 1), fields["labels"][:, 1:].flatten()
    valid = labels != -100
    value = (theta * 0.0).sum()
    if valid.any():
        value = value + F.cross_entropy(flat, labels, ignore_index=-100, label_smoothing=0.2)
        value = value + 0.1 * flat[valid].logsumexp(-1).square().mean()
    boxes = fields["boxes"]
    if boxes.any():
        value = value + 0.3 * (logits.square().mean((1, 2)) * boxes).sum() / boxes.sum()
    (gradient,) = torch.autograd.grad(value, theta)
    return value.detach(), gradient


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_next_token_shifts_labels_itself_and_ignores_minus_100(smoothing):
    fields = ragged_fields([6, 3, 1], seed=3)
    theta = weight()
    objective = NextToken(label_smoothing=smoothing)
    found = objective.sums(linear(theta), fields)
    assert not found.metrics, "a step does not pay for what only an evaluation reads"
    logits, labels = linear(theta)(fields)[:, :-1], fields["labels"][:, 1:]
    reference = F.cross_entropy(
        logits.transpose(1, 2), labels, reduction="sum", label_smoothing=smoothing
    )
    torch.testing.assert_close(found.losses["cross_entropy"], reference, **CLOSE)
    assert found.losses["cross_entropy"].dtype == torch.float64
    right = (logits.argmax(-1) == labels)[labels != -100]
    with torch.no_grad():
        evaluated = objective.sums(linear(theta), fields)
    assert int(evaluated.metrics["accuracy"]) == int(right.sum())
    assert objective.weights(fields) == dict.fromkeys(("cross_entropy", "accuracy"), right.numel())


def test_a_packed_row_equals_its_documents_padded():
    lengths = [4, 1, 6]
    padded = ragged_fields(lengths, seed=5)
    packed = {
        name: torch.cat([row[:n] for row, n in zip(padded[name], lengths, strict=True)])[None]
        for name in ("input_ids", "labels")
    } | {"cu_seqlens": torch.tensor([0, 4, 5, 11], dtype=torch.int32)}
    theta = weight()
    objective = NextToken(z_loss=0.1)
    assert objective.weights(packed) == objective.weights(padded)
    with torch.no_grad():
        one, other = (objective.sums(linear(theta), fields) for fields in (packed, padded))
    for name, term in one.losses.items():
        torch.testing.assert_close(term, other.losses[name], **CLOSE)
    assert one.metrics == other.metrics


@pytest.mark.parametrize("objective", [NextToken(), NextToken(z_loss=0.1, label_smoothing=0.1)])
def test_a_micro_batch_without_a_loss_term_weighs_nothing_and_adds_an_exact_zero(objective):
    fields = ragged_fields([1, 1], seed=0)
    theta = weight()
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


def test_the_model_never_sees_the_labels_and_gives_logits_itself_or_inside_an_object():
    fields, seen = ragged_fields([3], seed=0), []

    def model(given):
        seen.append(set(given))
        logits = torch.zeros(1, 3, VOCAB)
        return logits if len(seen) == 1 else SimpleNamespace(logits=logits, loss=logits.sum())

    one, other = (NextToken().sums(model, fields).losses for _ in range(2))
    assert seen == [{"input_ids", "boxes"}] * 2
    assert one == other


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


NUMBERS, IDS = torch.tensor([1, 2]), torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("objective", "labels", "logits", "fault"),
    [
        (NextToken(), NUMBERS, (2, 5), r"labels of shape \(2,\) .*type objective=classify"),
        (NextToken(), IDS[..., None], (2, 3, 1, 5), r"labels of shape \(2, 3, 1\)"),
        (Classify(), IDS, (2, 3, 5), "labels are a sequence per sample.*objective=next_token"),
        (NextToken(), IDS + 7, (2, 3, 5), r"Target 7 is out of .* \(2, 3, 5\) .* \(2, 3\)"),
        (Classify(), NUMBERS + 4, (2, 5), r"Target \d is out of bounds.* \(2, 5\) .* \(2,\)"),
        (Classify(class_weights=[1.0, 1.0]), NUMBERS, (2, 2), "2 weights, and labels from 1 to 2"),
        (Classify(class_weights=[1.0, 1.0]), NUMBERS - 1, (2, 7), "2 weights for 7 classes"),
    ],
)
def test_labels_of_another_objective_are_one_line_with_shapes_and_remedy(
    objective, labels, logits, fault
):
    fields = {"x": torch.zeros(2), "labels": labels}

    def compute():
        objective.weights(fields)
        objective.sums(lambda _: torch.zeros(logits), fields)

    with pytest.raises(ConfigError, match=f"^objective[.=].*{fault}") as caught:
        compute()
    assert len(str(caught.value).splitlines()) == 1


def test_a_want_of_memory_inside_an_objective_stays_one():
    for error in (
        torch.OutOfMemoryError("x"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):
        with pytest.raises(type(error)) as caught, shapes_named("x", NUMBERS, NUMBERS):
            raise error
        assert caught.value is error


@settings(max_examples=30)
@given(
    num_samples=st.integers(1, 12),
    smoothing=st.sampled_from([0.0, 0.1]),
    class_weights=st.sampled_from([None, [0.5, 2.0, 0.0, 1.0, 3.0, 1.0, 0.25]]),
    first=st.integers(0, 12),
    seed=st.integers(0, 99),
)
def test_classify_equals_pytorchs_mean_for_every_split(
    num_samples, smoothing, class_weights, first, seed
):
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(VOCAB, (2, num_samples), generator=generator)
    labels = draw[1].masked_fill(draw[1] == VOCAB - 1, -100)
    fields = {"input_ids": draw[0], "labels": labels}
    objective = Classify(class_weights=class_weights, label_smoothing=smoothing)
    theta = weight()
    parts = [{k: v[:first] for k, v in fields.items()}, {k: v[first:] for k, v in fields.items()}]
    weigher = None if class_weights is None else torch.tensor(class_weights).double()
    total = sum(objective.weights(part)["cross_entropy"] for part in parts)
    if not total:
        return
    reference = F.cross_entropy(
        linear(theta)(fields), labels, weight=weigher, label_smoothing=smoothing
    )
    expected = reference.detach(), torch.autograd.grad(reference, theta, retain_graph=True)[0]
    torch.testing.assert_close(split_value(objective, parts, theta), expected, **CLOSE)


def test_classify_takes_a_label_per_pixel():
    logits = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.arange(18).view(2, 3, 3) % 4
    found = Classify().sums(lambda _: logits, {"labels": labels}).losses["cross_entropy"]
    torch.testing.assert_close(found, F.cross_entropy(logits, labels, reduction="sum"), **CLOSE)
    assert Classify().weights({"labels": labels}) == {"cross_entropy": 18.0, "accuracy": 18.0}
