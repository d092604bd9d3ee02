"""Encode conversations and pairs of prompt and completion, and mark the tokens that are trained on.

A text is rendered by the tokenizer's chat template and tokenised once, as a whole, so that the ids
are those of `apply_chat_template`. What the assistant wrote in it is the template's own
`{% generation %}` mask where it has one. Else it is what a turn adds to the rendering of the turns
before it, which is checked: each such rendering has to begin the whole, in text and in tokens.
What the generation prompt brings of an answer, such as an empty thought, is never learned. Where a
template writes earlier turns otherwise later on, each answer becomes a sample, as at inference.
Faults are a ValueError that says in plain words what is wrong and what to do.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from typing import Any, Literal, final

from trainer.data.conversation import ASSISTANT, MESSAGE_WEIGHT, Message
from trainer.data.resource_limits import limited

TokenCounts = tuple[list[int], list[float]]
"""Ids, and how often each is a loss term, 0 where it is none; both `(tokens,)`."""
IdsAndPlaces = tuple[list[int], list[tuple[int, int]]]
"""Ids, and the characters that each stands for: from, to; both `(tokens,)`."""

LearnedAnswers = Literal["all", "last", "flagged"]
"""Which answers of a conversation are learned."""

_LONGEST = 10_000_000  # characters of a conversation
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_DAY = datetime(2024, 7, 26)  # what Llama's templates write where nothing says it
_DIRECTIVES = (*"aAbBcdHIjmMpSuUVwWxXyYG", "-d", "-m", "-H", "-I")
# Macros shadow what the tokenizer names so. The line break belongs to the tag: nothing is rendered.
_FIXED_DAY = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('%{each}', '{_DAY.strftime(f'%{each}')}')" for each in _DIRECTIVES)
    + " }}{% endmacro %}\n"
)
"""What begins a template that asks for today, whose tokens would be others tomorrow."""
_TEMPLATE = "type data.chat_template=FILE for another"
_MARKED = f"use a template that marks them by {{% generation %}} ({_TEMPLATE})"


class RewrittenError(ValueError):
    """A template renders a part of a conversation otherwise once more follows."""


def encode_samples(
    tokenizer: Any,  # noqa: ANN401 - a tokenizer of a library
    prompt: str | Sequence[Message],
    completion: str | Sequence[Message],
    *,
    tools: Sequence[Any] | str | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    learns_all: bool = False,
    answers: LearnedAnswers = "all",
) -> list[TokenCounts]:
    """Encode what is given and what is learned, which are both text or both messages.

    A conversation of which every answer is learned has no prompt. It is one sample; or one for each
    learned answer, up to its end, where the template renders what precedes one otherwise later on.
    Without a `{% generation %}` mask an answer begins behind the header that the template puts
    before it, and ends with its end-of-turn token; white space behind that is no loss term.

    An answer counts as often as its weight says; one of the weight 0 is given, and not learned. Of
    `answers` the `last` one alone is learned, or those `flagged` by another weight.

    Two texts are joined as they are, and end with the tokenizer's end-of-text token. A token that
    holds a part of both is a loss term. The tokenizer is a fast one of Hugging Face. What cannot be
    encoded so is a ValueError.
    """
    if isinstance(prompt, str) and isinstance(completion, str):
        ids, counts = _encode_texts(tokenizer, prompt, completion)
        if learns_all:
            counts = [1.0] * len(ids)
        return [(ids, counts)]
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ValueError("prompt and completion have to be both text, or both lists of messages")
    chat = Chat(tokenizer, tools_of(tools), chat_template, chat_template_kwargs or {})
    whole = chat.with_arguments([*prompt, *completion])
    if learns_all:
        for message in completion:
            if (weight := message.get(MESSAGE_WEIGHT, 1)) != 1:
                text = f"a message has the weight {weight}, and every token is to be learned"
                raise ValueError(text)
        ids, _ = chat.tokenize(chat.render(whole))
        return [(ids, [1.0] * len(ids))]
    return chat.encode_answers(whole, len(prompt), answers)


def encode_prompt(
    tokenizer: Any,  # noqa: ANN401 - a tokenizer of a library
    prompt: str | Sequence[Message],
    *,
    tools: Sequence[Any] | str | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Encode a text as `encode_samples` begins one, or messages with the header of an answer.

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


def tools_of(value: Sequence[Any] | str | None) -> list[Any] | None:
    """Read tools; Arrow cannot store objects that differ, so that many files have them as text."""
    tools: Any = value
    if isinstance(value, str):
        tools = json.loads(value)
    if tools is not None and not isinstance(tools, list | tuple):
        raise ValueError("tools is not a list of JSON schemas")
    if not tools:
        return None
    return [*tools]


def _read_calls(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Read arguments of tool calls that are the text of a JSON object, as OpenAI writes them."""
    if isinstance(value, list | tuple):
        return [*map(_read_calls, value)]
    if not isinstance(value, Mapping):
        return value
    if "function" in value:
        return {**value, "function": _read_calls(value["function"])}
    arguments = value.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        return value
    return {**value, "arguments": arguments}


