"""Choose how records are encoded, by their format and by what all of them hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from typing import Any, final

from trainer.config.components import Overlong, Task
from trainer.core.errors import ConfigError, DataError
from trainer.data.conversation import MESSAGE_WEIGHT
from trainer.features.hugging_face import chat_encoder, encode, label_encoders, pair_encoder
from trainer.features.hugging_face.formats import Column, Format, column_value, columns_in
from trainer.features.hugging_face.labels import Labels, find_labels, find_several, labels_in
from trainer.features.hugging_face.preference_encoder import preference_fields, prompt_of
from trainer.features.hugging_face.records import RecordSource
from trainer.features.hugging_face.task import TASKS
from trainer.features.hugging_face.tokenizers import ends_of

_ANSWER_ENCODERS: Mapping[str, Callable[..., Any]] = {
    "chat": chat_encoder.answer_fields,
    "prompt and completion": chat_encoder.answer_fields,
    "instruction": chat_encoder.answer_fields,
    "preference": preference_fields,
    "comparison": partial(preference_fields, scores=True),
}
"""What encodes the formats of answers."""
OVERLONG: Mapping[str, Overlong] = {"text": "chunk", **dict.fromkeys(_ANSWER_ENCODERS, "drop")}
"""What becomes of longer records where nobody says; of all others the head is kept."""
GROUP_OF: Mapping[str, Callable[[encode.RoleValues], Any]] = {
    **{"pair": itemgetter("anchor"), "preference": prompt_of, "comparison": prompt_of}
}
"""By format, what records share that are held out together; of all others their ids."""
_WITHOUT_CLASSES = {
    "span": label_encoders.span_fields,
    "choices": label_encoders.choice_fields,
    "source and target": label_encoders.target_fields,
}


@final
@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """How records are encoded; see `HuggingFaceData`."""

    task: Task
    columns: Mapping[str, Column]
    model_labels: tuple[str, ...]
    label_names: tuple[str, ...] | None
    max_samples: int | None
    max_length: int
    overlong: Overlong | None
    of_answers: Mapping[str, Any]  # by the names of `OF_ANSWERS`
    # Whether labels are read; without them each record that is no sample is noted with its reason
    learns: bool = True
    of_numbers: bool = False  # whether labels are numbers, whatever they look like
    of_flags: bool = False  # whether several whole numbers are the classes that apply
    of_pairs: bool = True  # whether pairs of answers are read where another format fits, too
    # By column, the value or values of records that are kept
    filter_by: Mapping[str, Any] = field(default_factory=dict)
    # Name and columns of the format that a run read, for records without labels
    trained_format: Mapping[str, Any] | None = None
    # What scores, or labels that are numbers, mean where pairs are trained on; see `Pairs`
    pair_rule: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def for_objective(cls, typed: str | None, *, task: Task, **others: Any) -> EncodeOptions:  # noqa: ANN401 - fields
        """Make the options of a run, whose objective says what records are read as."""
        return cls(
            task=task,
            of_numbers=typed == "regression",
            of_flags=typed == "multi_label",
            of_pairs=typed != TASKS[task].objective,
            **others,
        )


def fields_of(
    source: RecordSource,
    parts: Mapping[str, Any],
    form: Format,
    tokenizer: Any,  # noqa: ANN401
    options: EncodeOptions,
) -> tuple[encode.FieldsOf, dict[str, Any]]:
    """Choose what encodes a record; labels and choices are looked at first."""
    if form.name == "text":
        ends = ends_of(tokenizer, is_causal=options.task == "causal_lm")
        return partial(encode.text_fields, ends=ends), {}
    if options.overlong == "chunk":
        raise ConfigError(
            f"data.overlong=chunk: a record of the format {form.name} is one sample, and is not "
            "divided; use drop or cut"
        )
    if form.name in _ANSWER_ENCODERS:
        encode_answers, scores = _ANSWER_ENCODERS[form.name], form.name == "comparison"
        if not (options.learns or scores):
            encode_answers = chat_encoder.prompt_fields
        facts: dict[str, Any] = {"num_classes": 1} if scores else {}
        return encode_answers, facts
    if form.name == "pair":
        classes = _stated(parts, form.columns.get("label")) or ()
        columns = {role: str(column) for role, column in form.columns.items()}
        place, records = f"data.path={source.path}", _by_role(source, parts, form)
        pairs = pair_encoder.look_at_pairs(place, columns, classes, records, options.pair_rule)
        return pairs, {"pairs": pairs.text, "pair_rule": pairs.rule, "rows": pairs.rows}
    if form.name in _WITHOUT_CLASSES:
        return _WITHOUT_CLASSES[form.name], {}
    encode_record: Any = label_encoders.label_fields
    if form.name == "tags":
        space = label_encoders.space_before_words(tokenizer)
        encode_record = partial(label_encoders.tag_fields, space=space)
    if not options.learns:
        return partial(encode_record, labels=None), {}
    labels = _labels(source, parts, form, options)
    return partial(encode_record, labels=labels), {
        "num_classes": labels.num_classes or 1,
        "label_names": labels.names,
        "label_kind": labels.kind,
        "are_whole": labels.are_whole,
    }


def weighs_samples(
    source: RecordSource, parts: Mapping[str, Any], form: Format, options: EncodeOptions
) -> bool:
    """Whether records, or their messages, say how often they count."""
    if "weight" in form.columns or not options.learns:
        return options.learns
    if form.name not in {"chat", "prompt and completion"} or source.kind == "csv":
        return False
    records = records_of_parts(source, parts)
    messages = chat_encoder.messages_in(form, records, "messages", "completion")
    # Of 0 and 1 the labels say it.
    return any(message.get(MESSAGE_WEIGHT) not in (None, 0, 1) for _, message in messages)


def _labels(
    source: RecordSource, parts: Mapping[str, Any], form: Format, options: EncodeOptions
) -> Labels:
    """Find the classes of all labels in a column, or in several."""
    column = form.columns[form.name]
    try:
        # A bad record is named where it is encoded.
        values: Iterator[Any] = (
            None if isinstance(record, ValueError) else column_value(record, column)
            for record in records_of_parts(source, parts)
        )
        # Most of the first ones say it.
        first = [*islice(values, 1000)]
        are_lists = [isinstance(each, list) for each in first if each is not None]
        is_list = sum(are_lists) > len(are_lists) / 2
        values = chain(first, values)
        names = options.label_names or options.model_labels
        # Cells of CSV are all text.
        if source.kind == "csv" and not is_list:
            values = labels_in(values, names)
        how = (_stated(parts, column), options.model_labels, options.label_names)
        if is_list and form.name != "tags":
            columns = () if isinstance(column, str) else tuple(column)
            return find_several(values, *how, columns=columns, of_flags=options.of_flags)
        if options.of_numbers:
            return Labels()
        if is_list:
            values = chain.from_iterable(each for each in values if isinstance(each, list))
        return find_labels(values, *how)
    except (ValueError, TypeError) as error:
        called = " and ".join(map(repr, columns_in(column)))
        raise DataError(f"data.path={source.path}: column {called}: {error}") from error


def _stated(parts: Mapping[str, Any], column: object) -> Sequence[str] | None:
    """Give the names of classes that the type of a column states, as `ClassLabel` does."""
    feature = next(iter(parts.values())).features.get(str(column))
    feature = getattr(feature, "feature", feature)  # of a list
    names: Sequence[str] | None = getattr(feature, "names", None)
    return names


def _by_role(
    source: RecordSource, parts: Mapping[str, Any], form: Format
) -> Iterator[tuple[str, int, encode.RoleValues]]:
    """Give all records by role with part and row; by no role those that are bad."""
    for part, records in parts.items():
        for row, record in enumerate(records_of_parts(source, {part: records})):
            values: encode.RoleValues = {}
            if not isinstance(record, ValueError):
                with suppress(ValueError):
                    values = form.take(record)
            yield part, row, values


def records_of_parts(source: RecordSource, parts: Mapping[str, Any]) -> Iterator[Any]:
    """Give the records of all parts one after the other."""
    for records in parts.values():
        for batch in records.iter(1000):
            yield from encode.records_of(batch, is_json=source.kind == "json")
