"""Encode records that have labels: one for a text or pair, one for each word, a span, a choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.core.micro_batch import IGNORED
from trainer.data.collate import LABELS
from trainer.data.samples import CHARACTERS, INPUT_IDS
from trainer.features.hugging_face.encode import (
    TYPE_IDS,
    DroppedError,
    RecordEncoder,
    RecordFields,
    RoleValues,
    number_in,
    text_of,
)
from trainer.features.hugging_face.labels import Labels


def label_fields(
    encoder: RecordEncoder, record: RoleValues, labels: Labels | None = None
) -> RecordFields:
    """Encode a text, or a pair, with its label where labels are known."""
    texts = [text_of(record, role) for role in ("text", "text_pair") if role in record]
    label = dict[str, Any]()
    if labels is not None:
        label[LABELS] = labels.value(record["label"])
    found = encoder.tokenize(*texts)
    fields: dict[str, Any] = {INPUT_IDS: found[INPUT_IDS]}
    # Of a single text they are all 0, as a model that gets none takes them.
    if len(texts) > 1 and TYPE_IDS in found:
        fields[TYPE_IDS] = found[TYPE_IDS]
    return fields | label


def space_before_words(tokenizer: Any) -> str:  # noqa: ANN401 - whatever the tokenizer is
    """Give a space where a tokenizer, such as RoBERTa's, takes words in a row for one."""
    ids = tokenizer(["a", "a"], is_split_into_words=True, add_special_tokens=False)[INPUT_IDS]
    return " " if tokenizer.decode(ids).strip() == "aa" else ""


def tag_fields(
    encoder: RecordEncoder, record: RoleValues, labels: Labels | None, space: str
) -> RecordFields:
    """Encode words with a tag each; special tokens and later pieces of a word have none.

    Where no labels are known the tag 0 says that one is wanted.
    """
    words = record["tokens"]
    numbers: list[int | float] = []
    if labels is None:
        if isinstance(words, str):
            words = words.split()
        if not isinstance(words, list):
            raise ValueError("its tokens are neither a list nor a text of words")
        numbers = [0] * len(words)
    else:
        tags = record["tags"]
        if not (isinstance(words, list) and isinstance(tags, list)) or len(words) != len(tags):
            raise ValueError("tokens and tags are not two lists of one length")
        numbers = [*map(labels.number, tags)]
    if not words:
        raise DroppedError("without words")
    for each in words:
        if not isinstance(each, str):
            raise ValueError(f"a word is of type {type(each).__name__}, not a string")
    found = encoder.tokenize([space + word for word in words], is_split_into_words=True)
    of_tokens, before = [], None
    for word in found.word_ids():
        if word is None or word == before:
            of_tokens.append(IGNORED)
        else:
            of_tokens.append(numbers[word])
        before = word
    return {INPUT_IDS: found[INPUT_IDS], LABELS: of_tokens}


def span_fields(encoder: RecordEncoder, record: RoleValues) -> RecordFields:
    """Encode a question, a context, and where in its tokens the answer is; 0 is for none."""
    question, context = text_of(record, "question"), text_of(record, "context")
    span, is_asked = None, "answers" not in record
    if not is_asked:
        span = _answer(record["answers"], context)
    found = encoder.tokenize(
        question, context, truncation="only_second", return_offsets_mapping=True
    )
    # The first token, as the field marks a question without an answer
    begin, end = 0, 0
    if span is not None:
        begin, end = _tokens_of(span, found)
    fields: dict[str, Any] = {INPUT_IDS: found[INPUT_IDS]}
    if TYPE_IDS in found:
        fields[TYPE_IDS] = found[TYPE_IDS]
    if is_asked:
        return {**fields, **_characters(found)}
    return {**fields, "start_positions": begin, "end_positions": end}


