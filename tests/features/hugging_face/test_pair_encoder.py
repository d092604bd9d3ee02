"""Hard negatives of pairs are rows, labels of pairs make triplets, scores have a scale."""

from pathlib import Path
from typing import Any

import pytest

from tests.lib.hf_toys import write_lines
from trainer.core.errors import DataError
from trainer.features.hugging_face.data_set import HuggingFaceData
from trainer.features.hugging_face.preference_encoder import prompt_of
from trainer.features.hugging_face.tokenizers import byte_tokenizer

pytestmark = pytest.mark.usefixtures("cache")


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
    rows = [("a", text, label) for text, label in zip("bcdefg", (0, 1, 2, 0, 0, 2), strict=True)]
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


def test_a_label_may_have_names_of_its_own_and_what_annotators_said_is_not_asked(tmp_path):
    texts_of = {"sentence1": "a", "sentence2": "b"}
    words = ("entailment", "contradiction", "-")
    named = [{**texts_of, "gold_label": word, "annotator_labels": [word]} for word in words]
    assert texts(opened(tmp_path, named)) == [["a", "b", "b"]]
    bits = [{**texts_of, "is_duplicate": bit} for bit in "01"]
    assert texts(opened(tmp_path, bits)) == [["a", "b", "b"]]
    without = opened(tmp_path, bits, columns={"is_duplicate": None})
    assert texts(without) == [["a", "b"]] * 2


def test_pairs_of_one_first_text_are_on_one_side(tmp_path):
    records = [{"anchor": f"a{i % 40}", "positive": f"p{i}"} for i in range(200)]
    sides = [
        {row[0] for row in texts(side)}
        for side in opened(tmp_path, records, holdout=0.3).splits().values()
    ]
    assert len(sides[1]) > 5
    assert not sides[0] & sides[1]


def test_answers_to_one_prompt_are_on_one_side(tmp_path):
    answers = [{"prompt": "why", "chosen": f" a{i}", "rejected": f" b{i}"} for i in range(60)]
    file = write_lines(tmp_path / "answers.jsonl", answers)
    data = HuggingFaceData(str(file), byte_tokenizer(), "causal_lm", holdout=0.3)
    assert [*map(len, data.splits().values())] == [60, 0]
    asked = [{"role": "user", "content": "why"}]
    sides = {k: [*asked, {"role": "assistant", "content": k}] for k in ("chosen", "rejected")}
    assert prompt_of(sides) == asked
    # The first words of two texts are no prompt.
    assert prompt_of({"chosen": "the a", "rejected": "the b"}) is None


def test_other_data_have_the_scale_and_the_meaning_of_those_that_are_trained_on(tmp_path):
    def rule(records: list[Any], trained: Any = None) -> HuggingFaceData:
        return opened(tmp_path, records, trained_format=trained and trained.facts().record_format)

    pair = {"text1": "a", "text2": "b"}
    scored = rule([{**pair, "score": 5}])
    assert float(rule([{**pair, "score": 1}], scored)[0]["score"]) == pytest.approx(0.2)
    small = rule([{**pair, "score": 1}])
    with pytest.raises(
        DataError, match="up to 5; divide them, so that texts of one meaning have 1"
    ):
        rule([{**pair, "score": 5}], small)
    some = [{**pair, "label": 0}, {**pair, "text2": "c", "label": 1}]
    numbered = rule([*some, {**pair, "label": 2}])
    assert texts(rule(some)) == [["a", "c", "b"]]
    assert texts(rule(some, numbered)) == [["a", "b"]]
    with pytest.raises(DataError, match="labels 0, 1, 2, and pairs take 1, 0, -1"):
        rule([*some, {**pair, "label": 2}], rule(some))
    # Words say the same everywhere.
    word = {**pair, "label": "entailment"}
    assert texts(rule([word], rule(some))) == [["a", "b"]]
