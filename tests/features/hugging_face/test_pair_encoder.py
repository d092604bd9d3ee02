"""Hard negatives of pairs are rows, labels of pairs make triplets, scores have a scale."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lib.hf_toys import write_lines
from trainer.core.errors import DataError
from trainer.features.hugging_face.data_set import HuggingFaceData
from trainer.features.hugging_face.tokenizers import byte_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAIN_CACHE", str(tmp_path / "cache"))


def opened(folder: Path, records: list[Any], **more: Any) -> HuggingFaceData:
    file = write_lines(folder / "pairs.jsonl", records)
    return HuggingFaceData(str(file), byte_tokenizer(), "embedding", **{"holdout": 0.0, **more})


def texts(data: HuggingFaceData) -> list[list[str]]:
    """Give the texts of each sample, a row each."""
    found = []
    for sample in (data[i] for i in range(len(data))):
        rows = zip(sample["input_ids"], sample["attention_mask"], strict=True)
        found.append([data.decode_answer(ids[mask.bool()].tolist()) for ids, mask in rows])
    return found


def shown(data: HuggingFaceData) -> str:
    return data.facts().describe_records(None)[0].text


def test_negatives_are_rows_and_the_positive_stands_where_there_is_none(tmp_path):
    pair = {"query": "q", "positive": "p"}
    records = [{**pair, "negative_1": "n", "negative_2": "m"}, {**pair, "negative_2": "m"}, pair]
    data = opened(tmp_path, records)
    assert texts(data) == [["q", "p", "n", "m"], ["q", "p", "m", "p"], ["q", "p", "p", "p"]]
    assert "negative_1, negative_2), 0 to 2 hard negatives each" in shown(data)
    listed = opened(tmp_path, [{**pair, "hard": ["n", "m"]}], columns={"negative": "hard"})
    assert texts(listed) == [["q", "p", "n", "m"]]
    without = opened(tmp_path, records[:1], columns={"negative_2": None})
    assert texts(without) == [["q", "p", "n"]]


def test_labels_make_triplets_of_which_no_first_text_is_on_both_sides(tmp_path):
    rows = [
        ("a", "b", 0),
        ("a", "c", 1),
        ("a", "d", 2),
        ("a", "e", 0),
        ("a", "f", 0),
        ("a", "g", 2),
    ]
    rows += [("h", "i", 0), ("h", "j", -1), ("k", "l", 2)]
    records = [dict(zip(("premise", "hypothesis", "label"), row, strict=True)) for row in rows]
    data = opened(tmp_path, records)
    triplets = [["a", "b", "d"], ["a", "e", "g"], ["a", "f", "d"], ["h", "i", "i"]]
    assert texts(data) == triplets
    assert "3 with a hard negative and 1 without, of 9 records" in shown(data)
    assert "-1 not used, 0 positive, 1 not used, 2 hard negative" in shown(data)
    assert data.name_of(1).endswith("pairs.jsonl:4")
    words = ("entailment", "neutral", "contradiction", "-")
    assert texts(opened(tmp_path, [{**r, "label": words[r["label"]]} for r in records])) == triplets
    many = [{**each, "premise": f"{each['premise']} {i}"} for i in range(40) for each in records]
    data = opened(tmp_path, many, holdout=0.3)
    sides = [{row[0] for row in texts(side)} for side in data.splits().values()]
    assert len(sides[1]) > 5
    assert not sides[0] & sides[1]


def test_scores_are_divided_by_a_usual_scale_and_ids_are_numbers(tmp_path):
    pair = {"sentence1": "a", "sentence2": "b"}
    data = opened(tmp_path, [{**pair, "score": 4.0, "id": "x"}, {**pair, "score": "5", "id": "x"}])
    assert [float(data[i]["score"]) for i in (0, 1)] == pytest.approx([0.8, 1.0])
    assert data[0]["id"] == data[1]["id"]
    assert "scores of 0 to 5 divided by 5" in shown(data)
    labels = [{**pair, "label": 0.5}]
    assert float(opened(tmp_path, labels, columns={"score": "label"})[0]["score"]) == 0.5


PAIR = {"sentence1": "a", "sentence2": "b"}


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"label": 0.5}, r"labels 0\.5, and pairs take .* type 'data.columns={score: label}'"),
        ({"label": "0"}, r"column 'label' has no positive \(0 hard negative\)"),
        ({"label": None}, r"column 'label' has no positive \(no label\)"),
        ({"score": True}, "jsonl:1: its score is True, which is no number"),
        ({"score": -500}, "column 'score' has scores up to 500; divide them"),
        (
            {"score": 1, "label": 1},
            "'score' and 'label' each say what a pair is; leave all but one",
        ),
        ({"negative": 7}, "jsonl:1: its negative is of type int, not a string"),
    ],
)
def test_what_pairs_say_is_refused_where_it_has_no_meaning(more, fault, tmp_path):
    with pytest.raises(DataError, match=fault):
        opened(tmp_path, [json.loads(json.dumps({**PAIR, **more}))])
