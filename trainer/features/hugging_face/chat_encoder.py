"""Encode conversations, prompts with completions, and instructions, and what is to be answered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from trainer.core.micro_batch import IGNORED
from trainer.data.chat import Chat, TokenCounts, encode_prompt, encode_samples
from trainer.data.collate import LABELS, WEIGHT
from trainer.data.conversation import (
    ASSISTANT,
    READ_KEYS,
    Message,
    normalize_messages,
)
from trainer.data.samples import INPUT_IDS
from trainer.features.hugging_face import encode
from trainer.features.hugging_face.formats import Format
from trainer.features.hugging_face.task import WORDS

_REASONING = {"reasoning_content", "thinking", "reasoning"}  # one thing
# Stands for an answer in a rendered conversation
_ANSWER = "answer"


def has_template(tokenizer: Any, options: Mapping[str, Any]) -> bool:  # noqa: ANN401
    """Whether a chat template was typed, or the tokenizer has one."""
    return bool(options.get("chat_template") or getattr(tokenizer, "chat_template", None))


def unread_by_template(encoder: encode.RecordEncoder, records: Iterable[Any]) -> list[str]:
    """Name keys of the messages of some records, and tools, that the chat template never names."""
    own = getattr(encoder.tokenizer, "chat_template", None)
    form, template = encoder.format, str(encoder.options["chat_template"] or own)
    found = dict[str, str]()
    if "tools" in form.columns:
        found["tools"] = str(form.columns["tools"])
    roles = ("messages", "prompt", "completion", "chosen", "rejected")
    for column, message in messages_in(form, records, *roles):
        found |= {key: f"{column}.{key}" for key in message if key not in READ_KEYS}
    words = {*re.findall(r"\w+", template)}
    if words & _REASONING:
        words |= _REASONING
    return [name for key, name in found.items() if key not in words]


def messages_in(
    form: Format, records: Iterable[Any], *roles: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Give the messages of records in the columns of some roles, each with its column.

    What is no record, or no message, is found, and named, where it is encoded.
    """
    columns = [str(form.columns.get(role, "")) for role in roles]
    for record, column in product(records, columns):
        messages = record.get(column) if isinstance(record, Mapping) else None
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, Mapping):
                yield column, message


def unused_options(encoder: encode.RecordEncoder, first: Iterable[Any]) -> dict[str, str]:
    """Say of options that were typed and do nothing what they are for, by the first records."""
    form, is_chat = encoder.format.name, has_template(encoder.tokenizer, encoder.options)
    if form == "prompt and completion":
        is_chat = any(messages_in(encoder.format, first, "completion"))
    used, is_learned = set[str](), form in {"chat", "prompt and completion", "instruction"}
    if is_learned:
        of_loss = "assistant_only_loss"
        if not is_chat or form == "prompt and completion":
            of_loss = "completion_only_loss"
        used |= {of_loss, *["answers"] * (is_chat and encoder.options[of_loss])}
    if is_learned or form in {"preference", "comparison"}:
        used |= {*["chat_template", "chat_template_kwargs"] * is_chat}
        used |= {*["truncation"] * (encoder.overlong == "cut")}
    these = f"and these records are {form} under data.overlong={encoder.overlong}"
    unused = dict[str, str]()
    for name, (default, purpose) in encode.OF_ANSWERS.items():
        if encoder.options[name] != default and name not in used:
            unused[name] = f"{purpose}, {these}"
    return unused


def answer_fields(
    encoder: encode.RecordEncoder, record: encode.RoleValues
) -> list[encode.RecordFields | encode.DroppedError]:
    """Encode what has answers; the loss is on them alone unless the `OF_ANSWERS` say otherwise."""
    options = encoder.options
    prompt, completion = _parts(record, is_chat=has_template(encoder.tokenizer, options))
    only_answers = options["completion_only_loss"]
    if not isinstance(prompt, str) and "completion" not in record:
        only_answers = options["assistant_only_loss"]
    found = list[encode.RecordFields | encode.DroppedError]()
    for encoded in encode_samples(
        encoder.tokenizer,
        prompt,
        completion,
        **rendering(encoder, record),
        learns_all=not only_answers,
        answers=options["answers"],
    ):
        try:
            found.append(fitted(encoder, encoded))
        except encode.DroppedError as error:
            found.append(error)
    return found


def rendering(encoder: encode.RecordEncoder, record: encode.RoleValues) -> dict[str, Any]:
    """Give what a conversation is rendered with."""
    names = "chat_template", "chat_template_kwargs"
    return {"tools": record.get("tools"), **{name: encoder.options[name] for name in names}}


