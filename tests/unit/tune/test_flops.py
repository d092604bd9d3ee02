"""FLOPs of forward and backward against formulas of papers, and what they cost on a card."""

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.lib.tune_support import (
    VOCABULARY,
    ConvNet,
    Encoder,
    PerToken,
    gpt,
    images,
    text,
    workload,
)
from trainer.config.cards import CARDS, reported_as
from trainer.data.collate import Limits
from trainer.models.recompute import checkpoint_blocks
from trainer.objectives.base import Objective
from trainer.objectives.classify import Classify
from trainer.objectives.next_token import NextToken
from trainer.tune.flops import PEAK_SHARE, ComputeCounts, card_cost, count_compute, peak_flops
from trainer.tune.workload import Tiled


def count(model: nn.Module, fields: Tiled | None = None) -> ComputeCounts:
    fields = fields or text(8)
    found = count_compute(workload(model, fields), fields.length)
    assert found is not None
    return found


def test_a_transformer_has_six_per_weight_and_token_and_twelve_per_pair_and_channel():
    model = gpt()
    matrices = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and name != "embedding.weight":
            matrices += parameter.numel()
    assert checkpoint_blocks(model) == 2, "what is computed again is not counted again"
    found = count(model)
    assert found.products == pytest.approx(6 * matrices, rel=1e-6)
    assert found.pairs == pytest.approx(12 * 2 * 24, rel=1e-6)


def test_samples_without_a_length_and_frozen_weights_count_what_is_computed():
    found = count(ConvNet(), images())
    size = 12 * 12
    stem, body, head = 2 * 8 * 27 * size, 2 * 16 * 72 * size, 2 * 5 * 16
    # Nothing asks for the gradient of the pixels.
    assert found.products == 2 * stem + 3 * body + 3 * head
    encoder = Encoder()
    whole = count(encoder)
    encoder.requires_grad_(requires_grad=False)
    encoder.head.requires_grad_()
    assert count(encoder).products < 0.6 * whole.products


def test_a_launch_is_thousands_of_tokens_on_a_large_card_and_fewer_on_a_small_one():
    counts = count(Encoder(width=768, num_blocks=12))
    large, small, usual = (
        card_cost(counts, card, "bf16") for card in (CARDS["h100"], CARDS["l4"], None)
    )
    assert large.fixed > 5000 > small.fixed > 100
    per_token_s = counts.products / (PEAK_SHARE * CARDS["h100"].peak("bf16"))
    assert large.seconds_per_token == pytest.approx(per_token_s)
    assert small.fixed < usual.fixed < large.fixed
    assert usual.seconds_per_token is None, "of a GPU that nobody names, time is unknown"


def test_what_a_device_can_do_depends_on_its_name_and_the_precision():
    assert reported_as("NVIDIA H100 80GB HBM3").peak("bf16") == 989.5e12
    assert reported_as("NVIDIA H100 PCIe").peak("tf32") == 378e12
    assert reported_as("Tesla T4").peak("bf16") == reported_as("Tesla T4").peak("fp32") == 8.1e12
    assert reported_as("Somebody's card") is peak_flops(torch.device("cpu"), "bf16") is None
    assert CARDS.get("cuda") is CARDS.get("auto") is None, "a kind of devices is no card"


class Tables(nn.Module):
    """Looks its ids up in two tables, one of them in another shape, and in a third some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 4) for rows in (11, 7, 3))
        self.head = nn.Linear(4, 6)

    def forward(self, input_ids: Tensor) -> Tensor:
        first, second, third = self.tables
        shaped = second(input_ids.view(-1)).view(*input_ids.shape, 4)
        some = third(input_ids.clamp(0, 2)) + third(input_ids[:, :1])
        return self.head(first(input_ids) + shaped + some)


class Pixels(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1).expand(-1, 5, -1)  # (batch, classes, ...)


def limits_of(model: nn.Module, objective: Objective, fields: Tiled | None = None) -> Limits | None:
    counts = count_compute(workload(model, fields, objective=objective), 8)
    return counts and counts.limits


def test_rows_are_those_of_the_smallest_table_of_all_ids_and_classes_those_of_the_logits():
    assert limits_of(Tables(), NextToken()) == {"input_ids": 7, "labels": 6}
    own = limits_of(Tables(), PerToken(), text())
    assert own == {"input_ids": 7}, "labels of a user's objective mean anything"
    pixels = Tiled({"x": torch.ones(2, 8), "labels": torch.ones(2, 8, dtype=torch.long)}, 8)
    assert limits_of(Pixels(), Classify(), pixels) == {"labels": 5}
    assert limits_of(gpt(), NextToken()) == {"input_ids": VOCABULARY, "labels": VOCABULARY}
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    deberta = transformers.DebertaV2Config(vocab_size=VOCABULARY, legacy=False, **small)
    model = transformers.DebertaV2ForMaskedLM(deberta)  # whose output embeddings are not the last
    per_token = Classify(class_axis=-1)
    assert limits_of(model, per_token) == {"input_ids": VOCABULARY, "labels": VOCABULARY}
