"""Read conversations as files write them: TRL's keys or ShareGPT's, parts of contents, weights.

Faults are a ValueError that says in plain words what is wrong and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

ASSISTANT = "assistant"
MESSAGE_WEIGHT = "weight"
"""Of an answer: how often its tokens count; 0 where it is given and not learned."""
_WEIGHTS = (MESSAGE_WEIGHT, "train", "loss_mask", "loss")  # how files call it
READ_KEYS = ("role", "content", "from", "value", *_WEIGHTS)
"""Of a message, whatever the template is."""
_ROLES = {
    **{role: role for role in ("system", "developer", "user", ASSISTANT, "tool", "function")},
    **{"human": "user", "gpt": ASSISTANT, "model": ASSISTANT, "observation": "tool"},  # ShareGPT
}


def normalize_messages(value: object) -> list[Message]:
    """Read a conversation as TRL (`role`, `content`) or ShareGPT (`from`, `value`) writes it.

    Fields of a message that are None, which is how Arrow stores absent ones, are left out; within a
    field None is a value. Of content in parts, as it is written beside images, the texts are
    joined. The messages have the names and roles that chat templates know. A ValueError
    where they are none.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError("the conversation is not a list of messages, or an empty one")
    return [_normalized(message, f"message {i}") for i, message in enumerate(value, start=1)]


def _normalized(message: object, name: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} is of type {type(message).__name__}; write an object")
    fields = dict[str, Any]()
    for key, value in message.items():
        if value is not None:
            fields[key] = value
    if "role" not in fields and "from" in fields:
        role, content = fields.pop("from"), fields.pop("value", None)
        fields |= {"role": role, "content": content}
    role = fields.get("role")
    if role not in _ROLES:
        raise ValueError(f"{name} has the unknown role {role!r}; known are {', '.join(_ROLES)}")
    name = f"{name}, of the {_ROLES[role]},"
    if fields.get("content") is not None:
        fields["content"] = _text(fields["content"], name)
    elif not fields.get("tool_calls"):
        raise ValueError(f"{name} has no content")
    return _weighted({**fields, "role": _ROLES[role]}, name)


def _weighted(message: Message, name: str) -> Message:
    """Read how often a message counts, by whatever key says so; but for `weight` it is 0 or 1."""
    for key in _WEIGHTS:
        value = message.pop(key, None)
        if value is None:
            continue
        is_weight = key == MESSAGE_WEIGHT and isinstance(value, int | float) and value >= 0
        if value not in (0, 1) and not (is_weight and value < math.inf):
            takes = "a number of 0 or more" if key == MESSAGE_WEIGHT else "0 or 1"
            raise ValueError(f"{name} has the {key} {value!r}; write {takes}, or leave it out")
        if value and message["role"] != ASSISTANT:
            text = "answers of the assistant alone are learned; leave it out"
            raise ValueError(f"{name} has the {key} {value!r}, and {text}")
        message[MESSAGE_WEIGHT] = value * message.get(MESSAGE_WEIGHT, 1)
    return message


def _text(content: Any, name: str) -> str:  # noqa: ANN401 - any JSON value
    """Give the text of a message's content, whose parts have texts of their own."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else [content]
    texts = list[str]()
    for part in parts:
        text, what = part, f"content of type {type(part).__name__}"
        if isinstance(part, Mapping):
            if kind := part.get("type"):
                what = f"a part of type {kind!r}"
            if kind == "text":
                text = part.get("text")
        if not isinstance(text, str):
            raise ValueError(f"{name} has {what}, which is no text")
        texts.append(text)
    return "".join(texts)
