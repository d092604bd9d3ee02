"""Encode conversations, prompts with completions, and instructions, and what is to be answered."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import numpy as np

from trainer.data.chat import Message, encode_completion, normalize_messages
from trainer.data.collate import IGNORED_LABEL, LABELS
from trainer.data.encode import (
    LONGER,
    DroppedError,
    Fields,
    Record,
    RecordEncoder,
    ends_of,
    text_of,
)
from trainer.data.samples import INPUT_IDS

_BEGIN = "Below is an instruction that describes a task"
_ASKED = "Write a response that appropriately completes the request."
_WITHOUT_INPUT = f"{_BEGIN}. {_ASKED}\n\n### Instruction:\n{{0}}\n\n### Response:\n"
_WITH_INPUT = (
    f"{_BEGIN}, paired with an input that provides further context. {_ASKED}\n\n"
    "### Instruction:\n{0}\n\n### Input:\n{1}\n\n### Response:\n"
)
"""What Alpaca was trained on: for tokenizers without a chat template."""
_ANSWER = "answer"  # stands for one in a rendered conversation


@final
@dataclass(frozen=True, kw_only=True)
class ChatEncoder(RecordEncoder):
    """Encodes what has answers; the loss is on them alone unless the settings say otherwise."""

    truncation: Literal["right", "left"] = "right"  # what is cut off where longer ones are cut
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    assistant_only_loss: bool = True
    completion_only_loss: bool = True

    def reads(self, form: str) -> Collection[str]:
        """Name the options of `OF_ANSWERS` that count for records of a format."""
        is_text = form == "instruction" and not self._has_template()
        is_pair = is_text or form == "prompt and completion"
        return {
            "completion_only_loss" if is_pair else "assistant_only_loss",
            *(() if is_text else ("chat_template", "chat_template_kwargs")),
            *(("truncation",) if self.overlong == "cut" else ()),
        }

    def _has_template(self) -> bool:
        return bool(self.chat_template or getattr(self.tokenizer, "chat_template", None))

    def encode(self, record: Record) -> Fields:
        """Give the fields of a sample."""
        prompt, completion = self._parts(record)
        is_turns = not isinstance(prompt, str) and "completion" not in record
        found, counted = encode_completion(
            self.tokenizer,
            prompt,
            completion,
            tools=record.get("tools"),
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            learns_all=not (self.assistant_only_loss if is_turns else self.completion_only_loss),
        )
        ids, counts = np.array(found), np.array(counted)
        if len(ids) > self.max_length:
            if self.overlong == "drop":
                raise DroppedError(LONGER)
            is_right = self.truncation == "right"
            rest = slice(self.max_length) if is_right else slice(-self.max_length, None)
            ids, counts = ids[rest], counts[rest]
        if not counts[1:].any():  # the first token is never predicted
            raise DroppedError("without a loss term")
        return {INPUT_IDS: ids, LABELS: np.where(counts, ids, IGNORED_LABEL)}

    def _parts(self, record: Record) -> tuple[str | list[Message], str | list[Message]]:
        """Give what is given and what is learned; a conversation is learned as a whole."""
        if "messages" in record:
            return [], normalize_messages(record["messages"])
        if "completion" in record:
            return _side(record["prompt"]), _side(record["completion"])
        # An instruction is one turn of a chat, or as Alpaca wrote it.
        asked, answer = text_of(record, "instruction"), text_of(record, "output")
        more = record.get("input") or ""
        if not self._has_template():
            return (_WITH_INPUT if more else _WITHOUT_INPUT).format(asked, more), answer
        asked = f"{asked}\n\n{more}" if more else asked
        return [], [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _side(value: Any) -> str | list[Message]:  # noqa: ANN401 - any JSON value
    return value if isinstance(value, str) else normalize_messages(value)


def prompt_tokens(
    tokenizer: Any,  # noqa: ANN401 - of an untyped library
    text: str,
    form: str,
    template: Mapping[str, Any],
) -> tuple[Sequence[int], Sequence[int]]:
    """Give the tokens of a prompt, and those of which each one ends what follows.

    Args:
        tokenizer: of transformers.
        text: what is asked; in a chat the user's message.
        form: of the records, as `recognise` names it.
        template: `chat_template`, None for the tokenizer's own, and variables of it.
    """
    ends = [tokenizer.eos_token_id]
    has_template = template.get("chat_template") or getattr(tokenizer, "chat_template", None)
    if form in {"chat", "instruction"} and has_template:
        messages = [{"role": "user", "content": text}]
        whole = [*messages, {"role": "assistant", "content": _ANSWER}]
        rendered, answered = (
            str(tokenizer.apply_chat_template(each, tokenize=False, **template, **more))
            for each, more in ((messages, {"add_generation_prompt": True}), (whole, {}))
        )
        ids, after = (
            tokenizer(each, add_special_tokens=False, verbose=False)[INPUT_IDS]
            for each in (rendered, answered.rpartition(_ANSWER)[2].lstrip())
        )
        ends += [first for first in after[:1] if first in tokenizer.added_tokens_decoder]
    else:
        text = _WITHOUT_INPUT.format(text) if form == "instruction" else text
        found = tokenizer(text, add_special_tokens=False, verbose=False)[INPUT_IDS]
        ids = [*ends_of(tokenizer, is_causal=True).prefix, *found]
    return ids, [end for end in ends if end is not None]
