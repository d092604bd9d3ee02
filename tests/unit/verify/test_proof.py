"""`train verify`: exact is proven, and what is not exact has its culprit named, however deep."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.lib.support import EXACT, VOCABULARY, WRONG, Bench, RaggedText, TinyLM
from trainer.accumulate.base import GradientStrategy
from trainer.accumulate.sum import Sum
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import Fields
from trainer.objectives.base import IGNORED, Objective, Sums, logits_of, without_labels
from trainer.objectives.classify import Classify
from trainer.objectives.model_loss import ModelLoss
from trainer.objectives.next_token import NextToken, shifted_labels
from trainer.plan.cut import Layout
from trainer.plan.cuts import Auto, Budget, Fixed
from trainer.report.records import VerifyReport
from trainer.verify.proof import verify

SORTED = Budget(max_tokens=60)
WIDTH = 8


def checked(bench: Bench, *, whole_fits: bool = True) -> VerifyReport:
    """Verify the first step; what the run itself holds must come out as it went in."""
    module = bench.kit.model.module
    state = {name: value.clone() for name, value in module.state_dict().items()}
    modes = [part.training for part in module.modules()]
    generator = torch.default_generator.get_state()
    report = verify(bench.kit, bench.feed.next(), bench.feed, whole_fits=whole_fits)
    assert torch.equal(torch.default_generator.get_state(), generator)
    assert modes == [part.training for part in module.modules()]
    assert all(torch.equal(value, state[n]) for n, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert report.exact == (not report.culprits)
    return report


def named(bench: Bench, *, whole_fits: bool = True) -> dict[str, str]:
    report = checked(bench, whole_fits=whole_fits)
    assert not report.exact
    assert report.max_relative_error > WRONG
    return dict(report.culprits)


def with_mixer(mixer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A causal model with one more layer between its norm and its head."""

    def build() -> nn.Module:
        model = TinyLM()
        model.dropout = mixer()
        return model

    return build


