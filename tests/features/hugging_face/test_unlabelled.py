"""Records without labels, as `train predict` reads them: each has its line, none is left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lib.hf_toys import TEMPLATE, TEXTS, save_tokenizer, write_lines
from trainer.core.errors import ConfigError, DataError
from trainer.core.rows import RunFacts
from trainer.features.hugging_face.data_set import HuggingFaceData

BAD = {"text": " "}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=TEMPLATE)


def opened(path: Path, tokenizer: Any, task: Any, **more: Any) -> HuggingFaceData:
    return HuggingFaceData(str(path), tokenizer, task, learns=False, **more)


CASES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "label": ("sequence_classification", {"text": "the sums", "label": "?"}, {"input_ids"}),
    "tags": ("token_classification", {"tokens": "the sums"}, {"input_ids", "labels"}),
    "span": (
        *("question_answering", {"question": "what?", "context": "the sums"}),
        {"input_ids", "first_character", "end_character"},
    ),
    "choices": (
        *("multiple_choice", {"question": "what?", "choices": ["sums", "rank"]}),
        {"input_ids", "attention_mask"},
    ),
    "source and target": ("seq2seq_lm", {"document": "the sums"}, {"input_ids"}),
    "pair": ("embedding", {"query": "the sums"}, {"input_ids", "attention_mask"}),
    "prompt and completion": ("causal_lm", {"prompt": "the sums"}, {"input_ids"}),
    "instruction": ("causal_lm", {"instruction": "the sums"}, {"input_ids"}),
    "chat": (
        *("causal_lm", {"messages": [{"role": "user", "content": "the sums"}]}),
        {"input_ids"},
    ),
    "text": ("causal_lm", {"text": "the sums"}, {"input_ids", "labels"}),
}


@pytest.mark.parametrize("form", CASES)
def test_a_record_of_each_format_needs_no_label(form, tokenizer, tmp_path):
    task, record, fields = CASES[form]
    file = tmp_path / "new.jsonl"
    file.write_text(f"{json.dumps(record)}\n\nnot JSON\n")
    data = opened(file, tokenizer, task)
    assert data.facts().record_format["name"] == form
    assert {*data[0]} == fields
    first, second = data.predicted_records()
    assert (first.number, first.place, [*first.samples]) == (0, "new.jsonl:1", [0])
    assert (second.number, second.place) == (1, "new.jsonl:3")
    assert second.why_none.startswith("not JSON")
    kind = data.describe(RunFacts(total_steps=0, world_size=1, noun="token"))[0].text
    assert kind.startswith(("text", "word", "question", "prompt", "instruction", "chat"))
    assert (first.classes, first.text) == (record.get("choices"), record.get("context"))


def test_what_is_asked_ends_where_the_answer_begins(tokenizer, tmp_path):
    turns = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "sums"}]
    records = [{"messages": turns[:1]}, {"messages": turns}]
    data = opened(write_lines(tmp_path / "chat.jsonl", records), tokenizer, "causal_lm")
    first, second = (tokenizer.decode(data[i]["input_ids"]) for i in range(2))
    assert first == second == "<user>the</s><assistant>"
    tags = write_lines(tmp_path / "tags.jsonl", [{"tokens": ["the", "sumsrank"]}])
    labels = opened(tags, tokenizer, "token_classification")[0]["labels"].tolist()
    assert labels.count(0) == 2, "one for each word"
    span = write_lines(tmp_path / "span.jsonl", [{"question": "a", "context": "the sums"}])
    sample = opened(span, tokenizer, "question_answering")[0]
    parts = zip(sample["first_character"].tolist(), sample["end_character"].tolist(), strict=True)
    assert "".join("the sums"[a:b] for a, b in parts if a >= 0) == "the sums"


def test_columns_are_those_of_the_run_and_what_is_in_their_place_is_asked_for(tokenizer, tmp_path):
    trained = {"name": "label", "columns": {"text": "sentence", "label": "label"}}
    other = {"text": "no", "sentence": "the sums", "question": "x", "weight": 2}
    file = write_lines(tmp_path / "new.jsonl", [other])
    asked = {"task": "sequence_classification", "trained_format": trained}
    data = opened(file, tokenizer, **asked)
    assert data.facts().record_format["columns"] == {"text": "sentence"}
    file = write_lines(tmp_path / "new.jsonl", [{"sentences": "the sums", "id": 1}])
    hint = r"sentence', and there are sentences, id\. Did you mean sentences\? Type 'data\.columns"
    with pytest.raises(DataError, match=hint):
        opened(file, tokenizer, **asked)
    # The run named its label; a file without it lacks nothing.
    typed = {"text": "sentences", "label": "stars", "gone": None}
    assert len(opened(file, tokenizer, columns=typed, **asked)) == 1


def test_a_record_that_is_no_sample_says_why_and_a_long_text_has_several(tokenizer, tmp_path):
    records = [{"text": " ".join(TEXTS[:4])}, BAD, {"text": TEXTS[5]}]
    data = opened(write_lines(tmp_path / "a.jsonl", records), tokenizer, "causal_lm", max_length=8)
    first, second, third = data.predicted_records()
    assert (len(first.samples) > 1, second.why_none) == (True, "without text")
    assert [*first.samples, *third.samples] == [*range(len(data))]
    long = write_lines(tmp_path / "b.jsonl", records)
    data = opened(long, tokenizer, "causal_lm", max_length=20, overlong="drop")
    assert next(data.predicted_records()).why_none == "longer than data.max_length"


def test_a_bad_row_of_a_table_is_a_record_with_its_reason(tokenizer, tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(b"text,date\nonly\nthe,1\nsums,2,3\nr\xe9d,4\n")
    data = opened(file, tokenizer, "sequence_classification")
    reasons = [record.why_none for record in data.predicted_records()]
    assert reasons == [
        "1 cell, and 2 names of columns",
        None,
        "3 cells, and 2 names of columns",
        "not UTF-8 (byte 0xe9); save the file as UTF-8 (iconv -f latin1 -t utf-8)",
    ]
    assert [record.place for record in data.predicted_records()][3] == "a.csv:5"
    told = data.describe(RunFacts(total_steps=0, world_size=1, noun="token"))
    assert [row.text for row in told if row.text] == ["texts to label (text)", "not read: date"]


def test_a_word_that_is_none_is_named(tokenizer, tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [{"tokens": ["the"]}, {"tokens": ["the", 3]}])
    _, bad = opened(file, tokenizer, "token_classification").predicted_records()
    assert bad.why_none == "a word is of type int, not a string"


def test_files_named_for_parts_are_all_predicted(tokenizer, tmp_path):
    for name in ("train", "test", "gen_test"):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": name}])
    data = opened(tmp_path, tokenizer, "causal_lm")
    places = [record.place for record in data.predicted_records()]
    assert places == ["gen_test.jsonl:1", "test.jsonl:1", "train.jsonl:1"]


def test_a_tokenizer_of_other_words_than_the_run_s_is_refused(tokenizer, tmp_path):
    file = write_lines(tmp_path / "new.jsonl", [{"text": "the sums"}])
    trained = opened(file, tokenizer, "causal_lm").facts().record_format
    assert len(opened(file, tokenizer, "causal_lm", trained_format=trained)) == 1
    other = save_tokenizer(tmp_path / "other")
    other.add_tokens(["zyzzyva"])
    with pytest.raises(ConfigError, match="tokenizer: has other words than the run was trained"):
        opened(file, other, "causal_lm", trained_format=trained)