def _learned(messages: Sequence[Message], first: int, answers: LearnedAnswers) -> list[int]:
    """Choose the answers that are learned among the messages from index `first` on."""
    found = [i for i in range(first, len(messages)) if messages[i]["role"] == ASSISTANT]
    if not found:
        raise ValueError("no message is of the assistant, so that there is nothing to learn")
    if answers == "last":
        found = found[-1:]
    by_default = answers != "flagged"
    return [i for i in found if messages[i].get(MESSAGE_WEIGHT, by_default)]


def _rewritten(i: int) -> RewrittenError:
    return RewrittenError(
        f"the chat template renders what precedes message {i + 1}, of the assistant, otherwise "
        f"once it is answered, so that its tokens cannot be found; {_MARKED}"
    )


def _encode_texts(tokenizer: Any, prompt: str, completion: str) -> TokenCounts:  # noqa: ANN401
    if not completion.strip():
        raise ValueError("the completion is empty, so that there is nothing to learn")
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    text = prompt + completion + (eos if eos and not completion.endswith(eos) else "")
    encoded = tokenizer(
        text,
        # Those of the tokenizer begin with a BOS, of which the text may have one already.
        add_special_tokens=not (bos and text.startswith(bos)),
        return_offsets_mapping=True,
        verbose=False,
    )
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    if ids[-2:] == [tokenizer.eos_token_id] * 2:  # the tokenizer adds one too
        ids, offsets = ids[:-1], offsets[:-1]
    return ids, [end > len(prompt) for _, end in offsets]


