"""Pairs of answers become two rows behind one prompt; what is no pair is named, or counted."""

import pytest

from tests.lib.chats import chat_tokenizer
from trainer.features.hugging_face.encode import OF_ANSWERS, DroppedError, RecordEncoder
from trainer.features.hugging_face.formats import Format
from trainer.features.hugging_face.preference_encoder import preference_fields

OPTIONS = {name: default for name, (default, _) in OF_ANSWERS.items()}
ASKED = {"role": "user", "content": "why"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def encode(record: dict, *, scores: bool = False, length: int = 100, overlong: str = "cut"):
    encoder = RecordEncoder(
        format=Format("preference", {}),
        is_json=False,
        tokenizer=chat_tokenizer(),
        max_length=length,
        overlong=overlong,
        fields_of=preference_fields,
        options=OPTIONS,
    )
    return encoder.tokenizer, preference_fields(encoder, record, scores=scores)


def answers(record: dict) -> list[str]:
    tokenizer, fields = encode(record)
    learned = []
    for row in fields["labels"]:
        learned.append(tokenizer.decode([i for i in row if i >= 0]))
    assert all(mask.count(1) <= len(mask) for mask in fields["attention_mask"])
    assert len({len(row) for rows in fields.values() for row in rows}) == 1
    return learned


ANSWERS = {"chosen": [said("good one")], "rejected": [said("bad")]}
TALKS = {side: [ASKED, *answer] for side, answer in ANSWERS.items()}


@pytest.mark.parametrize(
    "record",
    [
        TALKS,
        {"prompt": [ASKED], **TALKS},
        {"prompt": "why", **TALKS},
        {"prompt": "why\n", **ANSWERS},
        {"prompt": "", **TALKS},
    ],
)
def test_the_prompt_of_conversations_is_a_column_or_what_both_begin_with(record):
    expected = {"prompt": [ASKED], **ANSWERS}
    found = answers(record)
    assert found == answers(expected)
    assert found[0].startswith("good one")
    if record.get("prompt") != "why\n":
        for scores in (False, True):
            assert encode(record, scores=scores)[1] == encode(expected, scores=scores)[1]


def test_a_prompt_that_only_one_answer_begins_with_stands_before_both():
    one = {"chosen": "why so", "rejected": "no"}
    tokenizer, fields = encode({"prompt": "why", **one})
    assert tokenizer.decode(fields["input_ids"][0]).startswith("<s>whywhy so")
    both = {"prompt": "why", "chosen": "why so", "rejected": "why no"}
    assert encode(both)[1] == encode({"prompt": "why", "chosen": " so", "rejected": " no"})[1]
    nothing_left = {"prompt": "why", "chosen": "why", "rejected": "why not"}
    assert answers(nothing_left)[0].startswith("why")


def test_texts_without_a_prompt_share_what_both_begin_with_in_whole_words():
    chosen, rejected = answers({"chosen": "we go to parks", "rejected": "we go to part ways"})
    assert chosen.startswith(" parks")
    assert rejected.startswith(" part ways")


def test_scored_texts_are_whole_and_have_no_labels():
    tokenizer, fields = encode(
        {"prompt": "why", "chosen": " so", "rejected": " no way", "margin": "0.5"}, scores=True
    )
    assert fields.keys() == {"input_ids", "attention_mask", "margin"}
    assert fields["margin"] == 0.5
    assert tokenizer.decode(fields["input_ids"][1]).removeprefix("<s>").startswith("why no way")


@pytest.mark.parametrize(
    ("record", "how", "why"),
    [
        ({"chosen": " same", "rejected": " same"}, {}, "are the same"),
        ({"chosen": " a b c d e f", "rejected": " a"}, {"length": 3, "overlong": "drop"}, "longer"),
        ({"chosen": " a b c d", "rejected": " e f g h"}, {"length": 2}, "without a loss term"),
    ],
)
def test_what_teaches_nothing_is_left_out_and_counted(record, how, why):
    with pytest.raises(DroppedError, match=why):
        encode({"prompt": "the long prompt", **record}, **how)
