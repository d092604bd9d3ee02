"""Encode what a model is asked, up to where its answer begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.data.chat import Chat, tools_of
from trainer.data.conversation import Message


def encode_prompt(
    tokenizer: Any,  # noqa: ANN401 - a tokenizer of a library
    prompt: str | Sequence[Message],
    *,
    tools: Sequence[Any] | str | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Encode a text as `encode_completion` begins one, or messages with the header of an answer.

    What cannot be encoded so is a ValueError.
    """
    if not isinstance(prompt, str):
        chat = Chat(tokenizer, tools_of(tools), chat_template, chat_template_kwargs or {})
        messages = chat.with_arguments([*prompt])
        return chat.tokenize(chat.render(messages, has_header=True))[0]
    bos = tokenizer.bos_token
    is_begun = bool(bos) and prompt.startswith(bos)
    ids: list[int] = tokenizer(prompt, add_special_tokens=not is_begun, verbose=False)["input_ids"]
    # Some tokenizers end every text.
    if ids[-1:] == [tokenizer.eos_token_id]:
        ids = ids[:-1]
    return ids
