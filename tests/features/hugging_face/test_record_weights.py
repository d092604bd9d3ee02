"""How often a record counts, and an answer of a conversation: read as it is written."""

import pytest
import torch

from tests.lib.chats import CHATML, FIRST, GENERATION, LAST, THOUGHTS, USER, opened
from trainer.core.errors import DataError
from trainer.objectives.next_token import NextToken


@pytest.mark.parametrize(
    ("task", "record"),
    [
        ("sequence_classification", {"text": "a b", "label": "x"}),
        ("token_classification", {"tokens": ["a", "b"], "tags": ["x", "y"]}),
        ("seq2seq_lm", {"source": "a", "target": "b c"}),
        ("multiple_choice", {"question": "a", "choices": ["b", "c"], "answer": 0}),
        (
            "question_answering",
            {"question": "a", "context": "b c", "answers": {"text": ["b"], "answer_start": [0]}},
        ),
    ],
)
def test_a_record_counts_once_where_it_does_not_say_it(tmp_path, task, record):
    records = [{**record, "weight": 0.5}, record, {**record, "weight": "2e0"}]
    data = opened(tmp_path, records, task=task)
    weights = [data[i]["weight"] for i in range(3)]
    assert [float(each) for each in weights] == [0.5, 1.0, 2.0]
    assert {each.dtype for each in weights} == {torch.float32}
    renamed = [{**record, "mass": 0.5}, record]
    of_mass = opened(tmp_path, renamed, task=task, columns={"weight": "mass"})
    assert float(of_mass[0]["weight"]) == 0.5
    left_out = opened(tmp_path, renamed, task=task)
    assert "weight" not in left_out[0]


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm"])
def test_all_tokens_of_a_document_count_as_it_says_also_where_it_is_divided(tmp_path, task):
    text = "so it is because it is so " * 3
    records = [{"text": text, "weight": 0.5}, {"text": "why?", "weight": 3}]
    data = opened(tmp_path, records, task=task, max_length=6, overlong="chunk")
    plain = opened(tmp_path, [{"text": each["text"]} for each in records], task=task, max_length=6)
    assert len(data) == len(plain) > 3
    for i in range(len(data)):
        assert data[i]["input_ids"].equal(plain[i]["input_ids"])
        expected = 3.0 if i == len(data) - 1 else 0.5
        assert data[i]["weight"].tolist() == [expected] * len(data[i]["input_ids"])


@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_an_answer_counts_as_often_as_it_and_its_record_say(tmp_path, template):
    talk = [USER, {**FIRST, "weight": 0.5}, USER, LAST, USER, {**LAST, "weight": 0}]
    data = opened(tmp_path, [{"messages": talk, "weight": 3}], template)
    sample = data[0]
    learned = sample["labels"] != -100
    assert {*sample["weight"][learned].tolist()} == {1.5, 3.0}
    first = opened(tmp_path, [{"messages": talk[:2]}], template)[0]
    both = opened(tmp_path, [{"messages": [USER, FIRST, USER, LAST]}], template)[0]
    count = int((first["labels"] != -100).sum())
    assert int((sample["weight"][learned] == 1.5).sum()) == count
    assert int(learned.sum()) == int((both["labels"] != -100).sum())
    fields = {name: field[None] for name, field in sample.items()}
    expected = 1.5 * count + 3.0 * (int(learned.sum()) - count)
    assert NextToken().weights(fields)["cross_entropy"] == expected
    # Weights of 0 and 1 need no field: such an answer has no labels.
    assert "weight" not in opened(tmp_path, [{"messages": [*talk[2:]]}], template)[0]


def test_an_answer_has_its_own_weight_where_each_is_a_sample(tmp_path):
    """As under a template that writes earlier turns otherwise; or where the last alone is one."""
    talk = [USER, {**FIRST, "weight": 0.5}, USER, {**LAST, "weight": 2}]
    record = {"messages": talk, "weight": 3}
    for answers, expected in (("all", [1.5, 6.0]), ("flagged", [1.5, 6.0]), ("last", [6.0])):
        data = opened(tmp_path, [record], THOUGHTS, answers=answers)
        found = [{*s["weight"][s["labels"] != -100].tolist()} for s in data]
        assert found == [{weight} for weight in expected]


@pytest.mark.parametrize("weight", [-1, "much", "", "nan", [1], "1_0"])
def test_a_weight_that_is_no_number_is_named_with_its_record(tmp_path, weight):
    records = [{"text": "a", "label": 0}, {"text": "a", "label": 1, "weight": weight}]
    with pytest.raises(DataError, match=r"records.jsonl:2: its weight is .*; write a number of 0"):
        opened(tmp_path, records, task="sequence_classification")
