"""`data=hf`: what records of each format become, and what is refused in one line."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.lib.hf_toys import write_lines
from trainer.core.errors import ConfigError, DataError
from trainer.core.rows import RunFacts
from trainer.features.hugging_face.data_set import HuggingFaceData
from trainer.features.hugging_face.records import find_records
from trainer.features.hugging_face.tokenizers import byte_tokenizer

LETTERS = "abcdefgh"
BEGIN, END = 2, 3
FIRST = {letter: 5 + i for i, letter in enumerate(LETTERS)}
"""Ids of the letters at the beginning of a word; within one they are 8 more."""


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def words() -> Any:
    """BERT's tokenizer: words of the letters a to h, one token each."""
    from transformers import BertTokenizer  # noqa: PLC0415 - seconds

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    return BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)})


def opened(folder: Path, records: list[Any], tokenizer: Any, task: Any = None, **more: Any) -> Any:
    """Open records that are written as JSON lines, all on the side that is trained on."""
    file = write_lines(folder / "records.jsonl", records)
    return HuggingFaceData(str(file), tokenizer, task, **{"holdout": 0.0, **more})


def listed(data: Any) -> list[dict[str, Any]]:
    """Give the samples as numbers."""
    return [{name: field.tolist() for name, field in data[i].items()} for i in range(len(data))]


def shown(data: Any) -> str:
    short, rest = data.facts().describe_records(None)
    return f"{short.text} | {rest.text}"


def texts_of(data: Any) -> list[str]:
    """Give the texts whose bytes are the samples, without begin and end."""
    return [bytes(sample["input_ids"][1:-1]).decode() for sample in listed(data)]


TEXTS = [{"text": "abcdefg"}, {"text": " "}, {"text": "x"}, {"text": "abcdefg"}]


def test_text_is_a_document_between_begin_and_end_and_long_ones_are_chunked(tmp_path):
    data = opened(tmp_path, TEXTS, byte_tokenizer(), max_length=5)
    first = [256, *b"abcdefg", 257]
    chunks = [first[:5], first[4:9], [256, *b"x", 257]]
    assert [s["input_ids"] for s in listed(data)] == [*chunks, *chunks[:2]]
    assert data.facts().lengths.tolist() == [5, 5, 3, 5, 5]
    assert data.facts().num_cut == 0
    assert "1 without text left out" in shown(data)
    cut = opened(tmp_path, TEXTS, byte_tokenizer(), max_length=5, overlong="cut")
    assert (len(cut), cut.facts().num_cut) == (3, 8)
    dropped = opened(tmp_path, TEXTS, byte_tokenizer(), max_length=5, overlong="drop")
    assert [s["input_ids"] for s in listed(dropped)] == [chunks[2]]


def test_text_of_a_masked_model_has_special_tokens_around_every_sample(tmp_path, words):
    data = opened(tmp_path, [{"text": "a b c d e"}], words, "masked_lm", max_length=4)
    inner = [[FIRST["a"], FIRST["b"]], [FIRST["c"], FIRST["d"]], [FIRST["e"]]]
    assert [s["input_ids"] for s in listed(data)] == [[BEGIN, *ids, END] for ids in inner]
    assert data.facts().num_cut == 0


def test_a_text_with_its_own_begin_has_no_second_one(tmp_path):
    tokenizer = byte_tokenizer()
    data = opened(tmp_path, [{"text": f"{tokenizer.bos_token}ab"}], tokenizer)
    assert listed(data)[0]["input_ids"] == [256, *b"ab", 257]


def test_it_is_tokenised_once_and_again_where_the_contents_change(tmp_path, cache, monkeypatch):
    records = [{"text": f"text {i}"} for i in range(20)]
    first = opened(tmp_path, records, byte_tokenizer())
    with monkeypatch.context() as patch:
        patch.setattr("trainer.features.hugging_face.records.RecordSource.load", None)
        again = opened(tmp_path, records, byte_tokenizer())
    assert again.facts().fingerprint() == first.facts().fingerprint()
    assert listed(again) == listed(first)
    changed = opened(tmp_path, [*records[:-1], {"text": "text x"}], byte_tokenizer())
    assert changed.facts().fingerprint() != first.facts().fingerprint()
    assert [each.name for each in cache.iterdir() if not each.name.startswith("hf-")] == []