@final
@dataclass(frozen=True)
class Chat:
    """A tokenizer with its template and what that is rendered with."""

    tokenizer: Any
    tools: Sequence[Any] | None
    chat_template: str | None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def encode_answers(
        self, messages: Sequence[Message], first: int, answers: LearnedAnswers
    ) -> list[TokenCounts]:
        """Mark the answers among the messages from index `first` on; see `encode_samples`."""
        learned = _learned(messages, first, answers)
        try:
            return [self.encode_learned(messages, learned)]
        except RewrittenError:
            if learned == [len(messages) - 1]:
                raise
        return [self.encode_learned(messages[: i + 1], [i]) for i in learned]

    def encode_learned(self, messages: Sequence[Message], learned: Sequence[int]) -> TokenCounts:
        """Mark some answers of a conversation in its tokens."""
        text = self.render(messages)  # within its limits, before it is tokenised
        ids, offsets = self.tokenize(text)
        counts = [0.0] * len(ids)
        is_marked = _GENERATION.search(self.template()) is not None
        for i in learned:
            if is_marked:
                begin, end = self.answer_text(messages, i, text)
                first = bisect_right(offsets, begin, key=itemgetter(1))
                places = range(first, bisect_left(offsets, end, key=itemgetter(0)))
            else:
                places = self.answer_tokens(messages, i, text, (ids, offsets))
            for place in places:
                counts[place] = float(messages[i].get(MESSAGE_WEIGHT, 1))
        if is_marked and learned:
            how = {"return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
            marks = self.apply(messages, return_dict=True, **how)["assistant_masks"]
            counts = [each * bool(mark) for each, mark in zip(counts, marks, strict=True)]
            if not any(counts):
                raise ValueError(
                    "the chat template marks no token of the assistant in this conversation, "
                    f"though it has {{% generation %}}; {_TEMPLATE}"
                )
        return ids, counts

    def answer_text(self, messages: Sequence[Message], i: int, text: str) -> tuple[int, int]:
        """Find the characters of answer `i`, behind what the generation prompt brings of it."""
        begin = 0
        for has_header in (False, True) if i else ():
            before = self.render(messages[:i], has_header=has_header)
            if text.startswith(before):
                begin = len(before)
            elif not has_header:
                raise _rewritten(i)
        return begin, self.end_of(messages, i, text, begin)

    def with_arguments(self, messages: list[Message]) -> list[Message]:
        """Give arguments of tool calls that are JSON text as objects, where the template can.

        Most templates write them as JSON themselves, and would make a string of a text. Others join
        it to text, which an object is refused for, or would write an object as Python does.
        """
        read = [*messages]
        for i, message in enumerate(messages):
            if calls := message.get("tool_calls"):
                read[i] = {**message, "tool_calls": _read_calls(calls)}
        if read == messages:
            return messages
        try:
            text = self.render(read)
        except ValueError:
            return messages
        for message in read:
            for call in message.get("tool_calls") or ():
                arguments = call.get("function", call).get("arguments")
                # Written as Python writes it, with single quotes: no JSON for a model to learn.
                if arguments and str(arguments) in text:
                    return messages
        return read

    def template(self) -> str:
        """Give the text of the template that is used; today is always the same day in it."""
        if self.chat_template is None and not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template; type data.chat_template=FILE")
        text: str = self.tokenizer.get_chat_template(self.chat_template, self.tools)
        if "strftime_now" in text:
            text = _FIXED_DAY + text
        return text

    def apply(self, messages: Sequence[Message], **how: Any) -> Any:  # noqa: ANN401
        """Render by the template; what it raises is a ValueError."""
        import jinja2  # noqa: PLC0415 - for this option

        template = self.template()
        try:
            return self.tokenizer.apply_chat_template(
                [*messages], tools=self.tools, chat_template=template, **self.variables, **how
            )
        except (jinja2.TemplateError, TypeError) as error:
            text = " ".join(str(error).split())
            raise ValueError(f"the chat template refuses the conversation: {text}") from error

    def render(self, messages: Sequence[Message], *, has_header: bool = False) -> str:
        """Give the text of some messages; with the header of the answer that is to come."""
        with limited("the chat template"):
            text: str = self.apply(messages, tokenize=False, add_generation_prompt=has_header)
        if len(text) > _LONGEST:
            raise ValueError(f"the chat template gives more than {_LONGEST:,} characters")
        return text

    def tokenize(self, text: str) -> IdsAndPlaces:
        """Give the ids of a rendered text, and the characters that each stands for."""
        # The text has its special tokens: no second BOS.
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return encoded["input_ids"], encoded["offset_mapping"]

    def prefix(
        self, messages: Sequence[Message], i: int, text: str, encoded: IdsAndPlaces
    ) -> tuple[int, int]:
        """Check that what a model is given before message `i` begins the whole.

        Gives how many characters and how many tokens it has; a ValueError where the whole does not
        begin so.
        """
        name = f"message {i + 1}, of the assistant,"
        if i == 0:
            raise ValueError(f"{name} is the first; put a message of the user before it")
        before = self.render(messages[:i], has_header=True)
        if not text.startswith(before):
            raise _rewritten(i)
        ids, offsets = encoded
        start, same = 0, self.last_special(encoded, len(before))
        if same:
            start = offsets[same][0]
        rest, _ = self.tokenize(before[start:])
        num_tokens = same + len(rest)
        if ids[same:num_tokens] != rest:
            raise ValueError(
                f"{name} begins inside a token: the text before it ends with "
                f"{before[-8:]!r} and it begins with {text[len(before) :][:8]!r}; take white space "
                f"off its beginning, or {_MARKED}"
            )
        return len(before), num_tokens

    def last_special(self, encoded: IdsAndPlaces, end: int) -> int:
        """Give the place of the last special token in the first `end` characters; 0 without one.

        Added tokens that no normalizer changes are found before all others, so the tokens before
        one are the same whatever follows. Tokenising the rest alone keeps long conversations from
        taking time squared.
        """
        ids, offsets = encoded
        place = bisect_left(offsets, end, key=itemgetter(0)) - 1
        added = self.tokenizer.added_tokens_decoder
        special = {token for token, each in added.items() if not each.normalized}
        while place > 0 and (ids[place] not in special or offsets[place][1] > end):
            place -= 1
        return max(place, 0)

    def answer_tokens(
        self, messages: Sequence[Message], i: int, text: str, encoded: IdsAndPlaces
    ) -> range:
        """Find the tokens of answer `i`, its end-of-turn token included."""
        begin, num_given = self.prefix(messages, i, text, encoded)
        end = self.end_of(messages, i, text, begin)
        after = text[:end]
        self.check_header(messages, i, text[begin:end], before=text[:begin])
        stripped = after.rstrip()
        # Without white space behind it the tokens, of which there may be many, do not matter.
        if stripped != after and stripped.endswith(tuple(self.tokenizer.get_added_vocab())):
            end = len(stripped)  # what is behind the token that ends a turn is not learned
        return range(num_given, bisect_left(encoded[1], end, key=itemgetter(0)))

    def end_of(self, messages: Sequence[Message], i: int, text: str, begin: int) -> int:
        """Find the end of answer `i`, which begins at a character of the whole."""
        after = self.render(messages[: i + 1])
        if not text.startswith(after):  # some templates end a conversation by it, and no turn
            after = after.removesuffix(self.tokenizer.eos_token or "")
        if not text.startswith(after) or len(after) <= begin:
            raise RewrittenError(
                f"the chat template renders message {i + 1}, of the assistant, otherwise once more "
                f"messages follow; {_MARKED}"
            )
        return len(after)

    def check_header(self, messages: Sequence[Message], i: int, turn: str, before: str) -> None:
        """Refuse a template whose header would be learned with the answer."""
        content = messages[i].get("content")
        place = 0
        if isinstance(content, str):
            place = max(turn.find(content.strip()), 0)
        header = turn[:place]
        if header.strip() and self.render(messages[:i]) == before:
            raise ValueError(
                f"the chat template begins an answer with {header!r} and has no generation prompt, "
                f"so that this would be learned too; {_MARKED}"
            )
