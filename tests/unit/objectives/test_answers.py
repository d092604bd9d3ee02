"""What objectives say that a model predicts, beside classes: numbers, chances and answers."""

from types import SimpleNamespace

import pytest
import torch

from trainer.features.heads.numbers import Numbers
from trainer.features.heads.question_answering import QuestionAnswering


def test_numbers_are_as_the_model_gives_them_and_several_labels_have_chances():
    output, fields = torch.tensor([[0.0], [1.5]]), {"labels": torch.tensor([1.0, 2.0])}
    assert Numbers().predictions(output, fields) == [([1.0], [0.0]), ([2.0], [1.5])]
    ((_, chance), _) = Numbers(loss="binary_cross_entropy").predictions(output, fields)
    assert chance == [pytest.approx(0.5)]


def test_an_answer_is_never_in_the_padding():
    fields = {
        "input_ids": torch.zeros(1, 4, dtype=torch.int64),
        "attention_mask": torch.tensor([[1, 1, 1, 0]]),
        "start_positions": torch.tensor([1]),
        "end_positions": torch.tensor([9]),
    }
    start, end = torch.tensor([[0.0, 2.0, 1.0, 5.0]]), torch.tensor([[0.0, 1.0, 2.0, 5.0]])
    output = SimpleNamespace(start_logits=start, end_logits=end)
    assert QuestionAnswering().predictions(output, fields) == [([1, -100], [1, 2])]
