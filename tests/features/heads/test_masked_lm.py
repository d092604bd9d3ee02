"""Which tokens masked language modelling hides, and by what."""

from types import SimpleNamespace

import pytest
import torch

from trainer.features.heads.masked_lm import MaskedLM

MASK, SPECIAL, COUNT = 4, [0, 1, 2], 100_000


class Tokens(SimpleNamespace):
    def __len__(self) -> int:
        return 50


TOKENIZER = Tokens(mask_token_id=MASK, all_special_ids=[*SPECIAL, MASK])


@pytest.mark.parametrize("probability", [0.15, 0.4])
def test_tokens_are_hidden_in_the_shares_of_bert_and_special_ones_never(probability):
    torch.manual_seed(0)
    ids = torch.arange(COUNT) % 50
    labels = ids.masked_fill(ids == 7, -100)
    objective = MaskedLM(tokenizer=TOKENIZER, mlm_probability=probability)
    sample = objective.prepare({"input_ids": ids, "labels": labels, "token_type_ids": ids})
    chosen = sample["labels"] != -100
    assert not chosen[torch.isin(ids, torch.tensor([*SPECIAL, MASK, 7]))].any()
    assert sample["input_ids"][~chosen].equal(ids[~chosen])
    assert sample["labels"][chosen].equal(ids[chosen]), "the label is the token that was there"
    assert chosen.sum() / (COUNT * 45 / 50) == pytest.approx(probability, rel=0.02)
    masked, same = sample["input_ids"] == MASK, sample["input_ids"] == ids
    shares = [(chosen & each).sum() / chosen.sum() for each in (masked, same, ~masked & ~same)]
    # Of 50 random tokens one is the mask, and one the token that was there.
    assert shares == pytest.approx([0.8 + 0.1 / 50, 0.1 + 0.1 / 50, 0.1 * 48 / 50], abs=0.01)
    assert sample["token_type_ids"] is ids
