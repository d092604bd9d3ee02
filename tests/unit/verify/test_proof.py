"""`train verify`: exact is proven, and what is not exact has its culprit named, however deep."""

import math
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from tests.lib.objective_toys import MeanOfTokens, Pairs
from tests.lib.support import EXACT, VOCABULARY, WRONG, Bench, RaggedText, TinyLM
from trainer.core.declared_state import EarlierState
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import IGNORED
from trainer.features.heads.model_loss import ModelLoss
from trainer.models.recompute import checkpoint_blocks
from trainer.objectives.classify import Classify
from trainer.objectives.next_token import NextToken
from trainer.plan.cut import Layout
from trainer.plan.cuts import Budget, Fixed

SORTED = Budget(max_tokens=60)
WIDTH = 8


def named(bench: Bench) -> dict[str, str]:
    report = bench.verified()
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


class Unusual(nn.Module):
    """Is sound, whatever it does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = TinyLM(WIDTH)
        self.body.head.weight = self.body.embed.weight
        self.body.norm.weight.requires_grad_(requires_grad=False)
        self.twice = nn.Linear(VOCABULARY, VOCABULARY)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(self.twice)  # computed in every forward, and stays in between

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        logits = checkpoint(self.body, input_ids, use_reentrant=False)
        logits = logits * torch.ones(VOCABULARY)
        logits = (logits.bfloat16() + self.twice.bias.to(torch.bfloat16)).float()
        return SimpleNamespace(logits=self.twice(F.gelu(self.twice(logits.to(torch.float32)))))


def test_an_unusual_but_sound_model_raises_no_false_alarm():
    report = Bench(SORTED, torch.float32, model=Unusual).verified(whole_fits=False)
    assert (report.verdict, report.dtype) == ("exact", "float64"), report.culprits
    assert report.max_relative_error <= EXACT[torch.float64]
    assert report.reference == "sample by sample, summed"
    assert report.notes == (
        "casts to bfloat16 by hand in the model are undone in float64",
        "the whole batch in one piece is not sure to fit into memory in float64",
    )


def test_a_step_in_one_piece_is_the_whole_batch_though_its_modules_couple_samples_or_draw():
    model = lambda: TinyLM(dropout=0.2, norm=nn.BatchNorm1d(8))  # noqa: E731
    report = Bench(Fixed(steps=1), model=model).verified()
    assert (report.verdict, report.reference) == ("exact", "whole batch")
    assert any("no other cut was compared" in note for note in report.notes)


def test_a_batch_without_a_single_loss_term_is_exact():
    data = RaggedText()
    data.masked = set(range(len(data)))
    report = Bench(SORTED, dataset=data).verified()
    assert (report.verdict, report.max_relative_error) == ("exact", 0.0)
    assert any("no sample of this batch has a loss term" in note for note in report.notes)


# Modules that couple samples


class Batchwise(TinyLM):
    """Normalises over the samples by a function: no module of its own to blame."""

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        return logits - logits.mean((0, 1))


class BatchNorm(nn.BatchNorm1d):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.transpose(1, 2)).transpose(1, 2)


def norms() -> nn.Module:
    """Two batch norms, so that the second is behind what the first has changed."""
    inner = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)
    return nn.Sequential(BatchNorm(WIDTH), *inner, BatchNorm(WIDTH))


class Gated(nn.Module):
    """A branch behind a gate that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = BatchNorm(WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.gate * self.inner(hidden)


def rare() -> nn.Module:
    """Shows in the step itself, but not in a few of its samples."""
    return Mixer(lambda hidden, _: hidden * (2.0 if hidden.shape[0] > 5 else 1.0))


class InObject(TinyLM):
    """State in a plain helper."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = SimpleNamespace(calls=0)

    def forward(self, input_ids: Tensor) -> Tensor:
        self.tracker.calls += 1
        return super().forward(input_ids) * self.tracker.calls


# What heeds padding


def backwards() -> nn.Module:
    return Mixer(lambda hidden, _: hidden.flip(1).cumsum(1).flip(1))


class Sounds(list):
    """Sounds of several lengths, with their class; a length in tokens says nothing of them."""

    draws_randomness = False
    lengths = np.ones(24, dtype=np.int64)


class HearsPadding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.GroupNorm(1, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, sound: Tensor) -> Tensor:
        return self.head(self.norm(sound.transpose(1, 2)).amax(-1))


# The objective and the data


class Noisy(NextToken):  # type: ignore[misc] # final
    def sums(self, model, fields):
        sums = super().sums(model, fields)
        return replace(sums, losses={k: v * torch.rand(()) for k, v in sums.losses.items()})


class MaskedInCollate(RaggedText):
    """Masks tokens at random while it collates, as masked language models do."""

    draws_randomness = True

    def collate(self, samples):
        ids = pad_sequence([each["input_ids"] for each in samples], batch_first=True)
        labels = [each["labels"] for each in samples]
        labels = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
        return {"input_ids": ids.where(torch.rand(ids.shape) > 0.5, 0), "labels": labels}


PADDED = {"model": with_mixer(backwards), "objective": Classify(class_axis=-1)}
NOISE = torch.randn(24, 10, WIDTH, generator=torch.Generator().manual_seed(0))
SOUNDS = Sounds({"sound": NOISE[i, i % 5 :], "labels": torch.tensor(i % 3)} for i in range(24))
HEARD = {"model": HearsPadding, "objective": Classify(), "dataset": SOUNDS}


# TinyLM's own GRU returns a last state that padding changes, and nobody uses: it is never named.
@pytest.mark.parametrize(
    ("name", "reason", "cut", "settings"),
    [
        ("dropout.*", "2 x BatchNorm normalises", Fixed(micro=4), {"model": with_mixer(norms)}),
        ("dropout.inner", "BatchNorm normalises", Fixed(micro=3), {"model": with_mixer(Gated)}),
        ("Batchwise (in its own forward)", ": capacity routing", SORTED, {"model": Batchwise}),
        ("InObject (in its own forward)", "keeps state", SORTED, {"model": InObject}),
        ("dropout", "", Fixed(micro=7), {"model": with_mixer(rare)}),
        ("dropout", "when its padding changes", SORTED, PADDED),
        ("norm", "when its padding changes", Fixed(micro=3), HEARD),
        ("objective Noisy", "", SORTED, {"objective": Noisy()}),
        ("data field input_ids", "", SORTED, {"dataset": MaskedInCollate()}),
        ("batch.normalizer=micro_batches", "", Fixed(micro=3), {"normalizer": "micro_batches"}),
    ],
)
def test_one_culprit_alone_is_named_with_the_reason(name, reason, cut, settings):
    [(found, text)] = named(Bench(cut, **settings)).items()
    assert found == name
    assert reason in text


def test_a_gradient_that_is_not_finite_however_it_is_cut_is_called_that():
    layer = lambda: Mixer(lambda hidden, _: hidden * math.nan)  # noqa: E731
    report = Bench(SORTED, model=with_mixer(layer)).verified()
    assert report.verdict == "not_proven"
    [(name, reason)] = report.culprits
    assert name == "gradient"
    assert "not finite" in reason


# What draws

OWN = random.Random(0)
WITHOUT, UNPROVEN = "exact_without_dropout", "not_proven"
OFF = "Mixer draws at random anew for every micro-batch, so it depends on the micro-batches: the "
OFF += "step is exact with it off (error"


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        (lambda x, on: x * (random.random() if on else 1.0), WITHOUT, OFF),
        (lambda x, _: x * OWN.random(), UNPROVEN, "no seed of the run governs"),
        (lambda x, _: x * (torch.rand(()) > 1e-6), "exact", "draws at random, without effect here"),
    ],
    ids=["Python", "no seed", "no effect"],
)
def test_draws_of_a_forward_are_named_and_exact_when_off(change, verdict, words):
    report = Bench(SORTED, model=with_mixer(lambda: Mixer(change))).verified()
    assert report.verdict == verdict
    assert [name for name, _ in report.culprits] == ["dropout"] * (verdict != "exact")
    assert words in " ".join([*report.notes, *dict(report.culprits).values()])


class DropsAndCouples(nn.Module):
    """Draws, and works on the whole micro-batch, both in training mode only."""

    def __init__(self, couple: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.couple = couple

    def forward(self, hidden: Tensor) -> Tensor:
        return F.dropout(self.couple(hidden), 0.2, True) if self.training else hidden


def draws_by_size(hidden: Tensor) -> Tensor:
    return hidden * torch.tensor([random.random() for _ in hidden.flatten()]).view_as(hidden)


def noisy(hidden: Tensor) -> Tensor:
    hidden = torch.native_dropout(hidden, 0.2, True)[0] + torch.randn_like(hidden)
    return hidden * torch.rand(hidden.shape) - torch.bernoulli(torch.full_like(hidden, 0.3))


def masks_spans(hidden: Tensor) -> Tensor:
    """Masks a span of each sample, drawn by NumPy, as SpecAugment does."""
    rows = (int(np.random.choice(3, 1, replace=False)[0]) for _ in hidden)
    scale = torch.from_numpy(np.random.rand(*hidden.shape) + np.random.random(hidden.shape[-1:]))
    return (
        hidden * scale * torch.stack([torch.arange(hidden.shape[1]) != i for i in rows])[..., None]
    )


@pytest.mark.parametrize(
    ("couple", "verdict", "words"),
    [
        (draws_by_size, UNPROVEN, "by means that cannot be made constant"),
        (lambda x: masks_spans(x - x.mean((0, 1))), "not_exact", "the rest of its micro-batch"),
        (noisy, WITHOUT, "exact with it off"),
    ],
)
def test_a_module_that_draws_does_not_hide_what_else_it_does_in_training_mode(
    couple, verdict, words
):
    report = Bench(SORTED, model=with_mixer(lambda: DropsAndCouples(couple))).verified()
    assert report.verdict == verdict
    assert {name for name, _ in report.culprits} == {"dropout"}
    assert any(words in text for _, text in report.culprits)


def test_dropout_is_named_and_so_is_the_batch_norm_before_it():
    model = lambda: TinyLM(dropout=0.2, norm=nn.BatchNorm1d(WIDTH))  # noqa: E731
    report = Bench(Fixed(micro=5), model=model).verified()
    assert report.verdict == "not_exact"
    culprits = dict(report.culprits)
    assert [*culprits] == ["norm", "dropout"], "what dropout does not explain is first"
    assert culprits["dropout"].startswith("Dropout draws at random")
    assert "with it off the step still differs" in culprits["dropout"]
    assert culprits["norm"].startswith("BatchNorm1d normalises")


# What does not add up


class Uniform(RaggedText):
    """Samples of one length."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = np.full_like(self.lengths, 6)
        self.samples = [torch.arange(6) + i % 5 for i in range(len(self.lengths))]
        self.masked = set()


@pytest.mark.parametrize(
    ("cut", "data"),
    [
        (Fixed(micro=4), Uniform),  # the cut holds whole pairs, in order
        (Fixed(steps=1), RaggedText),
    ],
)
def test_a_loss_that_couples_samples_is_named_in_every_cut(cut, data):
    [(name, reason)] = named(Bench(cut, objective=Pairs(group_size=1), dataset=data())).items()
    assert name == "objective Pairs"
    assert "couples samples" in reason


def test_a_loss_over_declared_groups_is_exact_though_the_last_is_short():
    settings: dict[str, Any] = {"layout": Layout(group_size=2), "global_batch": 15}
    assert Bench(Budget(max_tokens=90), objective=Pairs(), **settings).verified().exact


class Uncounted(NextToken):  # type: ignore[misc] # final
    """Weighs every micro-batch alike."""

    def weights(self, fields):
        return dict.fromkeys(NextToken.weights(self, fields), 1.0)


class Mean(MeanOfTokens):
    """A mean, as losses in Lightning's `training_step` are."""

    weights = Uncounted.weights


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_mean_that_even_micro_batches_hide_is_named_and_dropout_is_no_excuse(dropout):
    settings: dict[str, Any] = {"dataset": Uniform(), "objective": Mean()}
    report = Bench(Fixed(micro=4), model=lambda: TinyLM(dropout=dropout), **settings).verified()
    assert report.verdict == "not_exact"
    assert {name for name, _ in report.culprits} - {"dropout"} == {"objective Mean"}
    assert any("is not a sum" in reason for _, reason in report.culprits)
    assert any("by coincidence" in note for note in report.notes) == (not dropout)
    assert (report.max_relative_error <= 1e-10) == (not dropout)


@pytest.mark.parametrize(
    ("objective", "cut", "reason"),
    [
        (MeanOfTokens(), SORTED, "`cross_entropy` is not a sum: the same samples give"),
        (Uncounted(), Fixed(steps=1), "the weight of `cross_entropy` is not a sum"),
    ],
)
def test_a_loss_or_a_weight_that_is_no_sum_is_named_with_what_to_do(objective, cut, reason):
    report = Bench(cut, objective=objective).verified()
    assert not report.exact
    assert {name for name, _ in report.culprits} == {f"objective {type(objective).__name__}"}
    given = " ".join(text for _, text in report.culprits)
    assert reason in given
    assert "`weights`" in given


# Models that compute their own loss


def test_a_loss_of_the_model_stands_first_or_alone_and_a_mean_over_no_label_is_nothing():
    fields, mean = {"labels": torch.full((2, 3), IGNORED)}, torch.tensor(math.nan)
    for output in (mean, (mean, fields)):
        sums = ModelLoss(reduction="mean").sums(lambda _, output=output: output, fields)
        assert sums.losses == {"model_loss": 0.0}
    with pytest.raises(ConfigError, match=r"objective=model_loss: the model gave a Tensor"):
        ModelLoss().sums(lambda _: torch.zeros(2, 3), fields)


def test_the_weight_of_a_models_loss_counts_its_labels_or_its_samples():
    labels = torch.tensor([[1, 2, -100], [-100, 4, 5]])
    fields = {"input_ids": labels, "labels": labels}
    assert ModelLoss().weights(fields) == {"model_loss": 3.0}
    assert ModelLoss(causal=False).weights(fields) == {"model_loss": 4.0}
    assert ModelLoss().weights({"labels": torch.tensor([1, -100])}) == {"model_loss": 1.0}
    assert ModelLoss().weights({"start_positions": torch.tensor([1, 2])}) == {"model_loss": 2.0}


class Counted(nn.Module):
    """Scales by how often it ran, and counts that in a buffer, or in a list."""

    def __init__(self, *, declares: bool) -> None:
        super().__init__()
        self.inner, self.runs = nn.Linear(WIDTH, WIDTH), [0]
        self.declares, self.counts = declares, nn.Linear(WIDTH, WIDTH)
        self.counts.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.counts.register_buffer("mask", torch.full((2,), -math.inf))
        self.counts.register_buffer("is_odd", torch.tensor(False))

    def forward(self, hidden: Tensor) -> Tensor:
        self.counts.seen += 1
        self.counts.is_odd.logical_not_()
        self.runs[0] += 1
        scale = self.counts.seen if self.declares else self.runs[0]
        return hidden + torch.tanh(self.inner(hidden) / scale)


def recomputing(*, declares: bool = True) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = TinyLM()
        model.dropout = nn.Sequential(*(nn.Sequential(Counted(declares=declares)) for _ in "12"))
        assert checkpoint_blocks(model) == 2
        return model

    return build


def test_recomputation_is_compared_with_the_same_cut_and_buffers_count(monkeypatch):
    one_piece = Fixed(micro=16)
    report = Bench(one_piece, model=recomputing()).verified()
    assert report.exact, report.culprits
    found = named(Bench(one_piece, model=recomputing(declares=False)))
    assert list(found) == ["dropout.1.0.inner"]
    assert "type activation_checkpointing=false" in found["dropout.1.0.inner"]
    monkeypatch.setattr(EarlierState, "lent", lambda _: nullcontext())
    assert list(named(Bench(one_piece, model=recomputing()))) == [
        "dropout.0.0.counts",
        "dropout.1.0.counts",
    ]
