"""Encode conversations and pairs of prompt and completion, and mark the tokens that are trained on.

A text is rendered by the tokenizer's chat template and tokenised once, as a whole, so that the ids
are those of `apply_chat_template`. What the assistant wrote in it is the template's own
`{% generation %}` mask where it has one. Else it is what a turn adds to the rendering of the turns
before it, which is checked: each such rendering has to begin the whole, in text and in tokens.
Faults are a ValueError that says in plain words what is wrong and what to do.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from typing import Any, final

from trainer.data.conversation import ASSISTANT, MESSAGE_WEIGHT, Message
from trainer.data.resource_limits import limited

TokensAndMask = tuple[list[int], list[bool]]
"""Ids, and which of them are loss terms; both `(tokens,)`."""
IdsAndPlaces = tuple[list[int], list[tuple[int, int]]]
"""Ids, and the characters that each stands for: from, to; both `(tokens,)`."""

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


def encode_completion(
    tokenizer: Any,  # noqa: ANN401 - a tokenizer of a library
    prompt: str | Sequence[Message],
    completion: str | Sequence[Message],
    *,
    tools: Sequence[Any] | str | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    learns_all: bool = False,
) -> TokensAndMask:
    """Encode what is given and what is learned, which are both text or both messages.

    A conversation of which every answer is learned has no prompt. Without a `{% generation %}` mask
    an answer begins behind the header that the template puts before it, and ends with its
    end-of-turn token; white space behind that is no loss term.

    An answer of the weight 0 is given, and not learned.

    Two texts are joined as they are, and end with the tokenizer's end-of-text token. A token that
    holds a part of both is a loss term. The tokenizer is a fast one of Hugging Face. What cannot be
    encoded so is a ValueError.
    """
    if isinstance(prompt, str) and isinstance(completion, str):
        ids, counts = _encode_texts(tokenizer, prompt, completion)
        if learns_all:
            counts = [True] * len(ids)
        return ids, counts
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ValueError("prompt and completion have to be both text, or both lists of messages")
    chat = Chat(tokenizer, tools_of(tools), chat_template, chat_template_kwargs or {})
    whole = chat.with_arguments([*prompt, *completion])
    if learns_all:
        if any(message.get(MESSAGE_WEIGHT, 1) == 0 for message in completion):
            raise ValueError("a message has the weight 0, and every token is to be learned")
        ids, _ = chat.tokenize(chat.render(whole))
        return ids, [True] * len(ids)
    return chat.encode_answers(whole, first=len(prompt))


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


def _without(counts: Sequence[bool], answers: Sequence[int], learned: Sequence[int]) -> list[bool]:
    """Take out of a template's mask, a run of tokens for each answer, those not learned."""
    # Of each token the number of the run that it is in or behind, from 1
    runs, count, before = list[int](), 0, False
    for is_marked in counts:
        count += is_marked and not before
        runs.append(count)
        before = is_marked
    if count != len(answers):
        raise ValueError(
            f"the chat template marks {count} parts of {len(answers)} answers, so that the "
            f"one of weight 0 cannot be found; {_TEMPLATE}"
        )
    found = list[bool]()
    for is_marked, run in zip(counts, runs, strict=True):
        found.append(is_marked and answers[run - 1] in learned)
    return found


def _encode_texts(tokenizer: Any, prompt: str, completion: str) -> TokensAndMask:  # noqa: ANN401
    if not completion.strip():
        raise ValueError("the completion is empty, so that there is nothing to learn")
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    end = eos if eos and not completion.endswith(eos) else ""
    encoded = tokenizer(
        prompt + completion + end,
        # Those of the tokenizer begin with a BOS, of which the text may have one already.
        add_special_tokens=not (bos and prompt.startswith(bos)),
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

    def encode_answers(self, messages: Sequence[Message], first: int) -> TokensAndMask:
        """Mark the answers among the messages from index `first` on."""
        answers, learned = list[int](), list[int]()
        for i in range(first, len(messages)):
            if messages[i]["role"] == ASSISTANT:
                answers.append(i)
                if messages[i].get(MESSAGE_WEIGHT, 1):
                    learned.append(i)
        if not answers:
            raise ValueError("no message is of the assistant, so that there is nothing to learn")
        if _GENERATION.search(self.template()):
            begin = answers[0] if first else 0
            ids, counts = self.encode_marked(messages, begin)
            if learned != answers:
                counts = _without(counts, answers, learned)
            return ids, counts
        text = self.render(messages)
        ids, offsets = self.tokenize(text)
        counts = [False] * len(ids)
        for i in learned:
            for place in self.answer_tokens(messages, i, text, (ids, offsets)):
                counts[place] = True
        return ids, counts

    def encode_marked(self, messages: Sequence[Message], first: int) -> TokensAndMask:
        """Mark the tokens that the template's own mask marks, from message `first` on."""
        text = self.render(messages)  # within its limits, before it is tokenised
        how = {"return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
        encoded = self.apply(messages, return_dict=True, **how)
        ids, counts = encoded["input_ids"], [bool(each) for each in encoded["assistant_masks"]]
        if first:  # answers in a prompt are given, and not learned
            begin = self.prefix(messages, first, text, self.tokenize(text))[1]
            counts = [False] * begin + counts[begin:]
        if not any(counts):
            raise ValueError(
                "the chat template marks no token of the assistant in this conversation, though "
                f"it has {{% generation %}}; {_TEMPLATE}"
            )
        return ids, counts

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
            raise ValueError(
                f"the chat template renders what precedes {name} otherwise once it is answered, so "
                f"that its tokens cannot be found; {_MARKED}"
            )
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
        self,
        messages: Sequence[Message],
        i: int,
        text: str,
        encoded: IdsAndPlaces,
    ) -> range:
        """Find the tokens of answer `i`, its end-of-turn token included."""
        begin, num_given = self.prefix(messages, i, text, encoded)
        after = self.render(messages[: i + 1])
        if not text.startswith(after):  # some templates end a conversation by it, and no turn
            after = after.removesuffix(self.tokenizer.eos_token or "")
        if not text.startswith(after) or len(after) <= begin:
            raise ValueError(
                f"the chat template renders message {i + 1}, of the assistant, otherwise once more "
                "messages follow, as those do that drop earlier thoughts; make it a record whose "
                f"`prompt` is all that precedes its last answer, or {_MARKED}"
            )
        self.check_header(messages, i, text[begin : len(after)], before=text[:begin])
        end, stripped = len(after), after.rstrip()
        # Without white space behind it the tokens, of which there may be many, do not matter.
        if stripped != after and stripped.endswith(tuple(self.tokenizer.get_added_vocab())):
            end = len(stripped)  # what is behind the token that ends a turn is not learned
        return range(num_given, bisect_left(encoded[1], end, key=itemgetter(0)))

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