def test_names_on_the_hub_may_have_a_dot():
    assert find_records("someone/Hermes-2.5").kind == "hub"
    with pytest.raises(DataError, match="no such file"):
        find_records("someone/gone.jsonl.gz")


def test_copies_and_chunks_stay_on_one_side(tmp_path):
    records = [{"text": f"{i % 20:02d} is the document"} for i in range(60)]
    sides = opened(tmp_path, records, byte_tokenizer(), max_length=9, holdout=0.2).splits()
    texts = [
        {tuple(s["input_ids"]) for s in listed(side) if s["input_ids"][0] == 256}
        for side in sides.values()
    ]
    assert not texts[0] & texts[1]


def test_all_kinds_of_files_give_the_same_and_nothing_is_written_beside_them(tmp_path):
    import datasets  # noqa: PLC0415 - seconds, of every process that collects tests

    folder, records = tmp_path / "files", [{"text": text} for text in ("ab", "cd", "ef")]
    (folder / "texts").mkdir(parents=True)
    data = datasets.Dataset.from_list(records)
    data.to_csv(folder / "a.csv", index=False)
    data.to_parquet(folder / "a.parquet")
    data.save_to_disk(folder / "saved")
    (folder / "a.json").write_text(json.dumps(records, indent=1))
    (folder / "a.txt").write_text("ab\n\ncd\n\nef\n")
    write_lines(folder / "a.jsonl", records)
    for record in records:
        (folder / f"texts/{record['text']}.txt").write_text(record["text"])
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    for name in ("a.csv", "a.parquet", "saved", "a.json", "a.txt", "a.jsonl", "texts"):
        data = HuggingFaceData(str(folder / name), byte_tokenizer(), holdout=0.0)
        assert [text.strip() for text in texts_of(data)] == ["ab", "cd", "ef"], name
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before


