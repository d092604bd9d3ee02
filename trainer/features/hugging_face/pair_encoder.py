"""Encode pairs of texts: with hard negatives, with a score, or by what their labels say."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, final

from trainer.core.errors import DataError
from trainer.core.format import plural
from trainer.data.samples import INPUT_IDS
from trainer.features.hugging_face import encode
from trainer.features.hugging_face.encode import RoleValues, text_of
from trainer.features.hugging_face.task import WORDS

_ID_ROLES = ("id", "anchor_id", "positive_id")
_SHOWN = {"positive": "positive", "negative": "hard negative", "unused": "not used"}

PairRecords = Iterator[tuple[str, int, RoleValues]]
"""All records by role, with part and row; by no role those that are bad."""


@final
@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Encodes pairs, by what is known of all of them before."""

    # Rows of a sample behind the two of its pair
    num_negatives: int = 0
    # What holds in other data of a run: the `scale` that scores are divided by, or what labels say
    # that are `numbers`
    rule: Mapping[str, Any] = field(default_factory=dict)
    # Of pairs with labels, the hard negative of each positive that has one
    by_label: Mapping[tuple[str, str], str] = field(default_factory=dict)
    # By part, which records are samples; None are all
    rows: Mapping[str, Sequence[int]] | None = None
    # What was found, for a person
    text: str = ""

    def __call__(self, encoder: encode.RecordEncoder, record: RoleValues) -> encode.RecordFields:
        """Encode the texts of a record as a row each; or the first alone."""
        texts = [text_of(record, role) for role in ("anchor", "positive") if role in record]
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
        fields: dict[str, Any] = encoder.padded(found)
        # They are 0 of a single text, as a model that gets none takes them.
        fields.pop(encode.TYPE_IDS, None)
        if "score" in record:
            fields["score"] = encode.number_of(record, "score") / self.rule["scale"]
        for role in _ID_ROLES:
            if role in record:
                # Without one a pair is as its texts are.
                known = texts[:2] if record[role] in (None, "") else record[role]
                digest = hashlib.blake2b(repr(known).encode(), digest_size=8).digest()
                fields[role] = int.from_bytes(digest, signed=True)
        return fields


def look_at_pairs(
    place: str,
    columns: Mapping[str, str],
    classes: Sequence[str],
    records: PairRecords,
    trained: Mapping[str, Any],
) -> Pairs:
    """Find out of all records what encoding one of them takes.

    `columns` are by role; `classes` are what a column of numbers calls them, if it does; `trained`
    is the rule of the data that are trained on, where these are others.
    """
    roles = [role for role in columns if role in {"score", "label"} or role.startswith("negative")]
    if len(roles) > 1 and {"score", "label"} & {*roles}:
        several = " and ".join(repr(columns[role]) for role in roles)
        raise DataError(
            f"{place}: {several} each say what a pair is; leave all but one out, e.g. "
            f"'data.columns={{{columns[roles[-1]]}:null}}'"
        )
    if "score" in columns:
        return _scored(place, columns["score"], records, trained.get("scale"))
    if "label" in columns:
        return _labelled(place, columns, classes, records, trained.get("numbers"))
    counts = Counter[int]()
    for _, _, record in records if roles else ():
        with suppress(ValueError):
            counts[len(_negatives_of(record))] += 1
    most, least = max(counts, default=0), min(counts, default=0)
    text = f"{least} to {most} hard negatives each"
    if most == least:
        text = f"{plural(most, 'hard negative')} each"
    return Pairs(num_negatives=most, text=text if roles else "")


def _scored(place: str, column: str, records: PairRecords, trained: float | None) -> Pairs:
    """Find what all scores are divided by."""
    scores = [0.0]
    for _, _, record in records:
        # One that is bad is named where it is encoded.
        with suppress(ValueError, KeyError):
            scores.append(encode.number_of(record, "score"))
    least, most = min(scores), max(scores)
    for scale in [trained] if trained else WORDS["pair_scales"]:
        if max(most, -least) <= scale:
            text = f"scores of {least:g} to {most:g}"
            if scale > 1:
                text += f" divided by {scale:g}"
            return Pairs(rule={"scale": scale}, text=text)
    raise DataError(
        f"{place}: column {column!r} has scores up to {max(most, -least):g}; divide them, so that "
        f"texts of one meaning have {trained or 1:g}"
    )


