"""`data=hf`: every column of a record, and every key of a message, is read, named or refused."""

from typing import Any

import pytest

from tests.lib import chats
from tests.lib.chats import CHATML, FIRST, GENERATION, LAST, USER, opened
from trainer.core.errors import ConfigError, DataError
from trainer.features.hugging_face.formats import recognise

TALK = [USER, FIRST, USER, LAST]
PAIR = {"sentence1": "a b", "sentence2": "c d"}
CHAT = {"messages": TALK}


def written(data: Any) -> str:
    """The first sample as text, with what is learned in brackets."""
    ids, labels = (data[0][name].tolist() for name in ("input_ids", "labels"))
    return chats.marked(chats.chat_tokenizer(None), ids, [label != -100 for label in labels])


def shown(data: Any) -> str:
    short, rest = data.facts().describe_records(None)
    return f"{short.text} | {rest.text}"


@pytest.mark.parametrize(
    ("task", "record", "column"),
    [
        ("embedding", {**PAIR, "similarity": 0.1}, "similarity"),
        ("embedding", {**PAIR, "labels": 0}, "labels"),
        ("embedding", {**PAIR, "weight": 0.5}, "weight"),
        ("causal_lm", {"prompt": "a", "chosen": "b", "rejected": "c", "weight": 2}, "weight"),
        ("causal_lm", {"prompt": "a", "completion": "b", "label": False}, "label"),
        ("causal_lm", {"instruction": "a", "output": "b", "history": [["c", "d"]]}, "history"),
        ("seq2seq_lm", {"source": "a", "target": "b", "sample_weight": 2}, "sample_weight"),
    ],
)
def test_a_column_that_changes_what_a_record_means_is_refused_with_what_to_type(
    tmp_path, task, record, column
):
    with pytest.raises(DataError, match=f"column '{column}' changes .*; to train without it, type"):
        opened(tmp_path, record, task=task)
    with pytest.raises(DataError) as refused:
        recognise("data.path=x", list(record), task)
    assert str(refused.value).endswith(f"'data.columns={{{column}:null}}'")
    left = opened(tmp_path, record, task=task, columns={column: None})
    assert f"not read: {column}" in shown(left)
    with pytest.raises(ConfigError, match=r"data\.columns=\{mass:null\}: no such column"):
        recognise("data.path=x", list(record), task, {"mass": None})


def test_every_other_column_and_key_of_a_message_is_named(tmp_path):
    talk = [{**USER, "id": 3}, {**FIRST, "name": "bot", "thought": "hm"}]
    data = opened(tmp_path, {"idx": 1, "messages": talk, "tools": [{"name": "add"}], "source": "x"})
    assert shown(data) == (
        "chat (messages, tools), 6 columns not read | not read: idx, source, tools, messages.id, "
        "messages.name, messages.thought"
    )
    read = opened(tmp_path, {"messages": talk}, "{# m.thought, m.name, id #}" + CHATML)
    assert "not read" not in shown(read)
    text = opened(tmp_path, {"text": "a b", "url": "x"}, task="masked_lm")
    assert shown(text) == "text (text), 1 column not read | not read: url"


def test_a_system_column_is_the_first_message(tmp_path):
    system = {"role": "system", "content": "be brief"}
    expected = written(opened(tmp_path, {"messages": [system, *TALK]}))
    assert "be brief" in expected
    shared = [
        {"from": {"user": "human"}.get(m["role"], "gpt"), "value": m["content"]} for m in TALK
    ]
    for record in (CHAT, {"conversations": shared}):
        assert written(opened(tmp_path, {**record, "system": "be brief"})) == expected
    assert written(opened(tmp_path, {**CHAT, "system": ""})) == written(opened(tmp_path, CHAT))
    asked = {"instruction": "why?", "output": "so", "system": "be brief"}
    whole = {"messages": [system, USER, LAST]}
    assert written(opened(tmp_path, asked)) == written(opened(tmp_path, whole))
    with pytest.raises(DataError, match="system stands in a column and in a message"):
        opened(tmp_path, {"messages": [system, *TALK], "system": "be brief"})
    with pytest.raises(DataError, match="its system needs a chat template"):
        opened(tmp_path, asked, None)


@pytest.mark.parametrize(
    ("template", "flag"),
    [(CHATML, {"weight": 0}), (CHATML, {"train": False}), (GENERATION, {"loss_mask": 0})],
)
def test_an_answer_of_weight_0_is_given_and_no_loss_term(tmp_path, template, flag):
    data = opened(tmp_path, {"messages": [USER, {**FIRST, **flag}, USER, LAST]}, template)
    rest = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    whole = f"{rest}because it is<|im_end|>\n{rest}⟦so<|im_end|>⟧\n"
    assert written(data) == whole
    assert "not read" not in shown(data)
    learned = opened(tmp_path, {"messages": [USER, FIRST, USER, {**LAST, "weight": 1.0}]}, template)
    assert written(learned) == whole.replace("because it is<|im_end|>", "⟦because it is<|im_end|>⟧")
    with pytest.raises(DataError, match=r"no record is left .*1 without a loss term"):
        opened(tmp_path, {"messages": [USER, {**FIRST, **flag}]}, template)


def test_of_several_formats_pairs_are_read_unless_the_objective_takes_none(tmp_path):
    pair = {"prompt": "why?", "chosen": [USER, LAST], "rejected": [USER, FIRST]}
    record = {**pair, "messages": TALK}
    for more, name in (({}, "preference"), ({"objective": "next_token"}, "chat")):
        assert shown(opened(tmp_path, record, **more)).startswith(name)
    # Nothing else is there: the objective says what it is for.
    assert shown(opened(tmp_path, pair, objective="next_token")).startswith("preference")


def test_which_answers_are_learned_counts_for_completions_of_messages_alone(tmp_path):
    record = {"prompt": TALK[:1], "completion": TALK[1:]}
    data = opened(tmp_path, record, answers="last")
    assert written(data).endswith("\n⟦so<|im_end|>⟧\n")
    assert written(data).count("⟦") == 1
    assert not data.facts().unused
    text = {"prompt": "a", "completion": "b"}
    for each, more in (
        (text, {}),
        (record, {"completion_only_loss": False}),
        (CHAT, {"assistant_only_loss": False}),
    ):
        assert {*opened(tmp_path, each, answers="last", **more).facts().unused} == {"answers"}


def test_a_conversation_of_several_samples_is_named_counted_and_held_out_as_one(tmp_path):
    """The longer answer of the second one is dropped, and counted."""
    talk = {"messages": [USER, FIRST, USER, LAST]}
    long = {"messages": [USER, FIRST, USER, {**LAST, "content": "so " * 80}]}
    once = {"messages": [USER, FIRST]}
    data = opened(tmp_path, [talk, long, once, talk], chats.THOUGHTS, max_length=60)
    lines = "".join(data.name_of(i).rpartition(":")[2] for i in range(len(data)))
    assert lines == "112344"
    assert "3 conversations became 6 samples, one for each answer" in shown(data)
    assert "1 longer than data.max_length left out" in shown(data)
    groups = data._index.groups
    assert groups[0] == groups[1] == groups[4] == groups[5]
    assert len({groups[0], groups[2], groups[3]}) == 2  # of the long one its first answer is left
