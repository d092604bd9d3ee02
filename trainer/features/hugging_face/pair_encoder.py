"""Encode pairs of texts: with hard negatives, with a score, or by what their labels say."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, final

from trainer.core.errors import DataError
from trainer.core.format import plural
from trainer.data.samples import INPUT_IDS
from trainer.features.hugging_face.encode import (
    RecordEncoder,
    RecordFields,
    RoleValues,
    number_in,
    text_of,
)
from trainer.features.hugging_face.label_encoders import TYPE_IDS, padded_rows
from trainer.features.hugging_face.task import WORDS

_ID_ROLES = ("id", "anchor_id", "positive_id")
_LABELS: Sequence[Mapping[str, str]] = WORDS["pair_labels"]
_SHOWN = {"positive": "positive", "negative": "hard negative", "unused": "not used"}

Read = Callable[[], Iterator[tuple[str, int, RoleValues]]]
"""Reads all records anew, by role, with part and row; by no role those that are bad."""


@final
@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Encodes pairs, by what is known of all of them before."""

    # Rows of a sample behind the two of its pair
    num_negatives: int = 0
    scale: float = 1.0  # what scores are divided by
    # Of pairs with labels, the hard negative of each positive that has one
    by_label: Mapping[tuple[str, str], str] = field(default_factory=dict)
    # By part, which records are samples; None are all
    rows: Mapping[str, Sequence[int]] | None = None
    # What was found, for a person
    text: str = ""

    def __call__(self, encoder: RecordEncoder, record: RoleValues) -> RecordFields:
        """Encode the texts of a record as a row each; or the first alone."""
        texts = [text_of(record, "anchor")]
        if "positive" in record:
            texts.append(text_of(record, "positive"))
        negatives = _negatives_of(record)
        if "label" in record:
            if record["label"] in (None, ""):
                raise ValueError("it has no label")
            negatives = [*filter(None, [self.by_label.get((texts[0], texts[1]))])]
        # A row without a negative has the positive, which is no negative of its own sample.
        texts += [*negatives, *[texts[-1]] * (self.num_negatives - len(negatives))]
        found = encoder.tokenize(texts, return_attention_mask=True)
        if not all(found[INPUT_IDS]):
            raise ValueError("one of its texts has no tokens")
        fields: dict[str, Any] = padded_rows(found, encoder.tokenizer)
        # They are 0 of a single text, as a model that gets none takes them.
        fields.pop(TYPE_IDS, None)
        if "score" in record:
            fields["score"] = _score_of(record) / self.scale
        for role in _ID_ROLES:
            if role in record:
                # Without one a pair is as its texts are.
                known = texts[:2] if record[role] in (None, "") else record[role]
                digest = hashlib.blake2b(repr(known).encode(), digest_size=8).digest()
                fields[role] = int.from_bytes(digest, signed=True)
        return fields


def look_at_pairs(
    place: str, columns: Mapping[str, str], classes: Sequence[str], read: Read
) -> Pairs:
    """Find out of all records what encoding one of them takes.

    `columns` are by role; `classes` are what a column of numbers calls them, if it does.
    """
    roles = [role for role in columns if role in {"score", "label"} or role.startswith("negative")]
    if len(roles) > 1 and {"score", "label"} & {*roles}:
        several = " and ".join(repr(columns[role]) for role in roles)
        raise DataError(
            f"{place}: {several} each say what a pair is; leave all but one out, e.g. "
            f"'data.columns={{{columns[roles[-1]]}:null}}'"
        )
    if "score" in columns:
        return _scored(place, columns["score"], read)
    if "label" in columns:
        return _labelled(place, columns["label"], classes, read)
    counts = Counter[int]()
    for _, _, record in read() if roles else ():
        with suppress(ValueError):
            counts[len(_negatives_of(record))] += 1
    most, least = max(counts, default=0), min(counts, default=0)
    text = f"{least} to {most} hard negatives each"
    if most == least:
        text = f"{plural(most, 'hard negative')} each"
    return Pairs(num_negatives=most, text=text if roles else "")


