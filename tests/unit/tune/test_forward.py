"""What a micro-batch costs on a card follows from a fake forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.lib.tune_support import VOCABULARY, Encoder, PerToken, Stubborn, gpt, text, workload
from trainer.config.cards import CARDS, CardName, card_of
from trainer.core.errors import ConfigError
from trainer.data.collate import Limits
from trainer.models.gpt import GPT
from trainer.objectives.base import Objective
from trainer.objectives.classify import Classify
from trainer.objectives.next_token import NextToken
from trainer.plan.memory import Shape
from trainer.tune.flops import model_flops
from trainer.tune.forward import LAUNCH_S, PEAK_SHARE, USUAL_FIXED, card_cost, count_forward
from trainer.tune.workload import Tiled


def test_a_forward_is_a_third_of_the_model_flops_and_its_pairs_are_attentions():
    model, length = gpt(), 64
    forward = count_forward(workload(model, text(length)), Shape(2, length))
    whole = model_flops(workload(model, text(length)), 1, length)
    assert forward is not None
    assert whole is not None
    assert 3 * forward.products == pytest.approx(whole.coefficients[1], rel=1e-6)
    assert 3 * forward.pairs == pytest.approx(whole.coefficients[2], rel=1e-6)
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    assert forward.products == 2 * matrices


def test_a_launch_is_thousands_of_tokens_on_a_large_card_and_fewer_on_a_small_one():
    forward = count_forward(workload(Encoder(width=768, num_blocks=12)), Shape(2, 8))
    assert forward is not None
    large, small, usual = (
        card_cost(forward, card, "bf16") for card in (card_of("h100"), card_of("l4"), None)
    )
    assert large.fixed > 5000 > small.fixed > 100
    assert large.seconds_per_token == pytest.approx(
        3 * forward.products / (PEAK_SHARE * CARDS["h100"].peak("bf16"))
    )
    assert large.fixed * large.seconds_per_token == pytest.approx(3 * forward.launches * LAUNCH_S)
    assert usual.seconds_per_token is None, "of a GPU that nobody names, time is unknown"
    assert small.fixed < usual.fixed < large.fixed
    assert card_cost(forward, card_of("h100"), "fp32").fixed < large.fixed / 10


def test_a_model_that_needs_values_costs_what_is_usual():
    assert count_forward(workload(Stubborn()), Shape(2, 8)) is None
    assert card_cost(None, card_of("h100"), "bf16").fixed == USUAL_FIXED


def test_what_a_model_says_of_a_sample_that_is_too_long_is_said_at_once():
    """Not taken for an inability to run fake, after which minutes of real probes would follow."""
    model = GPT(vocab_size=VOCABULARY, width=8, num_layers=1, num_heads=2, max_length=16)
    with pytest.raises(ConfigError, match=r"^model\.max_length: 16 is less than the 64 tokens"):
        count_forward(workload(model, text(64)), Shape(2, 64))


def test_the_words_of_device_are_the_cards():
    assert CARDS.keys() == set(CardName.__args__)
    assert card_of("cuda") is card_of("auto") is None


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
    forward = count_forward(replace(workload(model, fields), objective=objective), Shape(2, 8))
    return forward and forward.limits


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
