"""Encode conversations, prompts with completions, and instructions for a causal model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

import numpy as np

from trainer.data.chat import Message, encode_messages, encode_prompt, normalize_messages
from trainer.data.collate import IGNORED_LABEL, LABELS
from trainer.data.encode import LONGER, DroppedError, Fields, Record, RecordEncoder, text_of
from trainer.data.samples import INPUT_IDS

_BEGIN = "Below is an instruction that describes a task"
_ASKED = "Write a response that appropriately completes the request."
WITHOUT_INPUT = f"{_BEGIN}. {_ASKED}\n\n### Instruction:\n{{0}}\n\n### Response:\n"
_WITH_INPUT = (
    f"{_BEGIN}, paired with an input that provides further context. {_ASKED}\n\n"
    "### Instruction:\n{0}\n\n### Input:\n{1}\n\n### Response:\n"
)
"""What Alpaca was trained on: for tokenizers without a chat template."""


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
        found, counted = self._tokens(record)
        ids, counts = np.array(found), np.array(counted)
        if len(ids) > self.max_length:
            if self.overlong == "drop":
                raise DroppedError(LONGER)
            rest = (
                slice(self.max_length)
                if self.truncation == "right"
                else slice(-self.max_length, None)
            )
            ids, counts = ids[rest], counts[rest]
        if not counts[1:].any():  # the first token is never predicted
            raise DroppedError("without a loss term")
        return {INPUT_IDS: ids, LABELS: np.where(counts, ids, IGNORED_LABEL)}

    def _tokens(self, record: Record) -> tuple[list[int], list[bool]]:
        template: dict[str, Any] = {
            "chat_template": self.chat_template,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if "completion" in record:
            prompt, completion = (_side(record[role]) for role in ("prompt", "completion"))
            only = self.completion_only_loss
            return encode_prompt(
                self.tokenizer,
                prompt,
                completion,
                completion_only_loss=only,
                tools=record.get("tools"),
                **template,
            )
        if "messages" in record:
            messages = normalize_messages(record["messages"])
            return encode_messages(
                self.tokenizer,
                messages,
                assistant_only_loss=self.assistant_only_loss,
                tools=record.get("tools"),
                **template,
            )
        return self._instructed(record, template)

    def _instructed(
        self, record: Record, template: Mapping[str, Any]
    ) -> tuple[list[int], list[bool]]:
        """Encode an instruction as one turn of a chat, or as Alpaca wrote it."""
        asked, answer = text_of(record, "instruction"), text_of(record, "output")
        more = record.get("input") or ""
        if self._has_template():
            asked = f"{asked}\n\n{more}" if more else asked
            messages = [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": answer},
            ]
            only = self.assistant_only_loss
            return encode_messages(self.tokenizer, messages, assistant_only_loss=only, **template)
        prompt = (_WITH_INPUT if more else WITHOUT_INPUT).format(asked, more)
        only = self.completion_only_loss
        return encode_prompt(self.tokenizer, prompt, answer, completion_only_loss=only)


def _side(value: Any) -> str | list[Message]:  # noqa: ANN401 - any JSON value
    return value if isinstance(value, str) else normalize_messages(value)