class Mixer(nn.Module):
    """A layer that does what it is given to a hidden state."""

    def __init__(self, change: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.inner, self.change = nn.Linear(WIDTH, WIDTH), change

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.change(self.inner(hidden), self.training)


# What is exact


class Shared(nn.Module):
    """Tied weights, a frozen one, a module called twice, an output in a namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.body = TinyLM(WIDTH)
        self.body.head.weight = self.body.embed.weight
        self.body.norm.weight.requires_grad_(requires_grad=False)
        self.twice = nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        logits = self.body(input_ids)
        return SimpleNamespace(logits=self.twice(F.gelu(self.twice(logits))))


class CastingNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        single = hidden.to(torch.float32) * torch.ones(WIDTH)
        variance = single.float().square().mean(-1, keepdim=True)
        return (self.scale * single * torch.rsqrt(variance + 1e-6)).to(hidden.dtype)


class Recomputed(TinyLM):
    """Computed again in backward."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return checkpoint(super().forward, input_ids, use_reentrant=False)


@pytest.mark.parametrize("whole_fits", [True, False], ids=["whole", "one by one"])
@pytest.mark.parametrize("cut", [SORTED, Fixed(micro=3), Auto(max_tokens=90)], ids=str)
@pytest.mark.parametrize("normalizer", ["tokens", "samples"])
def test_a_sound_step_is_exact_for_every_cut_and_reference(cut, whole_fits, normalizer):
    report = checked(Bench(cut, torch.float32, normalizer=normalizer), whole_fits=whole_fits)
    assert report.exact
    assert report.max_relative_error <= EXACT[torch.float64]
    assert report.dtype == "float64"
    assert report.reference == ("whole batch" if whole_fits else "sample by sample, summed")
    assert not any("micro-batches instead" in note for note in report.notes)


@pytest.mark.parametrize(
    "model",
    [Shared, lambda: TinyLM(norm=CastingNorm()), Recomputed],
    ids=["shared and frozen", "casts by hand", "recomputed"],
)
def test_an_unusual_but_sound_model_raises_no_false_alarm(model):
    report = checked(Bench(SORTED, torch.float32, model=model))
    assert report.exact, report.culprits
    assert report.max_relative_error <= EXACT[torch.float64]


def test_a_step_in_one_piece_is_compared_with_its_samples_one_by_one_or_is_the_whole_batch():
    assert checked(Bench(Fixed(steps=1))).reference == "sample by sample, summed"
    for model in (lambda: TinyLM(norm=nn.BatchNorm1d(8)), lambda: TinyLM(dropout=0.2)):
        report = checked(Bench(Fixed(steps=1), model=model))
        assert (report.verdict, report.reference) == ("exact", "whole batch")


def test_a_batch_without_a_single_loss_term_is_exact():
    data = RaggedText()
    data.masked = set(range(len(data)))
    report = checked(Bench(SORTED, dataset=data))
    assert (report.verdict, report.max_relative_error) == ("exact", 0.0)
    assert any("no sample of this batch has a loss term" in note for note in report.notes)


# Modules that couple samples


class ConvNet(nn.Module):
    """Two batch norms, so that the second is behind what the first has changed."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            [nn.Conv2d(n, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]
            for n in (1, 4)
        ]
        self.body = nn.Sequential(*layers[0], *layers[1])
        self.head = nn.Linear(4, 5)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.body(image).mean((2, 3)))


class Images:
    draws_randomness = False

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(40, 1, 6, 6, generator=generator)
        self.lengths = np.ones(40, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        return {"image": self.images[index], "labels": torch.tensor(index % 5)}


@pytest.mark.parametrize("whole_fits", [True, False])
def test_every_batch_norm_is_named_not_just_the_first(whole_fits):
    bench = Bench(Fixed(micro=4), dataset=Images(), model=ConvNet, objective=Classify())
    culprits = named(bench, whole_fits=whole_fits)
    assert culprits.keys() == {"body.*"}
    assert culprits["body.*"].startswith("2 x BatchNorm2d normalises over the samples")


def test_a_batch_norm_over_single_values_is_named_though_no_sample_can_run_alone():
    bench = Bench(Fixed(micro=4), model=lambda: TinyLM(norm=nn.BatchNorm1d(8)))
    report = checked(bench, whole_fits=False)
    assert report.reference == "groups of 2, summed"
    assert dict(report.culprits).keys() == {"norm"}


class Capacity(nn.Module):
    """Top-1 experts that take only so many tokens of a micro-batch, first come, first served."""

    def __init__(self, factor: float = 0.75, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.factor = factor

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        gates = self.router(tokens).softmax(-1)
        chosen = gates.argmax(-1)
        capacity = max(1, int(self.factor * len(tokens) / len(self.experts)))
        output = tokens.clone()
        for index, expert in enumerate(self.experts):
            taken = (chosen == index).nonzero().flatten()[:capacity]
            output = output.index_add(0, taken, gates[taken, index, None] * expert(tokens[taken]))
        return output.view_as(hidden)


def test_capacity_routing_is_named_and_routing_without_a_capacity_is_exact():
    culprits = named(Bench(SORTED, model=with_mixer(Capacity)))
    assert culprits.keys() == {"dropout"}
    assert culprits["dropout"].startswith("Capacity gives a sample another output when")
    assert "capacity routing" in culprits["dropout"]
    assert checked(Bench(SORTED, model=with_mixer(lambda: Capacity(factor=1e9)))).exact


@pytest.mark.parametrize("whole_fits", [True, False])
def test_a_coupling_that_a_few_samples_do_not_show_is_found_in_the_step_itself(whole_fits):
    def rare(hidden: Tensor, training: bool) -> Tensor:
        return hidden * (2.0 if hidden.shape[0] > 5 else 1.0)

    bench = Bench(Fixed(micro=7), model=with_mixer(lambda: Mixer(rare)))
    assert named(bench, whole_fits=whole_fits).keys() == {"dropout"}


class Batchwise(TinyLM):
    """Normalises over the samples by a function: no module of its own to blame."""

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        return logits - logits.mean((0, 1))


def test_a_coupling_in_the_forward_of_the_model_itself_names_the_model():
    assert list(named(Bench(SORTED, model=Batchwise))) == ["Batchwise (in its own forward)"]


class BatchNorm(nn.BatchNorm1d):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.transpose(1, 2)).transpose(1, 2)


class Gated(nn.Module):
    """A branch behind a gate that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = BatchNorm(WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.gate * self.inner(hidden)


def test_a_batch_norm_behind_a_gate_at_zero_is_named():
    assert list(named(Bench(Fixed(micro=3), model=with_mixer(Gated)))) == ["dropout.inner"]


# What heeds padding


class Backwards(nn.Module):
    """Bidirectional, over padded rows."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.both(hidden)[0]


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding="same")

    def forward(self, hidden: Tensor) -> Tensor:
        return self.conv(hidden.transpose(1, 2)).transpose(1, 2)


class Tagging(Objective):
    """One label per position, none shifted."""

    def weights(self, fields):
        return {"tags": float((fields["labels"] != IGNORED).sum())}

    def sums(self, model, fields):
        logits = logits_of(model(without_labels(fields)))
        labels = fields["labels"].flatten()
        return Sums(losses={"tags": F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")})


@pytest.mark.parametrize(
    ("mixer", "name"), [(Backwards, "dropout.both"), (Convolved, "dropout.conv")]
)
def test_a_layer_that_padding_leaks_into_is_named_and_the_last_state_of_a_gru_is_not(mixer, name):
    # TinyLM's own GRU returns a last state that padding changes, and nobody uses.
    culprits = named(Bench(SORTED, model=with_mixer(mixer), objective=Tagging()))
    assert culprits.keys() == {name}
    assert "when its padding changes" in culprits[name]
    alone = Bench(Fixed(micro=1), model=with_mixer(mixer), objective=Tagging())
    assert checked(alone, whole_fits=False).exact, "no padding is looked at"


# What draws

QUIET = {
    "dropout": lambda hidden, training: F.dropout(hidden, 0.3, training),
    "attention": lambda hidden, training: F.scaled_dot_product_attention(
        hidden, hidden, hidden, dropout_p=0.3 * training, is_causal=True
    ),
    "whole paths": lambda hidden, training: hidden * (torch.rand(()) > 0.5) if training else hidden,
    "Python": lambda hidden, training: hidden * (random.random() if training else 1.0),
    "NumPy": lambda hidden, training: hidden * (np.random.rand() if training else 1.0),
}
LOUD = {
    "noise": lambda hidden, training: hidden + torch.rand_like(hidden),
    "dropout with no mode": lambda hidden, training: F.dropout(hidden, 0.3),
    "permutation": lambda hidden, training: hidden[..., torch.randperm(WIDTH)],
}


@pytest.mark.parametrize("kind", QUIET)
def test_draws_of_a_forward_are_named_and_exact_when_off(kind):
    report = checked(Bench(SORTED, model=with_mixer(lambda: Mixer(QUIET[kind]))))
    assert report.verdict == "exact_without_dropout"
    [(name, reason)] = report.culprits
    assert name == "dropout"
    assert "Mixer draws at random" in reason
    assert "the step is exact with it off (error" in reason


@pytest.mark.parametrize("kind", LOUD)
def test_draws_that_evaluation_mode_does_not_stop_prove_nothing(kind):
    report = checked(Bench(SORTED, model=with_mixer(lambda: Mixer(LOUD[kind]))))
    assert report.verdict == "not_proven"
    [(name, reason)] = report.culprits
    assert name == "dropout"
    assert "in evaluation mode too" in reason


def test_all_dropouts_are_named_and_so_is_the_batch_norm_behind_them():
    def model() -> nn.Module:
        net = with_mixer(lambda: nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 8), nn.Dropout(0.1)))()
        net.norm = nn.BatchNorm1d(WIDTH)
        return net

    report = checked(Bench(Fixed(micro=5), model=model))
    assert report.verdict == "not_exact"
    culprits = dict(report.culprits)
    assert culprits.keys() == {"dropout.*", "norm"}
    assert culprits["dropout.*"].startswith("2 x Dropout draws at random")
    assert "not exact with it off either" in culprits["dropout.*"]
    assert culprits["norm"].startswith("BatchNorm1d normalises")


def test_a_generator_that_no_seed_governs_is_named():
    draw = random.Random(0).random
    report = checked(
        Bench(SORTED, model=with_mixer(lambda: Mixer(lambda hidden, _: hidden * draw())))
    )
    assert report.verdict == "not_proven"
    assert "no seed of the run governs" in dict(report.culprits)["dropout"]


def test_an_objective_that_draws_is_named():
    class Noisy(Objective):
        def weights(self, fields):
            return NextToken().weights(fields)

        def sums(self, model, fields):
            sums = NextToken().sums(model, fields)
            return replace(sums, losses={k: v * torch.rand(()) for k, v in sums.losses.items()})

    assert "objective Noisy" in named(Bench(SORTED, objective=Noisy()))


def test_a_draw_without_effect_is_noted_beside_the_verdict():
    report = checked(
        Bench(
            SORTED,
            model=with_mixer(lambda: Mixer(lambda hidden, _: hidden * (torch.rand(()) > 1e-6))),
        )
    )
    assert report.exact
    assert any("draws at random, without effect here" in note for note in report.notes)


# What does not add up


def terms_of(model: Any, fields: Fields) -> tuple[Tensor, Tensor]:
    """Logits and shifted labels of the tokens that have a next one."""
    targets = shifted_labels(fields)
    counted = targets != IGNORED
    return logits_of(model(without_labels(fields)))[counted], targets[counted]


class Counting(Objective):
    def weights(self, fields: Fields) -> Mapping[str, float]:
        return {"loss": float((shifted_labels(fields) != IGNORED).sum())}


class Contrastive(Counting):
    """Every token is told from all others of its micro-batch."""

    def sums(self, model, fields):
        logits, _ = terms_of(model, fields)
        goal = torch.arange(len(logits))
        return Sums(losses={"loss": F.cross_entropy(logits @ logits.T, goal, reduction="sum")})


class Hardest(Counting):
    """Only the worst term of a micro-batch counts."""

    def sums(self, model, fields):
        logits, targets = terms_of(model, fields)
        losses = F.cross_entropy(logits, targets, reduction="none")
        return Sums(losses={"loss": losses.max() if len(losses) else logits.sum()})


class Paired(Counting):
    """Every second sample of a micro-batch is told from the one before it."""

    def sums(self, model, fields):
        logits = logits_of(model(without_labels(fields)))
        summed = logits.masked_fill(fields["labels"][..., None] == IGNORED, 0.0).sum(1)
        even, odd = summed[0::2], summed[1::2]
        return Sums(losses={"loss": F.cosine_similarity(even[: len(odd)], odd).sum()})


class Uniform(RaggedText):
    """Samples of one length."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = np.full_like(self.lengths, 6)
        self.samples = [torch.arange(6) + i % 5 for i in range(len(self.lengths))]
        self.masked = set()


@pytest.mark.parametrize(
    ("objective", "cut", "data"),
    [
        *((Contrastive, cut, RaggedText) for cut in (SORTED, Fixed(steps=1))),
        *((Hardest, cut, RaggedText) for cut in (SORTED, Fixed(micro=3))),
        # The cut holds whole pairs, in order.
        (Paired, Fixed(micro=4), Uniform),
        (Paired, Budget(max_tokens=60, micro=2), RaggedText),
    ],
)
def test_a_loss_that_couples_samples_is_named_in_every_cut(objective, cut, data):
    culprits = named(Bench(cut, objective=objective(), dataset=data()))
    assert list(culprits) == [f"objective {objective.__name__}"]
    assert "couples samples" in next(iter(culprits.values()))


def test_a_loss_over_declared_groups_is_exact():
    class Grouped(Paired):
        group_size = 2

    for cut, global_batch in ((Fixed(micro=4), 16), (Budget(max_tokens=90), 15)):
        settings: dict[str, Any] = {"layout": Layout(group_size=2), "global_batch": global_batch}
        assert checked(Bench(cut, objective=Grouped(), **settings)).exact


class EvenMean(Objective):
    """A mean with a weight of one: right only while all micro-batches are of one size."""

    def weights(self, fields) -> Mapping[str, float]:
        return {"loss": 1.0}

    def sums(self, model, fields):
        return Sums(losses={"loss": F.cross_entropy(*terms_of(model, fields))})


@pytest.mark.parametrize("whole_fits", [True, False])
def test_a_mean_that_even_micro_batches_hide_is_named(whole_fits):
    bench = Bench(Fixed(micro=4), dataset=Uniform(), objective=EvenMean())
    report = checked(bench, whole_fits=whole_fits)
    assert not report.exact
    assert report.max_relative_error <= 1e-10
    assert {name for name, _ in report.culprits} == {"objective EvenMean"}
    assert any("is no sum" in reason for _, reason in report.culprits)
    assert any("by accident" in note for note in report.notes)


def test_dropout_does_not_excuse_a_mean_that_even_micro_batches_hide():
    settings: dict[str, Any] = {"dataset": Uniform(), "objective": EvenMean()}
    report = checked(Bench(Fixed(micro=4), model=lambda: TinyLM(dropout=0.2), **settings))
    assert report.verdict == "not_exact"
    assert {name for name, _ in report.culprits} == {"dropout", "objective EvenMean"}


class Signed(Objective):
    """Terms that cancel nearly, and a metric that is counted in its own way."""

    def weights(self, fields) -> Mapping[str, float]:
        return {"loss": float(len(fields["input_ids"])), "runs": 1.0}

    def sums(self, model, fields):
        logits, targets = terms_of(model, fields)
        loss = F.cross_entropy(logits, targets, reduction="none")
        return Sums(losses={"loss": 1e9 * (loss - loss.detach()).sum()})


def test_sums_that_cancel_and_weights_of_metrics_are_no_fault():
    assert checked(Bench(Fixed(micro=3), objective=Signed())).exact


@dataclass(frozen=True)
class MeanLoss(Objective):
    """A mean, as losses in Lightning's `training_step` are."""

    weight: str = "count"
    kind: str = "terms"

    def weights(self, fields):
        count = float((shifted_labels(fields) != IGNORED).sum())
        return {"loss": 1.0 if self.weight == "one" else count}

    def sums(self, model, fields):
        targets = shifted_labels(fields)
        logits = logits_of(model(without_labels(fields)))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        terms = (targets != IGNORED).sum()
        divisor = {"terms": terms, "positions": terms * 0 + targets.numel(), "none": terms * 0 + 1}
        return Sums(losses={"loss": loss / divisor[self.kind].clamp(min=1)})


@pytest.mark.parametrize("cut", [SORTED, Fixed(steps=1)], ids=str)
@pytest.mark.parametrize(
    ("objective", "reason"),
    [
        (MeanLoss(), "`loss` is no sum: 4 samples together give"),
        (MeanLoss(weight="one"), "`loss` is no sum: 4 samples together give"),
        (MeanLoss(kind="positions"), "`loss` is no sum: 4 samples together give"),
        (MeanLoss(weight="one", kind="none"), "the weight of `loss` does not add up"),
    ],
    ids=["mean over weight", "mean over one", "mean over padding", "undivided"],
)
def test_a_loss_or_a_weight_that_is_no_sum_is_named_with_what_to_do(objective, reason, cut):
    report = checked(Bench(cut, objective=objective))
    assert not report.exact
    assert {name for name, _ in report.culprits} == {"objective MeanLoss"}
    given = " ".join(text for _, text in report.culprits)
    assert reason in given
    assert "`weights`" in given


class OwnLoss(nn.Module):
    """Computes its own loss, as Hugging Face heads do; honours the item count, or drops it."""

    def __init__(self, *, honours: bool, gives: str = "object") -> None:
        super().__init__()
        self.body, self.honours, self.gives = TinyLM(WIDTH), honours, gives

    def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Tensor) -> object:
        logits = self.body(input_ids).flatten(0, 1)
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
        items = kwargs.get("num_items_in_batch") if self.honours else None
        loss = F.cross_entropy(logits, targets, reduction="sum" if items is not None else "mean")
        loss = loss if items is None else loss / items
        given = {"object": SimpleNamespace(loss=loss, logits=logits), "tuple": (loss, logits)}
        return (given | {"mapping": {"loss": loss}, "tensor": loss})[self.gives]


@pytest.mark.parametrize("gives", ["object", "tuple", "mapping", "tensor"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_model_that_computes_its_own_loss_is_exact_if_it_honours_the_count(reduction, gives):
    # A fifth of these samples hold no loss term: their mean alone is not a number.
    for cut in (SORTED, Fixed(micro=1)):
        objective = ModelLoss(reduction=reduction)
        model = lambda: OwnLoss(honours=True, gives=gives)  # noqa: E731
        report = checked(Bench(cut, model=model, objective=objective))
        assert report.max_relative_error <= EXACT[torch.float64], report.culprits


def test_a_model_that_drops_the_count_is_named_and_exact_as_a_mean():
    def of(objective: Objective) -> VerifyReport:
        return checked(Bench(SORTED, model=lambda: OwnLoss(honours=False), objective=objective))

    [(name, reason)] = of(ModelLoss()).culprits
    assert name == "objective ModelLoss"
    assert "try objective.reduction=mean where the model drops num_items_in_batch" in reason
    assert of(ModelLoss(reduction="mean")).exact
    wrong = of(ModelLoss(reduction="mean", causal=False))
    assert "try objective.causal=true" in dict(wrong.culprits)["objective ModelLoss"]


def test_a_model_without_a_loss_of_its_own_is_refused_with_the_objectives_that_fit():
    with pytest.raises(ConfigError, match=r"objective=model_loss: the model gave a Tensor"):
        checked(Bench(SORTED, objective=ModelLoss()))


def test_the_weight_of_a_models_loss_counts_its_labels_or_its_samples():
    labels = torch.tensor([[1, 2, -100], [-100, 4, 5]])
    fields = {"input_ids": labels, "labels": labels}
    assert ModelLoss().weights(fields) == {"model_loss": 3.0}
    assert ModelLoss(causal=False).weights(fields) == {"model_loss": 4.0}
    assert ModelLoss().weights({"labels": torch.tensor([1, -100])}) == {"model_loss": 1.0}
    assert ModelLoss().weights({"start_positions": torch.tensor([1, 2])}) == {"model_loss": 2.0}


class Routed(nn.Module):
    """A head with a router's load balance in its own loss."""

    def __init__(self, coefficient: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(4))
        self.coefficient, self.dropout = coefficient, nn.Dropout(dropout)

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> object:
        hidden = self.dropout(self.embed(input_ids))
        shares = self.gate(hidden).softmax(-1)
        logits = sum(shares[..., i, None] * each(hidden) for i, each in enumerate(self.experts))
        flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = F.cross_entropy(*flat, reduction="sum") / num_items_in_batch
        real = labels != IGNORED
        aux = 4 * (shares[real].sum(0) / real.sum().clamp(min=1)).square().sum()
        return SimpleNamespace(loss=loss + self.coefficient * aux, logits=logits, aux_loss=aux)


@pytest.mark.parametrize(
    ("coefficient", "dropout", "cut", "culprits"),
    [
        (0.01, 0.0, SORTED, {"Routed.aux_loss"}),
        (0.01, 0.1, SORTED, {"Routed.aux_loss", "dropout"}),
        (0.0, 0.0, SORTED, set()),
        (0.01, 0.0, Fixed(micro=16), set()),
    ],
)
def test_the_balance_of_a_router_within_the_loss_is_named_and_not_its_gate(
    coefficient, dropout, cut, culprits
):
    model = lambda: Routed(coefficient, dropout)  # noqa: E731
    report = checked(Bench(cut, model=model, objective=ModelLoss()))
    assert dict(report.culprits).keys() == culprits


def test_a_mean_of_means_is_named_by_its_setting_alone():
    culprits = named(Bench(Fixed(micro=3), normalizer="micro_batches"))
    assert culprits.keys() == {"batch.normalizer=micro_batches"}


# Precision, strategy, backward, data


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_of_low_precision_are_named_and_the_plan_itself_is_cleared(dtype):
    culprits = named(Bench(SORTED, dtype))
    assert culprits.keys() == {"parameters"}
    assert "the plan in float64: " in culprits["parameters"]


class HandCast(TinyLM):
    """Weights in fp32; one layer computes in bfloat16."""

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, _ = self.mix(self.embed(input_ids))
        return F.linear(hidden.bfloat16(), self.head.weight.to(torch.bfloat16)).float()


def test_casts_by_hand_are_undone_and_noted():
    report = checked(Bench(SORTED, torch.float32, model=HandCast))
    assert report.exact, report.culprits
    assert report.max_relative_error <= EXACT[torch.float64]
    assert report.notes == ("casts to bfloat16 by hand in the model are undone in float64",)


class Averaging(GradientStrategy):
    def backward(self, model, objective, micro_batches, divisors, sync):
        loss = Sum().backward(model, objective, micro_batches, divisors, sync)
        for parameter in model.module.parameters():
            parameter.grad /= len(micro_batches)
        return loss


def test_a_strategy_that_puts_the_pieces_together_wrongly_is_named():
    assert named(Bench(SORTED, strategy=Averaging())).keys() == {"accum.gradient"}


class Clipped(torch.autograd.Function):
    """Backward normalises over the micro-batch; forward is the identity."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


def test_a_backward_of_its_own_is_told_by_the_parameters_it_reaches():
    layer = lambda: Mixer(lambda hidden, _: Clipped.apply(hidden))  # noqa: E731
    [(name, reason)] = named(Bench(SORTED, model=with_mixer(layer))).items()
    assert "a backward of its own" in reason
    assert name != "head"


class MaskedInCollate(RaggedText):
    """Masks tokens at random while it collates, as masked language models do."""

    draws_randomness = True

    def collate(self, samples):
        length = max(len(s["input_ids"]) for s in samples)
        ids, labels = (
            torch.stack([F.pad(s[n], (0, length - len(s[n])), value=fill) for s in samples])
            for n, fill in (("input_ids", 0), ("labels", IGNORED))
        )
        return {"input_ids": ids.where(torch.rand(ids.shape) > 0.5, 0), "labels": labels}


def test_what_is_drawn_in_collate_is_named_as_the_datas():
    assert named(Bench(SORTED, dataset=MaskedInCollate())).keys() == {"data field input_ids"}