def _scored(place: str, column: str, read: Read) -> Pairs:
    """Find what all scores are divided by."""
    scores = [0.0]
    for _, _, record in read():
        # One that is bad is named where it is encoded.
        with suppress(ValueError):
            scores.append(_score_of(record))
    least, most = min(scores), max(scores)
    for scale in WORDS["pair_scales"]:
        if max(most, -least) <= scale:
            text = f"scores of {least:g} to {most:g}"
            if scale > 1:
                text += f" divided by {scale}"
            return Pairs(scale=scale, text=text)
    raise DataError(
        f"{place}: column {column!r} has scores up to {max(most, -least):g}; divide them, so that "
        "texts of one meaning have 1"
    )


def _labelled(place: str, column: str, classes: Sequence[str], read: Read) -> Pairs:
    """Find the records of positives, and for each a hard negative of the same first text.

    The first positive of a text gets its first negative, the second one the second, and so on;
    where negatives are fewer they come again.
    """
    labels = {_label_of(record, classes) for _, _, record in read()} - {""}
    meanings = next((each for each in _LABELS if labels <= each.keys()), None)
    if meanings is None:
        raise DataError(
            f"{place}: column {column!r} has the labels {', '.join(sorted(labels)[:5])}, and pairs "
            "take entailment, neutral and contradiction, or 0 and 1; for scores type "
            f"'data.columns={{score: {column}}}'"
        )
    rows, num_records = defaultdict[str, list[int]](list), 0
    texts = {meaning: defaultdict[tuple[str, str], list[str]](list) for meaning in _SHOWN}
    for part, row, record in read():
        num_records += 1
        meaning = meanings.get(_label_of(record, classes))
        # One that is bad is named where it is encoded.
        if meaning in {None, "positive"}:
            rows[part].append(row)
        if meaning is not None:
            texts[meaning][part, str(record["anchor"])].append(str(record["positive"]))
    by_label, num_samples = dict[tuple[str, str], str](), [0, 0]
    for (part, anchor), positives in texts["positive"].items():
        negatives = texts["negative"].get((part, anchor), [])
        num_samples[bool(negatives)] += len(positives)
        for i, positive in enumerate(positives if negatives else ()):
            # Of a pair that is there twice, and in two parts, the first counts.
            by_label.setdefault((anchor, positive), negatives[i % len(negatives)])
    words = ", ".join(f"{label} {_SHOWN[meanings[label]]}" for label in sorted(labels))
    if not texts["positive"]:
        raise DataError(f"{place}: column {column!r} has no positive ({words or 'no label'})")
    text = (
        f"{num_samples[1]:,} with a hard negative and {num_samples[0]:,} without, of "
        f"{plural(num_records, 'record')} ({words})"
    )
    return Pairs(num_negatives=int(bool(by_label)), by_label=by_label, rows=rows, text=text)


def _label_of(record: RoleValues, classes: Sequence[str]) -> str:
    """Write a label as `pair_labels` has it; nothing where there is none."""
    value = record.get("label")
    if isinstance(value, str):
        value = number_in(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if classes and isinstance(value, int) and 0 <= value < len(classes):
        value = classes[value]
    return "" if value is None else str(value).casefold()


def _score_of(record: RoleValues) -> float:
    """Give the score of a record; a ValueError where it is none."""
    value = record.get("score")
    if isinstance(value, str):
        value = number_in(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"its score is {value!r}, which is no number")
    return float(value)


def _negatives_of(record: RoleValues) -> list[str]:
    """Give the hard negatives of a record, in their columns' order; cells may be empty."""
    found = list[str]()
    for role, value in record.items():
        if role.startswith("negative"):
            for each in value if isinstance(value, list) else [value]:
                if each not in (None, ""):
                    found.append(text_of({role: each}, role))
    return found