def _characters(found: Any) -> RecordFields:  # noqa: ANN401 - a BatchEncoding
    """Say which characters of the context each token stands for."""
    begins, ends = list[int](), list[int]()
    for part, (begin, end) in zip(found.sequence_ids(), found["offset_mapping"], strict=True):
        # 0 is the question, and special tokens stand for nothing.
        if part != 1 or begin == end:
            begin, end = -1, -1  # noqa: PLW2901
        begins.append(begin)
        ends.append(end)
    return dict(zip(CHARACTERS, (begins, ends), strict=True))


def choice_fields(encoder: RecordEncoder, record: RoleValues) -> RecordFields:
    """Encode a question with each of its choices; `labels` is the right one."""
    first, choices, label = choices_of(record)
    label = number_in(label)
    is_asked = record.keys().isdisjoint(("label", "answer"))
    if not is_asked and (not isinstance(label, int) or not 0 <= label < len(choices)):
        raise ValueError(f"the label {label!r} is none of its {len(choices)} choices")
    found = encoder.tokenize([first] * len(choices), choices, return_attention_mask=True)
    fields: dict[str, Any] = {**encoder.padded(found)}
    if not is_asked:
        fields[LABELS] = label
    return fields


def target_fields(encoder: RecordEncoder, record: RoleValues) -> RecordFields:
    """Encode a source and a target, whose ids are the labels of an encoder-decoder."""
    source = encoder.tokenize(text_of(record, "source"))
    if "target" not in record:
        return {INPUT_IDS: source[INPUT_IDS]}
    target = encoder.tokenize(text_target=text_of(record, "target"))
    return {INPUT_IDS: source[INPUT_IDS], LABELS: target[INPUT_IDS]}


def _answer(answers: Any, context: str) -> tuple[int, int] | None:  # noqa: ANN401 - any JSON
    """Find the first answer in its context, in characters; None where there is none."""
    if isinstance(answers, list):
        # JSON has a list of objects, which `datasets` may store as an object of lists.
        turned: dict[str, list[Any]] = {"text": [], "answer_start": []}
        for answer in answers:
            for key, column in turned.items():
                column.append(answer.get(key))
        answers = turned
    if not isinstance(answers, Mapping) or not {"text", "answer_start"} <= answers.keys():
        raise ValueError("its answers have no text and answer_start")
    texts, begins = answers["text"], answers["answer_start"]
    if not (isinstance(texts, list) and isinstance(begins, list) and len(texts) == len(begins)):
        raise ValueError("text and answer_start of its answers are not two lists of one length")
    if not texts:
        return None
    text, begin = texts[0], begins[0]
    if not text or context[begin : begin + len(text)] != text:
        raise ValueError(f"its answer {text!r} does not stand at character {begin} of its context")
    return begin, begin + len(text)


def _tokens_of(span: tuple[int, int], found: Any) -> tuple[int, int]:  # noqa: ANN401
    """Turn characters of the context into its first and last token."""
    (begin, end), offsets = span, found["offset_mapping"]
    inside = list[int]()
    for place, part in enumerate(found.sequence_ids()):
        first, last = offsets[place]
        if part == 1 and first < end and last > begin:  # 0 is the question
            inside.append(place)
    if not inside or offsets[inside[-1]][1] < end:
        raise DroppedError("without their answer once they are cut")
    return inside[0], inside[-1]


def choices_of(record: RoleValues) -> tuple[str, list[str], Any]:
    """Give what is asked, the choices, and the number of the right one, or a ValueError."""
    if "sent1" in record:
        begin = record["sent2"] or ""
        endings = [f"{begin} {record[f'ending{i}']}" for i in range(4)]
        return record["sent1"], endings, record.get("label")
    choices, answer = record["choices"], record.get("answer")
    letters = [*"ABCDEFGHIJ"]
    if isinstance(choices, Mapping):
        letters, choices = choices["label"], choices["text"]
    if not isinstance(choices, list):
        raise ValueError(f"its choices are of type {type(choices).__name__}, not a list")
    if isinstance(answer, str):
        # A letter, unless it is one of the choices themselves
        texts = choices if answer in choices else letters
        answer = texts.index(answer)
    return record["question"], choices, answer
