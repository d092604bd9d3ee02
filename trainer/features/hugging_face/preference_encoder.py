"""Encode pairs of answers to one prompt, the chosen one and the rejected one, as a row each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from trainer.data.chat import encode_samples
from trainer.data.collate import ATTENTION_MASK, LABELS
from trainer.data.conversation import ASSISTANT, Message
from trainer.data.samples import INPUT_IDS
from trainer.features.hugging_face import chat_encoder, encode

Answer = str | list[Message]


def preference_fields(
    encoder: encode.RecordEncoder,
    record: encode.RoleValues,
    *,
    scores: bool = False,
) -> encode.RecordFields:
    """Encode both answers behind their prompt; labels are the answers alone.

    With `scores` the whole texts are compared, without labels, by the record's margin where it has
    one; and one text may be alone, where there is nothing to be learned.
    """
    prompt, sides = _parts(record, joins=scores)
    how = {**chat_encoder.rendering(encoder, record), "learns_all": scores}
    ids, labels = list[list[int]](), list[list[int]]()
    for side in sides:
        encoded, *others = encode_samples(encoder.tokenizer, prompt, side, **how)
        if others:
            text = "answers of several turns, which the chat template renders otherwise later on"
            raise ValueError(f"{text}; leave one turn of each")
        for weight in {*encoded[1]} - {0, 1}:
            text = "and the answers of a pair count once; leave it out"
            raise ValueError(f"a message has the weight {weight:g}, {text}")
        row = chat_encoder.fitted(encoder, encoded, learns=not scores)
        ids.append(row[INPUT_IDS].tolist())
        labels.append(row[LABELS].tolist())
    if ids[1:] == ids[:-1] != []:
        raise encode.DroppedError("whose chosen and rejected are the same")
    rows = {INPUT_IDS: ids, ATTENTION_MASK: [[1] * len(row) for row in ids]}
    if not scores:
        rows[LABELS] = labels
    fields = encoder.padded(rows)
    if scores and "margin" in record:
        return {**fields, "margin": encode.number_of(record, "margin")}
    return fields


def prompt_of(record: encode.RoleValues) -> Answer | None:
    """Give the prompt of a pair; None where it is but words that two texts begin with."""
    prompt, _ = _parts(record, joins=False)
    return prompt if record.get("prompt") or isinstance(prompt, list) else None


def _parts(record: encode.RoleValues, *, joins: bool) -> tuple[Answer, Sequence[Answer]]:
    """Give the prompt and the answers, which may begin with it.

    What both begin with is the prompt where there is none: whole messages, or whole words.
    """
    read, prompt = chat_encoder.text_or_messages, record.get("prompt")
    answers = [record[role] for role in ("chosen", "rejected") if role in record]
    if None in answers:
        raise ValueError("its chosen or rejected answer is null")
    sides = [*map(read, answers)]
    if prompt is not None:
        prompt = read(prompt)
    if isinstance(prompt, str) and isinstance(sides[0], list):
        prompt = _question(prompt, sides)
    if prompt is not None:
        size = len(prompt)
        if all(side[:size] == prompt and side[size:] for side in sides):
            sides = [side[size:] for side in sides]
        return prompt, sides
    first, last = sides[0], sides[-1]
    both = zip(first, last, strict=False)
    shared = len([*takewhile(lambda pair: pair[0] == pair[1], both)])
    if joins:
        at = 0
    elif isinstance(first, str):
        # The space belongs to the answer, whose first token has it.
        at = max(first[:shared].rfind(" "), 0)
    else:
        at = min(shared, len(first) - 1, len(last) - 1)
    return first[:at], [side[at:] for side in sides]


def _question(prompt: str, sides: Iterable[Answer]) -> list[Message] | None:
    """Give the message of a prompt in text; None where the conversations have it already."""
    talks, asked = [side for side in sides if isinstance(side, list)], ("user", prompt.strip())
    turns = [[(turn["role"], str(turn.get("content")).strip()) for turn in talk] for talk in talks]
    if not asked[1] or all(asked in of_talk for of_talk in turns):
        return None
    if any(talk[0]["role"] != ASSISTANT for talk in talks):
        text = "its answers begin with other messages than its prompt"
        raise ValueError(f"{text}; to leave the prompt out, type 'data.columns={{prompt:null}}'")
    return [{"role": "user", "content": prompt}]
