"""What a data set says of itself, by `facts` or by attributes."""

import pickle

import numpy as np
import pytest
import torch

from trainer.core.errors import DataError
from trainer.data.samples import DataFacts
from trainer.data.view import DataView


class Rows:
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return {"input_ids": torch.arange(2 + i)}


class Stating(Rows):
    vocab_size = "an attribute, which is not looked at"

    def facts(self):
        return DataFacts(lengths=[2, 3], vocab_size=7, num_skipped=1, name_of=lambda i: f"row {i}")


class WithAttributes(Rows):
    lengths, vocab_size, num_skipped, facts = [2, 3], 7, 1, "another thing"

    def name_of(self, i):
        return f"row {i}"


def test_facts_are_those_of_a_method_or_of_attributes_and_nothing_else():
    views = [DataView(Stating()), DataView(WithAttributes())]
    # What has no name to be unpickled by is asked for again.
    for view in (*views, pickle.loads(pickle.dumps(views[0]))):
        assert (view.facts.vocab_size, view.num_skipped, view.name_of(1)) == (7, 1, "row 1")
        assert view.lengths[:].tolist() == [2, 3]
    derived = type("Derived", (Stating,), {"pad_token_id": 9, "max_length": "any"})
    facts = DataView(derived()).facts
    assert (facts.pad_token_id, facts.vocab_size, facts.max_length) == (9, 7, None)
    derived.max_length = np.int64(64)
    assert DataView(derived()).facts.max_length == 64
    odd = type("Odd", (Rows,), {"facts": lambda _: {"vocab_size": 7}})
    with pytest.raises(DataError, match="`facts` of Odd gives a dict; return a tr"):
        DataView(odd())
