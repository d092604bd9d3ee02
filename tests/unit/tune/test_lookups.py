"""The rows of a model's tables are found without running it, for models of any kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.lib.tune_support import Encoder, Stubborn, assert_same, text, traces, workload
from trainer.models.check import vocabulary_of
from trainer.objectives.classify import Classify
from trainer.objectives.next_token import NextToken
from trainer.tune.lookups import lookup_limits
from trainer.tune.workload import Tiled


class Tables(nn.Module):
    """Looks every field up in a table of its own, by no name that anyone knows."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 4) for rows in (7, 5, 3))
        self.weight = nn.Parameter(torch.zeros(11, 4))
        self.head = nn.Linear(4, 6)

    def forward(self, tokens: Tensor, kinds: Tensor, safe: Tensor, bag: Tensor) -> Tensor:
        first, second, third = self.tables
        shifted = nn.functional.embedding(tokens.view(-1), self.weight).view(*tokens.shape, 4)
        return self.head(
            first(tokens)
            + shifted
            + second(kinds[:, :-1]).sum(1, keepdim=True)
            + third(safe.clamp(0, 2))
            + nn.functional.embedding_bag(bag, self.weight)[:, None]
        )


def tables() -> Tiled:
    numbers = torch.arange(8).reshape(2, 4) % 3
    names = ("tokens", "kinds", "safe", "bag", "labels")
    return Tiled({name: numbers.clone() for name in names}, 4)


def test_whole_fields_that_are_looked_up_have_the_rows_of_their_smallest_table():
    work = replace(workload(Tables(), tables()), objective=NextToken())
    before = traces(work.model)
    assert lookup_limits(work, 4, {}) == {"tokens": 7, "bag": 11, "labels": 6}
    assert lookup_limits(work, 4, {"tokens": 2, "labels": 9}) == {"bag": 11}
    own = workload(work.model, tables())  # labels of an objective of the user's own mean anything
    assert lookup_limits(own, 4, {}) == {"tokens": 7, "bag": 11}
    assert_same(traces(work.model), before)


def test_classes_are_read_off_the_logits():
    class Pixels(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.unsqueeze(1).expand(-1, 5, -1)  # (batch, classes, ...)

    fields = Tiled({"x": torch.ones(2, 3), "labels": torch.ones(2, 3, dtype=torch.long)}, 3)
    work = replace(workload(Pixels(), fields), objective=Classify())
    assert lookup_limits(work, 3, {}) == {"labels": 5}


def test_a_resized_model_of_transformers_states_its_new_rows():
    config = transformers.GPT2Config(vocab_size=19, n_positions=8, n_embd=4, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    model.resize_token_embeddings(23, mean_resizing=False)
    assert vocabulary_of(model) == (23, 23)
    work = replace(workload(model), objective=NextToken())
    assert lookup_limits(work, 8, {"input_ids": 23, "labels": 23}) == {}
    assert lookup_limits(work, 8, {}) == {"input_ids": 23, "labels": 23}


@pytest.mark.parametrize("model", [Stubborn, Encoder])
def test_a_model_that_needs_values_has_no_limits(model):
    found = lookup_limits(workload(model(), text()), 8, {})
    assert found == ({} if model is Stubborn else {"input_ids": 61})
