"""`train verify`: exact is proven, and what is not exact has its culprit named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.lib.support import EXACT, VOCABULARY, WRONG, Bench, RaggedText, TinyLM
from trainer.accumulate.base import GradientStrategy
from trainer.accumulate.sum import Sum
from trainer.core.errors import ConfigError
from trainer.objectives.base import IGNORED, Objective, Sums, logits_of, without_labels
from trainer.objectives.classify import Classify
from trainer.objectives.model_loss import ModelLoss
from trainer.objectives.next_token import NextToken, shifted_labels
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
    assert report.exact == (report.max_relative_error <= 1e-10)
    assert report.exact == (not report.culprits)
    return report


def named(report: VerifyReport) -> dict[str, str]:
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


class Recomputed(nn.Module):
    """Blocks that are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = TinyLM(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(VOCABULARY, VOCABULARY) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.body(input_ids)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return hidden


@pytest.mark.parametrize("whole_fits", [True, False], ids=["whole", "one by one"])
@pytest.mark.parametrize("cut", [SORTED, Fixed(micro=3), Auto(max_tokens=90)], ids=str)
@pytest.mark.parametrize("normalizer", ["tokens", "samples"])
def test_a_sound_step_is_exact_for_every_cut_and_reference(cut, whole_fits, normalizer):
    report = checked(Bench(cut, torch.float32, normalizer=normalizer), whole_fits=whole_fits)
    assert report.exact
    assert report.max_relative_error <= EXACT[torch.float64]
    assert report.dtype == "float64"
    assert report.reference == ("whole batch" if whole_fits else "sample by sample, summed")


@pytest.mark.parametrize(
    "model",
    [Shared, lambda: TinyLM(norm=CastingNorm()), Recomputed],
    ids=["shared and frozen", "casts by hand", "recomputed"],
)
def test_an_unusual_but_sound_model_raises_no_false_alarm(model):
    report = checked(Bench(SORTED, torch.float32, model=model))
    assert report.exact, report.culprits
    assert report.max_relative_error <= EXACT[torch.float64]


def test_a_step_in_one_piece_is_compared_with_its_samples_one_by_one():
    report = checked(Bench(Fixed(steps=1)))
    assert report.exact
    assert report.reference == "sample by sample, summed"


def test_a_batch_normalised_step_in_one_piece_is_exact():
    report = checked(Bench(Fixed(steps=1), model=lambda: TinyLM(norm=nn.BatchNorm1d(8))))
    assert report.exact
    assert report.reference == "whole batch"


# What couples samples


class ConvNet(nn.Module):
    """Two batch norms, so that the second is behind what the first has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
        )
        self.head = nn.Linear(4, 5)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.body(image).mean((2, 3)))


class Images:
    draws_randomness = False

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(40, 1, 6, 6, generator=generator)
        self.lengths = RaggedText().lengths * 0 + 1

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        return {"image": self.images[index], "labels": torch.tensor(index % 5)}


@pytest.mark.parametrize("whole_fits", [True, False])
def test_every_batch_norm_is_named_not_just_the_first(whole_fits):
    bench = Bench(Fixed(micro=4), dataset=Images(), model=ConvNet, objective=Classify())
    culprits = named(checked(bench, whole_fits=whole_fits))
    assert culprits.keys() == {"body.*"}
    assert culprits["body.*"].startswith("2 x BatchNorm2d normalises over the samples")


def test_a_batch_norm_over_single_values_is_named_though_no_sample_can_run_alone():
    bench = Bench(Fixed(micro=4), model=lambda: TinyLM(norm=nn.BatchNorm1d(8)))
    report = checked(bench, whole_fits=False)
    assert report.reference == "groups of 2, summed"
    assert named(report).keys() == {"norm"}


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
    culprits = named(checked(Bench(SORTED, model=with_mixer(Capacity))))
    assert culprits.keys() == {"dropout"}
    assert culprits["dropout"].startswith("Capacity gives a sample another output when")
    assert "capacity routing" in culprits["dropout"]
    assert checked(Bench(SORTED, model=with_mixer(lambda: Capacity(factor=1e9)))).exact


class RareCapacity(nn.Module):
    """Couples only micro-batches of more than five samples: four together show nothing."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * (2.0 if hidden.shape[0] > 5 else 1.0)


@pytest.mark.parametrize("whole_fits", [True, False])
def test_a_coupling_that_a_few_samples_do_not_show_is_found_in_the_step_itself(whole_fits):
    bench = Bench(Fixed(micro=7), model=with_mixer(RareCapacity))
    culprits = named(checked(bench, whole_fits=whole_fits))
    assert culprits.keys() == {"dropout"}
    assert "RareCapacity" in culprits["dropout"]


class Batchwise(nn.Module):
    """Normalises over the samples by a function: no module of its own to blame."""

    def __init__(self) -> None:
        super().__init__()
        self.body = TinyLM(WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.body(input_ids)
        return logits - logits.mean((0, 1))


def test_a_coupling_in_the_forward_of_the_model_itself_names_the_model():
    culprits = named(checked(Bench(SORTED, model=Batchwise)))
    assert list(culprits) == ["Batchwise (in its own forward)"]


# What heeds padding


class Backwards(nn.Module):
    """Bidirectional, over padded rows."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.both(hidden)[0]


class Convolved(nn.Module):
    def __init__(self, kernel: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, kernel, padding="same")

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
    culprits = named(checked(Bench(SORTED, model=with_mixer(mixer), objective=Tagging())))
    assert culprits.keys() == {name}
    assert "when its padding changes" in culprits[name]


def test_a_layer_that_looks_one_step_ahead_is_exact_where_no_padding_is_looked_at():
    bench = Bench(Fixed(micro=1), model=with_mixer(Convolved), objective=Tagging())
    assert checked(bench, whole_fits=False).exact


# What draws


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import random  # noqa: PLC0415

        self.random = random.Random(0)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.random.random()


def test_dropout_is_named_and_the_step_is_exact_with_it_off():
    report = checked(Bench(SORTED, model=with_mixer(lambda: nn.Dropout(0.2))))
    assert report.verdict == "exact_without_dropout"
    culprits = named(report)
    assert culprits.keys() == {"dropout"}
    assert "the step is exact with it off (error" in culprits["dropout"]


def test_all_dropouts_are_named_and_so_is_the_batch_norm_behind_them():
    def model() -> nn.Module:
        net = with_mixer(lambda: nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 8), nn.Dropout(0.1)))()
        net.norm = nn.BatchNorm1d(WIDTH)
        return net

    report = checked(Bench(Fixed(micro=5), model=model))
    assert report.verdict == "not_exact"
    culprits = named(report)
    assert culprits.keys() == {"dropout.*", "norm"}
    assert culprits["dropout.*"].startswith("2 x Dropout draws at random")
    assert "not exact with it off either" in culprits["dropout.*"]
    assert culprits["norm"].startswith("BatchNorm1d normalises")


def test_dropout_in_a_step_of_one_piece_is_the_whole_batch_step():
    report = checked(Bench(Fixed(steps=1), model=lambda: TinyLM(dropout=0.2)))
    assert report.reference == "whole batch"


def test_a_generator_that_no_seed_governs_is_named():
    report = checked(Bench(SORTED, model=with_mixer(OwnGenerator)))
    assert report.verdict == "not_proven"
    culprits = named(report)
    assert culprits.keys() == {"dropout"}
    assert "no seed of the run governs" in culprits["dropout"]


# What divides


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


@pytest.mark.parametrize("cut", [SORTED, Fixed(micro=4), Fixed(steps=1)], ids=str)
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
    def model() -> nn.Module:
        return OwnLoss(honours=True, gives=gives)

    # A fifth of these samples hold no loss term: their mean alone is not a number.
    for cut in (SORTED, Fixed(micro=1)):
        report = checked(Bench(cut, model=model, objective=ModelLoss(reduction=reduction)))
        assert report.max_relative_error <= EXACT[torch.float64], report.culprits


def test_a_model_that_drops_the_count_is_named_and_exact_as_a_mean():
    def model() -> nn.Module:
        return OwnLoss(honours=False)

    report = checked(Bench(SORTED, model=model, objective=ModelLoss()))
    [(name, reason)] = report.culprits
    assert name == "objective ModelLoss"
    assert "the model drops num_items_in_batch: type objective.reduction=mean, or" in reason
    assert checked(Bench(SORTED, model=model, objective=ModelLoss(reduction="mean"))).exact
    wrong = checked(Bench(SORTED, model=model, objective=ModelLoss(reduction="mean", causal=False)))
    assert "objective.causal=true" in dict(wrong.culprits)["objective ModelLoss"]


def test_a_model_without_a_loss_of_its_own_is_refused_with_the_objectives_that_fit():
    bench = Bench(SORTED, objective=ModelLoss())
    with pytest.raises(ConfigError, match=r"objective=model_loss: the model gave a Tensor"):
        verify(bench.kit, bench.feed.next(), bench.feed, whole_fits=True)


def test_the_weight_of_a_models_loss_counts_its_labels_or_its_samples():
    labels = torch.tensor([[1, 2, -100], [-100, 4, 5]])
    fields = {"input_ids": labels, "labels": labels}
    assert ModelLoss().weights(fields) == {"model_loss": 3.0}
    assert ModelLoss(causal=False).weights(fields) == {"model_loss": 4.0}
    assert ModelLoss().weights({"labels": torch.tensor([1, -100])}) == {"model_loss": 1.0}
    assert ModelLoss().weights({"start_positions": torch.tensor([1, 2])}) == {"model_loss": 2.0}


def test_a_mean_of_means_is_named_by_its_setting_alone():
    culprits = named(checked(Bench(Fixed(micro=3), normalizer="micro_batches")))
    assert culprits.keys() == {"batch.normalizer=micro_batches"}


def test_an_objective_that_draws_is_named():
    class Noisy(Objective):
        def weights(self, fields):
            return NextToken().weights(fields)

        def sums(self, model, fields):
            sums = NextToken().sums(model, fields)
            return replace(sums, losses={k: v * torch.rand(()) for k, v in sums.losses.items()})

    report = checked(Bench(SORTED, objective=Noisy()))
    assert "objective Noisy" in named(report)


# Precision, strategy, backward, data


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_of_low_precision_are_named_and_the_plan_itself_is_cleared(dtype):
    culprits = named(checked(Bench(SORTED, dtype)))
    assert culprits.keys() == {"parameters"}
    assert "the plan in float64: " in culprits["parameters"]


class Averaging(GradientStrategy):
    def backward(self, model, objective, micro_batches, divisors, sync):
        loss = Sum().backward(model, objective, micro_batches, divisors, sync)
        for parameter in model.module.parameters():
            parameter.grad /= len(micro_batches)
        return loss


def test_a_strategy_that_puts_the_pieces_together_wrongly_is_named():
    assert named(checked(Bench(SORTED, strategy=Averaging()))).keys() == {"accum.gradient"}


class Clipped(torch.autograd.Function):
    """Backward normalises over the micro-batch; forward is the identity."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


class ClippedLayer(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return Clipped.apply(hidden)


def test_a_backward_of_its_own_is_told_by_the_parameters_it_reaches():
    culprits = named(checked(Bench(SORTED, model=with_mixer(ClippedLayer))))
    assert len(culprits) == 1
    assert "a backward of its own" in next(iter(culprits.values()))
    assert next(iter(culprits)) != "head"


class MaskedInCollate(RaggedText):
    """Masks tokens at random while it collates, as masked language models do."""

    draws_randomness = True

    def collate(self, samples):
        length = max(len(s["input_ids"]) for s in samples)
        ids = torch.stack(
            [F.pad(s["input_ids"], (0, length - len(s["input_ids"]))) for s in samples]
        )
        labels = torch.stack(
            [F.pad(s["labels"], (0, length - len(s["labels"])), value=IGNORED) for s in samples]
        )
        return {"input_ids": ids.where(torch.rand(ids.shape) > 0.5, 0), "labels": labels}


def test_what_is_drawn_in_collate_is_named_as_the_datas():
    culprits = named(checked(Bench(SORTED, dataset=MaskedInCollate())))
    assert culprits.keys() == {"data field input_ids"}


def test_a_batch_without_a_single_loss_term_is_exact():
    data = RaggedText()
    data.masked = set(range(len(data)))
    report = checked(Bench(SORTED, dataset=data))
    assert (report.verdict, report.max_relative_error) == ("exact", 0.0)
    assert any("no sample of this batch has a loss term" in note for note in report.notes)