def test_parts_are_known_by_the_names_of_files(tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    write_lines(folder / "train-1.jsonl", [{"text": "a"}, {"text": "b"}])
    write_lines(folder / "validation.jsonl", [{"text": "c"}])
    sides = HuggingFaceData(str(folder), byte_tokenizer()).splits()
    assert [len(side) for side in sides.values()] == [2, 1]
    assert sides["train"].facts().split_rule == "parts train and validation of the data"
    typed = HuggingFaceData(str(folder), byte_tokenizer(), holdout=0.4)
    words = "is not used where the data have train and validation"
    assert typed.facts().unused == {"holdout": words}
    chosen = HuggingFaceData(str(folder), byte_tokenizer(), part="validation", holdout=0)
    assert texts_of(chosen) == ["c"]
    few = HuggingFaceData(str(folder / "train-1.jsonl"), byte_tokenizer(), max_samples=1)
    assert len(few) == 1


def saved_parts(folder: Path, *names: str) -> str:
    """Save parts of one record each, their name."""
    import datasets  # noqa: PLC0415 - as above

    parts = {name: datasets.Dataset.from_dict({"text": [name]}) for name in names}
    datasets.DatasetDict(parts).save_to_disk(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("names", "part", "taken"),
    [
        ("train validation test", None, "train validation"),
        ("test_gen train_gen train_sft test_sft", "train_sft", "train_sft test_sft"),
        ("auxiliary_train dev", "auxiliary_train", "auxiliary_train dev"),
        ("auxiliary_train", None, "auxiliary_train"),
        # Of two that may be meant none is.
        ("train test_gen test_sft", None, "train"),
    ],
)
def test_the_part_that_is_trained_on_is_typed_and_its_partner_is_held_out(
    tmp_path, names, part, taken
):
    place = saved_parts(tmp_path / "saved", *names.split())
    data = HuggingFaceData(place, byte_tokenizer(), part=part, holdout=0.01)
    sides = [s for s in data.splits().values() if len(s)]
    assert [text for side in sides for text in texts_of(side)] == taken.split()
    rest = [name for name in names.split() if name not in taken.split()]
    assert (f"other parts: {', '.join(rest)}" in shown(data)) == bool(rest)
    # A held-out set is the part that was typed, alone.
    alone = HuggingFaceData(place, byte_tokenizer(), part=names.split()[-1], holdout=0)
    assert texts_of(alone) == names.split()[-1:]


def test_many_records_are_encoded_in_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.features.hugging_face.encode.MANY_RECORDS", 50)
    records, environment = [{"text": f"text {i}"} for i in range(200)], os.environ
    data = opened(tmp_path, records, byte_tokenizer())
    assert os.environ is environment
    assert texts_of(data) == [record["text"] for record in records]
    with pytest.raises(DataError, match=r"records.jsonl:151: the text is of type int"):
        opened(tmp_path, [*records[:150], {"text": 3}, *records[:99]], byte_tokenizer())


CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def turn(asked: str, answer: str) -> dict[str, Any]:
    turns = ("user", asked), ("assistant", answer)
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def learned(sample: dict[str, Any]) -> str:
    """Give the text of the loss terms."""
    return bytes(each for each in sample["labels"] if 0 <= each < 256).decode()


def test_only_answers_are_learned_and_long_conversations_are_dropped(tmp_path):
    tokenizer, records = byte_tokenizer(), [turn("ab", "cd"), turn("ab", "c" * 100)]
    how = {"chat_template": CHAT, "max_length": 40}
    data = opened(tmp_path, records, tokenizer, **how)
    (sample,) = listed(data)
    assert bytes(sample["input_ids"]).decode() == "<user>ab;<assistant>cd;"
    assert learned(sample) == "cd;"
    assert "1 longer than data.max_length left out" in shown(data)
    left = opened(tmp_path, records, tokenizer, truncation="left", overlong="cut", **how)
    assert learned(listed(left)[1]) == "c" * 39 + ";"
    long = [turn("ab", "cd"), turn("a" * 100, "cd")]
    assert len(opened(tmp_path, long, tokenizer, overlong="cut", **how)) == 1  # no answer is left
    whole = opened(tmp_path, records, tokenizer, assistant_only_loss=False, **how)
    assert learned(listed(whole)[0]) == "<user>ab;<assistant>cd;"
    user, answer = turn("a", "b")["messages"]
    for record, expected in (
        ({"prompt": "a", "completion": "b"}, "b"),
        ({"prompt": [user], "completion": [answer]}, "b;"),
        ({"instruction": "a", "input": "x", "output": "b"}, "b;"),
    ):
        (sample,) = listed(opened(tmp_path, [record], tokenizer, **how))
        assert learned(sample) == expected
    assert bytes(sample["input_ids"]).decode() == "<user>a\n\nx;<assistant>b;"


def ids_of(text: str) -> list[int]:
    return [BEGIN, *(FIRST[letter] for letter in text), END]


def test_labels_are_numbers_words_or_real(tmp_path, words):
    import datasets  # noqa: PLC0415 - as above

    task = "sequence_classification"
    named = [{"text": "a b", "label": "yes"}, {"text": "c", "label": "no"}]
    data = opened(tmp_path, named, words, task)
    assert [s["input_ids"] for s in listed(data)] == [ids_of("ab"), ids_of("c")]
    assert labels_of(data) == [1, 0]
    assert (data.facts().num_classes, data.facts().label_names) == (2, ["no", "yes"])
    assert labels_of(opened(tmp_path, named, words, task, model_labels=("yes", "no"))) == [0, 1]
    with pytest.raises(DataError, match="the label 'no' is not one of yes"):
        opened(tmp_path, named, words, task, label_names=["yes"])
    pairs = [{"premise": "a", "hypothesis": "b", "label": 2}]
    data = opened(tmp_path, pairs, words, task)
    ids, types = [*ids_of("a"), FIRST["b"], END], [0, 0, 0, 1, 1]
    assert listed(data) == [{"input_ids": ids, "token_type_ids": types, "labels": 0}]
    assert (data.facts().num_classes, data.facts().label_names) == (1, ["2"])
    shown = data.describe(RunFacts(total_steps=0, world_size=1, noun="token"))[-1].text
    assert shown == "0 2: 1, one class alone, so every loss is 0 and nothing is learned"
    real = [{"text": "a", "label": 0.5}, {"text": "b", "label": 1}]
    data = opened(tmp_path, real, words, task)
    assert (labels_of(data), data.facts().num_classes) == ([0.5, 1.0], 1)
    kinds = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["z", "y"])}
    rows, features = {"text": ["a", "b"], "label": [1, 0]}, datasets.Features(kinds)
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    data = HuggingFaceData(str(tmp_path / "saved"), words, task, holdout=0.0)
    assert (labels_of(data), data.facts().label_names) == ([1, 0], ["z", "y"])


