"""What a micro-batch costs on a card follows from a fake forward."""

from __future__ import annotations

import pytest
from torch import nn

from tests.lib.tune_support import VOCABULARY, Encoder, Stubborn, gpt, text, workload
from trainer.config.cards import CARDS, CardName, card_of
from trainer.core.errors import ConfigError
from trainer.models.gpt import GPT
from trainer.plan.memory import Shape
from trainer.tune.flops import model_flops
from trainer.tune.forward import LAUNCH_S, PEAK_SHARE, USUAL_FIXED, card_cost, count_forward


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
