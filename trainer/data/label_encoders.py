"""Encode records that have labels: one for a text or pair, one for each word, a span, a choice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from trainer.data.collate import ATTENTION_MASK, IGNORED_LABEL, LABELS
from trainer.data.encode import LONGER, DroppedError, Record, RecordEncoder, pad_token_of, text_of
from trainer.data.samples import INPUT_IDS
from trainer.data.token_samples import Kind, packed_fields

TYPE_IDS = "token_type_ids"
_ENDINGS = ("ending0", "ending1", "ending2", "ending3")


@final
@dataclass(frozen=True)
class Labels:
    """The labels of a data set."""

    names: tuple[str, ...] | None  # of the classes, where labels are words
    num_classes: int | None  # None where they are real numbers
    numbers: Mapping[object, int] = field(default_factory=dict)  # of classes by what stands for one

    def number(self, value: object) -> int | float:
        """Give the number of a label.

        Raises:
            ValueError: it is none, or no class.
        """
        if value in self.numbers:
            return self.numbers[value]
        if self.num_classes is None and isinstance(value, int | float) and np.isfinite(value):
            return float(value)
        is_class = self.names is None and isinstance(value, int) and self.num_classes is not None
        if is_class and 0 <= value < self.num_classes:  # type: ignore[operator] # an int
            return int(value)  # type: ignore[call-overload, no-any-return] # an int
        classes = f"one of {', '.join(self.names)}" if self.names else "a number from 0"
        raise ValueError(f"the label {value!r} is not {classes}")


def labels_of(
    values: Iterable[object],
    stated: Sequence[str] | None = None,
    model: Sequence[str] = (),
    fixed: Sequence[str] = (),
) -> Labels:
    """Find the classes of all labels: words in their order, or numbers from 0.

    Args:
        values: all of them.
        stated: names of numbers, where the data state them.
        model: names that the model's head has, which count where they are all of the data's.
        fixed: names that count in any case.

    Raises:
        ValueError: they are neither words nor numbers, or both.
    """
    distinct = {value for value in values if value is not None}
    kinds = {type(value) for value in distinct}
    if stated is not None or kinds == {str}:
        words = [*map(str, stated or sorted(map(str, distinct)))]
        names = fixed or (model if {*words} <= {*model} else words)
        numbers: dict[object, int] = {word: number for number, word in enumerate(names)}
        numbers |= {i: numbers[word] for i, word in enumerate(stated or ()) if word in numbers}
        return Labels(tuple(names), len(names), numbers)
    if kinds <= {int, bool}:
        most = max((int(value) for value in distinct), default=0)  # type: ignore[call-overload]
        return Labels(None, max(1 + most, len(model)))
    if kinds <= {int, float}:
        return Labels(None, None)
    raise ValueError(f"labels are of the types {', '.join(sorted(k.__name__ for k in kinds))}")


@dataclass(frozen=True, kw_only=True)
class _Labelled(RecordEncoder):
    """What encoders of labelled records have in common."""

    labels: Labels

    def tokenize(self, *texts: Any, **how: Any) -> Any:  # noqa: ANN401 - a BatchEncoding
        """Tokenize, with special tokens; cut to `max_length` where the settings say so.

        Raises:
            DroppedError: it is longer, and longer ones are dropped.
        """
        cuts = {"truncation": how.pop("truncation", True), "max_length": self.max_length}
        found = self.tokenizer(*texts, **(cuts if self.overlong == "cut" else {}), **how)
        ids = found[INPUT_IDS]
        rows = ids if ids and isinstance(ids[0], list) else [ids]
        if max(map(len, rows)) > self.max_length:
            raise DroppedError(LONGER)
        return found

    @property
    def type_ids(self) -> dict[str, Kind]:
        """Whether the tokenizer tells two texts apart by numbers."""
        names = getattr(self.tokenizer, "model_input_names", ())
        return {TYPE_IDS: "ids"} if TYPE_IDS in names else {}

    def packed(self, found: Mapping[str, Any], **others: Any) -> bytes:  # noqa: ANN401 - numbers
        """Put the fields of a sample together, in the order of `fields`."""
        return packed_fields([others[n] if n in others else found[n] for n in self.fields])


@final
@dataclass(frozen=True, kw_only=True)
class LabelEncoder(_Labelled):
    """Encodes a text, or a pair, with its label."""

    is_pair: bool

    @property
    def fields(self) -> dict[str, Kind]:
        """The fields of a sample, by name."""
        kind: Kind = "real" if self.labels.num_classes is None else "number"
        return {INPUT_IDS: "ids", **(self.type_ids if self.is_pair else {}), LABELS: kind}

    def encode(self, record: Record) -> bytes:
        """Give the bytes of a sample."""
        texts = [text_of(record, role) for role in ("text", "text_pair") if role in record]
        label = self.labels.number(record["label"])
        return self.packed(self.tokenize(*texts), labels=[label])


@final
@dataclass(frozen=True, kw_only=True)
class TagEncoder(_Labelled):
    """Encodes words with a tag each; special tokens and later pieces of a word have none."""

    @property
    def fields(self) -> dict[str, Kind]:
        """The fields of a sample, by name."""
        return {INPUT_IDS: "ids", LABELS: "ids"}

    def encode(self, record: Record) -> bytes:
        """Give the bytes of a sample."""
        words, tags = record["tokens"], record["tags"]
        if not (isinstance(words, list) and isinstance(tags, list)) or len(words) != len(tags):
            raise ValueError("tokens and tags are not two lists of one length")
        if not words:
            raise DroppedError("without words")
        numbers = [self.labels.number(tag) for tag in tags]
        found = self.tokenize(words, is_split_into_words=True)
        ids, before = [], None
        for word in found.word_ids():
            ids.append(IGNORED_LABEL if word is None or word == before else numbers[word])
            before = word
        return self.packed(found, labels=ids)


@final
@dataclass(frozen=True, kw_only=True)
class SpanEncoder(_Labelled):
    """Encodes a question, a context, and where in its tokens the answer is; 0 is for none."""

    @property
    def fields(self) -> dict[str, Kind]:
        """The fields of a sample, by name."""
        ends: dict[str, Kind] = {"start_positions": "number", "end_positions": "number"}
        return {INPUT_IDS: "ids", **self.type_ids, **ends}

    def encode(self, record: Record) -> bytes:
        """Give the bytes of a sample."""
        question, context = text_of(record, "question"), text_of(record, "context")
        span = _answer(record["answers"], context)
        found = self.tokenize(
            question, context, truncation="only_second", return_offsets_mapping=True
        )
        begin, end = (0, 0) if span is None else _tokens_of(span, found)
        return self.packed(found, start_positions=[begin], end_positions=[end])


@final
@dataclass(frozen=True, kw_only=True)
class ChoiceEncoder(_Labelled):
    """Encodes a question with each of its choices; `labels` is the right one."""

    num_choices: int

    @property
    def fields(self) -> dict[str, Kind]:
        """The fields of a sample, by name."""
        names = {INPUT_IDS, ATTENTION_MASK, *self.type_ids}
        return {**dict.fromkeys(sorted(names), "rows"), LABELS: "number"}

    def encode(self, record: Record) -> bytes:
        """Give the bytes of a sample."""
        first, choices, label = _choices(record)
        if len(choices) != self.num_choices:
            raise ValueError(f"{len(choices)} choices, and the first record has {self.num_choices}")
        if not 0 <= label < len(choices):
            raise ValueError(f"the label {label!r} is none of its {len(choices)} choices")
        found = self.tokenize([first] * len(choices), choices, return_attention_mask=True)
        longest, pad = max(map(len, found[INPUT_IDS])), pad_token_of(self.tokenizer)
        rows = {
            name: [r + [pad if name == INPUT_IDS else 0] * (longest - len(r)) for r in found[name]]
            for name in self.fields
            if name in found
        }
        return self.packed(rows, labels=[label])


@final
@dataclass(frozen=True, kw_only=True)
class TargetEncoder(RecordEncoder):
    """Encodes a source and a target, whose ids are the labels of an encoder-decoder."""

    @property
    def fields(self) -> dict[str, Kind]:
        """The fields of a sample, by name."""
        return {INPUT_IDS: "ids", LABELS: "ids"}

    def encode(self, record: Record) -> bytes:
        """Give the bytes of a sample."""
        cuts = {}
        if self.overlong == "cut":
            cuts = {"truncation": True, "max_length": self.max_length}
        source = self.tokenizer(text_of(record, "source"), **cuts)[INPUT_IDS]
        target = self.tokenizer(text_target=text_of(record, "target"), **cuts)[INPUT_IDS]
        if max(len(source), len(target)) > self.max_length:
            raise DroppedError(LONGER)
        return packed_fields([source, target])


def _answer(answers: Any, context: str) -> tuple[int, int] | None:  # noqa: ANN401 - any JSON
    """Find the first answer in its context, in characters; None where there is none."""
    if isinstance(answers, list):
        answers = {k: [a.get(k) for a in answers] for k in ("text", "answer_start")}
    if not isinstance(answers, Mapping) or not {"text", "answer_start"} <= answers.keys():
        raise ValueError("its answers have no text and answer_start")
    if not answers["text"]:
        return None
    text, begin = answers["text"][0], answers["answer_start"][0]
    if not text or context[begin : begin + len(text)] != text:
        raise ValueError(f"its answer {text!r} does not stand at character {begin} of its context")
    return begin, begin + len(text)


def _tokens_of(span: tuple[int, int], found: Any) -> tuple[int, int]:  # noqa: ANN401
    """Turn characters of the context into its first and last token."""
    begin, end = span
    inside = [
        place
        for place, (part, (start, stop)) in enumerate(
            zip(found.sequence_ids(), found["offset_mapping"], strict=True)
        )
        if part == 1 and start < end and stop > begin
    ]
    if not inside or found["offset_mapping"][inside[-1]][1] < end:
        raise DroppedError("without their answer once they are cut")
    return inside[0], inside[-1]


def _choices(record: Record) -> tuple[str, list[str], int]:
    """Give what is asked, the choices, and the number of the right one."""
    if "sent1" in record:
        begin = record["sent2"] or ""
        return record["sent1"], [f"{begin} {record[e]}" for e in _ENDINGS], record["label"]
    choices, answer = record["choices"], record["answer"]
    letters = [*"ABCDEFGHIJ"]
    if isinstance(choices, Mapping):
        letters, choices = choices["label"], choices["text"]
    if isinstance(answer, str):
        answer = choices.index(answer) if answer in choices else letters.index(answer)
    return record["question"], choices, answer


def values_of(records: Iterator[Mapping[str, Any] | ValueError], column: str) -> Iterator[object]:
    """Give the labels of all records, one by one also where a record has a list of them."""
    for record in records:
        value = None if isinstance(record, ValueError) else record.get(column)
        yield from value if isinstance(value, list) else [value]
