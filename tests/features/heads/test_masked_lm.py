"""Which tokens masked language modelling hides, and by what."""

import pytest
import torch

from tests.lib.head_toys import Tokens
from trainer.features.heads.masked_lm import MaskedLM


def test_tokens_are_hidden_in_the_shares_of_bert_and_special_ones_never():
    torch.manual_seed(0)
    tokens, count = Tokens(), 160_000
    ids = torch.arange(count) % len(tokens)
    labels = ids.masked_fill(ids == 7, -100)
    objective = MaskedLM(tokenizer=tokens, mlm_probability=0.4)
    sample = objective.prepare({"input_ids": ids, "labels": labels, "token_type_ids": ids})
    chosen = sample["labels"] != -100
    assert not chosen[torch.isin(ids, torch.tensor([*tokens.all_special_ids, 7]))].any()
    assert sample["input_ids"][~chosen].equal(ids[~chosen])
    assert sample["labels"][chosen].equal(ids[chosen]), "the label is the token that was there"
    assert chosen.sum() / (count * 12 / 16) == pytest.approx(0.4, rel=0.02)
    masked, same = sample["input_ids"] == tokens.mask_token_id, sample["input_ids"] == ids
    shares = [(chosen & each).sum() / chosen.sum() for each in (masked, same, ~masked & ~same)]
    # Of 16 random tokens one is the mask, and one the token that was there.
    assert shares == pytest.approx([0.8 + 0.1 / 16, 0.1 + 0.1 / 16, 0.1 * 14 / 16], abs=0.01)
    assert sample["token_type_ids"] is ids
