"""What objectives predict of samples without labels."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.features.contrastive.contrastive import Contrastive
from trainer.features.heads.numbers import Numbers
from trainer.features.heads.question_answering import QuestionAnswering
from trainer.features.heads.seq2seq import Seq2Seq
from trainer.models.bind import bind
from trainer.objectives.classify import Classify
from trainer.objectives.next_token import NextToken
from trainer.objectives.text_output import TextOutput

TEXT = TextOutput(decode=lambda ids: "".join("abcdefgh"[i] for i in ids), ends={7}, most=4)
IDS = torch.tensor([[1, 2, 3]])


def giving(output: Any) -> Any:
    return lambda _: output


def test_a_class_comes_with_all_chances_and_one_for_each_token_with_its_own():
    logits = torch.tensor([[0.0, 2.0]])
    (line,) = Classify().predict(giving(logits), {"x": torch.zeros(1)}, TEXT)
    chances = logits[0].softmax(0).tolist()
    assert line == {"prediction": 1, "probability": chances[1], "probabilities": chances}
    each = Classify(class_axis=-1)
    tokens = torch.tensor([[[3.0, 0], [0, 3], [0, 3]]])
    wanted = {"input_ids": IDS, "labels": torch.tensor([[-100, 0, -100]])}
    (line,) = each.predict(giving(tokens), wanted, TEXT)
    assert (line["prediction"], len(line["probability"])) == ([1], 1)
    real = {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 0]])}
    assert each.predict(giving(tokens), real, TEXT)[0]["prediction"] == [0, 1]


def test_one_number_stands_alone_and_of_several_labels_the_likely_ones_are_named():
    fields = {"x": torch.zeros(1)}
    assert Numbers().predict(giving(torch.tensor([[1.5]])), fields, TEXT) == [{"prediction": 1.5}]
    flags = Numbers(loss="binary_cross_entropy")
    (line,) = flags.predict(giving(torch.tensor([[2.0, -2.0, 1.0]])), fields, TEXT)
    assert line["prediction"] == [0, 2]
    assert line["probabilities"][1] == pytest.approx(1 / (1 + torch.tensor(2.0).exp().item()))


def test_an_answer_ends_behind_its_beginning_within_the_context():
    ends = SimpleNamespace(
        start_logits=torch.tensor([[0.0, 9.0, 1.0, 4.0]]),
        end_logits=torch.tensor([[0.0, 9.0, 5.0, 3.0]]),
    )
    fields = {
        "input_ids": torch.tensor([[0, 1, 2, 3]]),
        "first_character": torch.tensor([[-1, -1, 0, 5]]),
        "end_character": torch.tensor([[-1, -1, 4, 9]]),
    }
    (line,) = QuestionAnswering().predict(giving(ends), fields, TEXT)
    # Token 1 is of the question; the answer from 3 to 2 would be likelier.
    assert (line["prediction"], line["start"], line["end"]) == ("d", 5, 9)
    ends.start_logits[0, 0] = ends.end_logits[0, 0] = 9.0
    (line,) = QuestionAnswering().predict(giving(ends), fields, TEXT)
    assert (line["prediction"], "start" in line) == ("", False)


class Next(nn.Module):
    """Follows each token by the one behind it."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return nn.functional.one_hot((input_ids + 1) % 8, 8).double()


def test_a_prompt_is_continued_to_its_end_and_a_text_has_a_loss():
    objective, prompts = NextToken(), {"input_ids": torch.tensor([[2, 3], [4, 5]])}
    found = objective.predict(bind(Next()), prompts, TEXT)
    assert [line["prediction"] for line in found] == ["efg", "g"]
    short = TextOutput(decode=TEXT.decode, ends={7}, limit=3)
    found = objective.predict(bind(Next()), prompts, short)
    assert [line["prediction"] for line in found] == ["e", "g"]
    assert not objective.predict(bind(Next()), {**prompts, "labels": prompts["input_ids"]}, TEXT)


class Answering(nn.Module):
    """Follows the first token of the first sequence, which it encodes once."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(decoder_start_token_id=0, pad_token_id=0)
        self.encoded = 0

    def forward(
        self, input_ids: Tensor, decoder_input_ids: Tensor, encoder_outputs: Any = None
    ) -> Any:
        hidden = encoder_outputs[0] if encoder_outputs else input_ids[:, :1]
        self.encoded += encoder_outputs is None
        places = torch.arange(decoder_input_ids.shape[1])
        logits = nn.functional.one_hot((hidden + places) % 8, 8).double()
        return SimpleNamespace(logits=logits, encoder_last_hidden_state=hidden)


def test_a_second_sequence_is_written_from_the_first():
    model = Answering()
    fields = {"input_ids": torch.tensor([[4, 1], [6, 1]])}
    found = Seq2Seq().predict(bind(model), fields, TEXT)
    assert [line["prediction"] for line in found] == ["efg", "g"]
    assert model.encoded == 1


def test_an_embedding_has_the_length_1_and_two_sides_are_named():
    one = {"query": torch.tensor([[3.0, 4.0]])}
    (line,) = Contrastive().predict(giving(one), {"x": torch.zeros(1)}, TEXT)
    assert line["prediction"] == pytest.approx([0.6, 0.8])
    both = {**one, "document": torch.tensor([[0.0, 2.0]])}
    (line,) = Contrastive().predict(giving(both), {"x": torch.zeros(1)}, TEXT)
    assert line["prediction"]["document"] == [0.0, 1.0]