def labels_of(data: Any) -> list[Any]:
    return [sample["labels"] for sample in listed(data)]


def test_tags_go_with_the_first_piece_of_a_word(tmp_path, words):
    records = [{"tokens": ["ab", "c"], "ner_tags": ["O", "X"]}]
    data = opened(tmp_path, records, words, "token_classification")
    assert labels_of(data) == [[-100, 0, -100, 1, -100]]
    assert data.facts().label_names == ["O", "X"]


def test_answers_are_found_in_the_tokens_of_their_context(tmp_path, words):
    asked = {"question": "a b", "context": "c d ef g"}
    records = [
        asked | {"answers": {"text": ["ef"], "answer_start": [4]}},
        asked | {"answers": {"text": [], "answer_start": []}},
        asked | {"answers": {"text": ["g"], "answer_start": [7]}},
    ]
    data = opened(tmp_path, records, words, "question_answering", max_length=9)
    spans = [(s["start_positions"], s["end_positions"]) for s in listed(data)]
    assert spans == [(6, 7), (0, 0)]
    assert "1 without their answer once they are cut" in shown(data)


def test_choices_are_rows_and_are_padded_together(tmp_path, words):
    records = [
        {"question": "a", "choices": ["b", "c d"], "answer": "c d"},
        {"question": "a b c", "choices": ["b", "c d"], "answer": "A"},
    ]
    data = opened(tmp_path, records, words, "multiple_choice")
    fields = data.facts().collate([data[0], data[1]])
    assert fields["input_ids"].shape == (2, 2, 8)
    assert fields["labels"].tolist() == [1, 0]
    assert fields["attention_mask"].sum((1, 2)).tolist() == [5 + 6, 7 + 8]


def test_texts_of_a_pair_are_rows_and_both_count_as_long_as_the_longer_one(tmp_path, words):
    records = [{"query": "a b c d", "document": "a"}, {"query": "a", "document": "b c"}]
    data = opened(tmp_path, records, words, "embedding")
    fields = data.facts().collate([data[0], data[1]])
    assert fields.keys() == {"input_ids", "attention_mask"}
    assert fields["attention_mask"].sum(2).tolist() == [[6, 3], [3, 4]]
    assert data.facts().lengths.tolist() == [12, 8]
    # What is computed for a micro-batch is what is planned: samples times the longest.
    assert fields["input_ids"].shape == (2, 2, 6)
    typed = opened(tmp_path, records, words, "embedding", columns={"anchor": "document"})
    pair = "pair (anchor: document, positive: document), 1 column not read"
    assert shown(typed) == f"{pair} | not read: query"


def test_an_encoder_decoder_learns_a_target(tmp_path, words):
    data = opened(tmp_path, [{"document": "a b c", "summary": "d"}], words, "seq2seq_lm")
    assert listed(data) == [{"input_ids": ids_of("abc"), "labels": ids_of("d")}]


def test_bad_files_and_labels_are_named(tmp_path, words):
    (tmp_path / "image.png").touch()
    with pytest.raises(DataError, match="no file ends with one of"):
        HuggingFaceData(str(tmp_path / "image.png"), words)
    for second, fault in ((None, "the label None"), (1, "labels are of the types int, str")):
        records = [{"text": "a", "label": "x"}, {"text": "b", "label": second}]
        with pytest.raises(DataError, match=fault):
            opened(tmp_path, records, words, "sequence_classification")
    with pytest.raises(ConfigError, match="no more than special tokens"):
        opened(tmp_path, TEXTS, words, "masked_lm", max_length=2)