def _labelled(
    place: str,
    columns: Mapping[str, str],
    classes: Sequence[str],
    records: PairRecords,
    trained: Mapping[str, str] | None,
) -> Pairs:
    """Find the records of positives, and for each a hard negative of the same first text.

    The first positive of a text gets its first negative, the second one the second, and so on;
    where negatives are fewer they come again.
    """
    pairs = list[tuple[str, int, str, tuple[str, str]]]()
    for part, row, record in records:
        texts = str(record.get("anchor")), str(record.get("positive"))
        pairs.append((part, row, _label_of(record, classes), texts))
    labels = {label for _, _, label, _ in pairs} - {""}
    meanings = _meanings(place, columns, labels, trained or {})
    rows = defaultdict[str, list[int]](list)
    found = {meaning: defaultdict[tuple[str, str], list[str]](list) for meaning in _SHOWN}
    for part, row, label, (anchor, positive) in pairs:
        meaning = meanings.get(label)
        # One that is bad is named where it is encoded.
        if meaning in {None, "positive"}:
            rows[part].append(row)
        if meaning is not None:
            found[meaning][part, anchor].append(positive)
    by_label, num_samples = dict[tuple[str, str], str](), [0, 0]
    for (part, anchor), positives in found["positive"].items():
        negatives = found["negative"].get((part, anchor), [])
        num_samples[bool(negatives)] += len(positives)
        for i, positive in enumerate(positives if negatives else ()):
            # Of a pair that is there twice, and in two parts, the first counts.
            by_label.setdefault((anchor, positive), negatives[i % len(negatives)])
    words = ", ".join(f"{label} {_SHOWN[meanings[label]]}" for label in sorted(labels))
    if not found["positive"]:
        column = columns["label"]
        raise DataError(f"{place}: column {column!r} has no positive ({words or 'no label'})")
    text = (
        f"{num_samples[1]:,} with a hard negative and {num_samples[0]:,} without, of "
        f"{plural(len(pairs), 'record')} ({words})"
    )
    # Words say the same everywhere.
    numbers = {} if meanings is WORDS["pair_words"] else meanings
    for i, name in enumerate(classes):
        if name.casefold() in meanings:
            numbers = {**numbers, str(i): meanings[name.casefold()]}
    return Pairs(
        num_negatives=int(bool(by_label)),
        rule={"numbers": numbers},
        by_label=by_label,
        rows=rows,
        text=text,
    )


def _meanings(
    place: str, columns: Mapping[str, str], labels: set[str], trained: Mapping[str, str]
) -> Mapping[str, str]:
    """Tell what each label says of a pair; numbers say what they do where they are `trained`."""
    words, numbers, bits = (WORDS[f"pair_{name}"] for name in ("words", "numbers", "bits"))
    if labels <= words.keys():
        return words  # type: ignore[no-any-return] # of YAML
    column, beside = columns["label"], columns["positive"]
    known = trained or (numbers if "2" in labels else bits)
    if not labels <= known.keys():
        takes = ", ".join(trained) or "entailment, neutral and contradiction, or 0 and 1"
        raise DataError(
            f"{place}: column {column!r} has the labels {', '.join(sorted(labels)[:5])}, and pairs "
            f"take {takes}; for scores type 'data.columns={{score: {column}}}'"
        )
    if known is bits and {column, beside}.isdisjoint(WORDS["pair_bits_of"]):
        raise DataError(
            f"{place}: column {column!r} has 0 and 1, and beside {beside!r} 0 may mean entailment, "
            "or no duplicate: write entailment and not_entailment, or duplicate and not_duplicate"
        )
    return known


def _label_of(record: RoleValues, classes: Sequence[str]) -> str:
    """Write a label as `pair_words` has it; nothing where there is none."""
    value = encode.number_in(record.get("label"))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if classes and isinstance(value, int) and 0 <= value < len(classes):
        value = classes[value]
    return "" if value is None else str(value).casefold()


def _negatives_of(record: RoleValues) -> list[str]:
    """Give the hard negatives of a record, in their columns' order; cells may be empty."""
    found = list[str]()
    for role, value in record.items():
        if role.startswith("negative"):
            for each in value if isinstance(value, list) else [value]:
                if each not in (None, ""):
                    found.append(text_of({role: each}, role))
    return found
