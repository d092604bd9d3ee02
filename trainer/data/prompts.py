"""Write a prompt as the samples of a data set begin, and find the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.data.chat_encoder import WITHOUT_INPUT
from trainer.data.encode import ends_of
from trainer.data.samples import INPUT_IDS

ANSWER = "answer"  # stands for one in a rendered conversation


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
        whole = [*messages, {"role": "assistant", "content": ANSWER}]
        rendered, answered = (
            str(tokenizer.apply_chat_template(each, tokenize=False, **template, **more))
            for each, more in ((messages, {"add_generation_prompt": True}), (whole, {}))
        )
        ids, after = (
            tokenizer(each, add_special_tokens=False, verbose=False)[INPUT_IDS]
            for each in (rendered, answered.rpartition(ANSWER)[2].lstrip())
        )
        ends += [first for first in after[:1] if first in tokenizer.added_tokens_decoder]
    else:
        text = WITHOUT_INPUT.format(text) if form == "instruction" else text
        found = tokenizer(text, add_special_tokens=False, verbose=False)[INPUT_IDS]
        ids = [*ends_of(tokenizer, is_causal=True).prefix, *found]
    return ids, [end for end in ends if end is not None]