def test_a_sample_is_named_by_the_line_of_its_record(tmp_path):
    records = [{"text": text} for text in ("a", "", "b", "c d " * 40, "e")]
    both = opened(tmp_path, records, byte_tokenizer(), max_length=60, holdout=0.4, overlong="chunk")
    sides = both.splits().values()
    named = [side.name_of(i).rpartition(":")[2] for side in sides for i in range(len(side))]
    assert sorted(named) == ["1", "3", "4", "4", "4", "5"]


def test_bad_records_are_skipped_counted_and_named(tmp_path):
    records = [{"text": "a"}] * 150 + [{"text": 3}]
    data = opened(tmp_path, records, byte_tokenizer(), on_bad="skip")
    assert (len(data), data.facts().num_skipped) == (150, 1)
    assert "records.jsonl:151: the text is of type int" in data.facts().skipped[0]
    with pytest.raises(DataError, match="3 of 152 records are bad"):
        opened(tmp_path, [*records[:149], *records[-1:] * 3], byte_tokenizer(), on_bad="skip")
    (tmp_path / "a.csv").write_bytes(b"text,id\n" + b"a,1\n" * 200 + b"only\nr\xe9d,2\nb,3\n")
    data = HuggingFaceData(str(tmp_path / "a.csv"), byte_tokenizer(), on_bad="skip", holdout=0.0)
    assert [each.rpartition(":")[0][-8:] for each in data.facts().skipped] == [
        ".csv:202",
        ".csv:203",
    ]
    assert (len(data), data.name_of(200)[-3:]) == (201, "204")


def test_a_sample_of_other_fields_than_the_first_is_a_bad_record(tmp_path, words):
    records = [CHOICES, {**CHOICES, "choices": ["b", "c", "d"]}]
    with pytest.raises(DataError, match=r"records.jsonl:2: .* another number of choices"):
        opened(tmp_path, records, words, "multiple_choice")


CHOICES = {"question": "a", "choices": ["b", "c"], "answer": 0}
ANSWERED = {"question": "a", "context": "b c", "answers": {"text": ["c"], "answer_start": [2]}}
ODD: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("sequence_classification", {"text": "a", "label": 0.5}, {"label": -100.0}, "means none here"),
    ("question_answering", ANSWERED, {"answers": {"text": "c", "answer_start": 2}}, "two lists"),
    ("multiple_choice", CHOICES, {"answer": None}, "the label None is none of its 2 choices"),
    ("multiple_choice", CHOICES, {"choices": None}, "its choices are of type NoneType"),
    ("embedding", {"anchor": "a", "positive": "b"}, {"positive": " "}, "its positive is empty"),
    ("causal_lm", {"text": "a"}, {"text": ["a"]}, "the text is of type list"),
    ("causal_lm", {"text": "a"}, {"text": "\ud800"}, "cannot be encoded"),
]


@pytest.mark.parametrize(("task", "sound", "odd", "fault"), ODD)
def test_whatever_a_record_holds_it_is_named_or_skipped(tmp_path, words, task, sound, odd, fault):
    records = [sound | odd, sound]
    with pytest.raises(DataError, match=r"records.jsonl:1: .*" + fault) as caught:
        opened(tmp_path, records, words, task, max_length=20)
    assert len(str(caught.value).splitlines()) == 1
    data = opened(tmp_path, records, words, task, max_length=20, on_bad="skip")
    assert (len(data), data.facts().num_skipped) == (1, 1)


class Letters:
    """A tokenizer of a user's own, of which nothing is saved."""

    eos_token_id = 0

    def __init__(self, first):
        self.first = first

    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [[self.first + ord(letter) - ord("a") for letter in t] for t in texts]}

    def __len__(self):
        return 40


def test_a_tokenizer_of_one_s_own_with_other_ids_is_not_taken_for_the_one_before(tmp_path):
    found = [opened(tmp_path, [{"text": "abc"}], Letters(first)) for first in (1, 5)]
    assert [listed(data)[0]["input_ids"] for data in found] == [[1, 2, 3, 0], [5, 6, 7, 0]]
