"""Encode pairs of answers to one prompt, the chosen one and the rejected one, as a row each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from trainer.core.micro_batch import IGNORED
from trainer.data.chat import encode_samples
from trainer.data.collate import ATTENTION_MASK, LABELS
from trainer.data.conversation import Message, normalize_messages
from trainer.data.samples import INPUT_IDS
from trainer.features.hugging_face import encode

SAME = "whose chosen and rejected are the same"
Answer = str | list[Message]


def preference_fields(
    encoder: encode.RecordEncoder,
    record: encode.RoleValues,
    options: Mapping[str, Any],
    *,
    scores: bool = False,
) -> encode.RecordFields:
    """Encode both answers behind their prompt; labels are the answers alone.

    With `scores` the whole texts are compared, without labels, by the record's margin where it has
    one; and one text may be alone, where there is nothing to be learned.
    """
    prompt, sides = _parts(record, joins=scores)
    rows = {INPUT_IDS: list[Any](), ATTENTION_MASK: list[Any](), LABELS: list[Any]()}
    for side in sides:
        (ids, counts), *others = encode_samples(
            encoder.tokenizer,
            prompt,
            side,
            tools=record.get("tools"),
            chat_template=options["chat_template"],
            chat_template_kwargs=options["chat_template_kwargs"],
            learns_all=scores,
        )
        if others:
            text = "answers of several turns, which the chat template renders otherwise later on"
            raise ValueError(f"{text}; leave one turn of each")
        if len(ids) > encoder.max_length and encoder.overlong == "drop":
            raise encode.DroppedError(encode.LONGER)
        rest = slice(-encoder.max_length, None)
        if options["truncation"] == "right":
            rest = slice(encoder.max_length)
        row, counted = np.array(ids[rest]), np.array(counts[rest])
        # The first token is never predicted
        if not counted[1:].any() and not scores:
            raise encode.DroppedError("without a loss term")
        rows[INPUT_IDS].append(row.tolist())
        rows[ATTENTION_MASK].append([1] * len(row))
        rows[LABELS].append(np.where(counted, row, IGNORED).tolist())
    if rows[INPUT_IDS][1:] == rows[INPUT_IDS][:-1] != []:
        raise encode.DroppedError(SAME)
    if scores:
        del rows[LABELS]
    fields: dict[str, Any] = encoder.padded(rows)
    if scores and "margin" in record:
        fields["margin"] = encode.number_of(record, "margin")
    return fields


def prompt_of(record: encode.RoleValues) -> Answer | None:
    """Give the prompt of a pair; None where it is but words that two texts begin with."""
    prompt, _ = _parts(record, joins=False)
    return prompt if record.get("prompt") or isinstance(prompt, list) else None


def _parts(record: encode.RoleValues, *, joins: bool) -> tuple[Answer, Sequence[Answer]]:
    """Give the prompt and the answers; what answers without a prompt begin with is their prompt.

    Of conversations those are whole messages, and of texts whole words.
    """
    prompt, sides = record.get("prompt"), list[Answer]()
    for role in ("chosen", "rejected"):
        if role in record:
            value = record[role]
            sides.append(encode.text_of(record, role) if isinstance(value, str) else _read(value))
    # Beside a prompt in text, some files have conversations that begin with it.
    if isinstance(prompt, str) and isinstance(sides[0], list):
        prompt = None
    if prompt is not None:
        return prompt if isinstance(prompt, str) else _read(prompt), sides
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


def _read(value: Any) -> list[Message]:  # noqa: ANN401 - any JSON
    return normalize_messages(value)