def fitted(
    encoder: encode.RecordEncoder, encoded: TokenCounts, *, learns: bool = True
) -> encode.RecordFields:
    """Shorten a sample that is too long, or drop it, as one that `learns` and has no loss term."""
    ids, counts = np.array(encoded[0]), np.array(encoded[1], dtype=np.float32)
    if len(ids) > encoder.max_length:
        if encoder.overlong == "drop":
            raise encode.DroppedError(encode.LONGER)
        rest = slice(-encoder.max_length, None)
        if encoder.options["truncation"] == "right":
            rest = slice(encoder.max_length)
        ids, counts = ids[rest], counts[rest]
    # The first token is never predicted
    if learns and not counts[1:].any():
        raise encode.DroppedError("without a loss term")
    fields = {INPUT_IDS: ids, LABELS: np.where(counts, ids, IGNORED)}
    return {**fields, WEIGHT: counts} if encoder.weighs else fields


def prompt_fields(encoder: encode.RecordEncoder, record: encode.RoleValues) -> encode.RecordFields:
    """Encode what is asked, for the model to answer it; a last answer is no part of it."""
    is_chat = has_template(encoder.tokenizer, encoder.options)
    if "prompt" in record:
        prompt = text_or_messages(record["prompt"])
    elif "messages" in record:
        _, prompt = _parts(record, is_chat=is_chat)
        while prompt and prompt[-1]["role"] == ASSISTANT:  # type: ignore[index] # a list of messages
            prompt = prompt[:-1]
    elif "instruction" not in record:  # as of pairs of answers
        raise ValueError("it has no prompt")
    else:
        prompt, whole = _parts({**record, "output": _ANSWER}, is_chat=is_chat)
        if not isinstance(whole, str):
            prompt = whole[:-1]
    if not prompt:
        raise ValueError("it asks nothing")
    ids = encode_prompt(encoder.tokenizer, prompt, **rendering(encoder, record))
    if len(ids) >= encoder.max_length:
        raise encode.DroppedError(f"{len(ids)} tokens, which leave no room for an answer")
    return {INPUT_IDS: ids}


def _parts(
    record: encode.RoleValues, *, is_chat: bool
) -> tuple[str | list[Message], str | list[Message]]:
    """Give what is given and what is learned; a conversation is learned as a whole."""
    begin = list[Message]()
    if record.get("system"):
        begin.append({"role": "system", "content": encode.text_of(record, "system")})
    if "messages" in record:
        messages = normalize_messages(record["messages"])
        if begin and messages[0]["role"] in {"system", "developer"}:
            raise ValueError("its system stands in a column and in a message; leave one out")
        return [], [*begin, *messages]
    if "completion" in record:
        return text_or_messages(record["prompt"]), text_or_messages(record["completion"])
    # An instruction is one turn of a chat, or as Alpaca wrote it.
    asked, answer = encode.text_of(record, "instruction"), encode.text_of(record, "output")
    # Alpaca's files have an empty text where there is none
    more = record.get("input")
    if not is_chat:
        if begin:
            raise ValueError("its system needs a chat template; type data.chat_template=FILE")
        text = WORDS["alpaca"]["with_input" if more else "without_input"]
        return text.format(asked, more), answer
    if more:
        asked = f"{asked}\n\n{more}"
    turns = {"role": "user", "content": asked}, {"role": "assistant", "content": answer}
    return [], [*begin, *turns]


def text_or_messages(value: Any) -> str | list[Message]:  # noqa: ANN401 - any JSON value
    """Read a part of a record that is a text, or a conversation."""
    return value if isinstance(value, str) else normalize_messages(value)


def prompt_tokens(
    tokenizer: Any,  # noqa: ANN401 - of an untyped library
    text: str,
    form: str,
    template: Mapping[str, Any],
) -> tuple[Sequence[int], Sequence[int]]:
    """Give the tokens of a prompt, and those of which each one ends what follows.

    `form` is the format of the records; `template` has `chat_template`, None for the tokenizer's
    own, and its variables.
    """
    ends = {tokenizer.eos_token_id} - {None}
    if form == "source and target":
        # What an encoder reads has all special tokens; what ends is the target.
        ids = tokenizer(text, verbose=False)[INPUT_IDS]
    elif form in {"chat", "instruction", "preference"} and has_template(tokenizer, template):
        messages = [{"role": "user", "content": text}]
        variables = {**template}
        chat = Chat(tokenizer, None, variables.pop("chat_template"), variables)
        whole = chat.render([*messages, {"role": "assistant", "content": _ANSWER}])
        # What the template writes behind an answer begins with the token that ends a turn.
        after, _ = chat.tokenize(whole.rpartition(_ANSWER)[2].lstrip())
        ends |= {*after[:1]} & tokenizer.added_tokens_decoder.keys()
        ids, _ = chat.tokenize(chat.render(messages, has_header=True))
    else:
        if form == "instruction":
            text = WORDS["alpaca"]["without_input"].format(text)
        ids = encode_prompt(tokenizer, text)
    return ids, [*ends]
