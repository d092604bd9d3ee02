"""Say what records were recognised as, and count the labels of each class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core.format import plural
from trainer.core.micro_batch import IGNORED
from trainer.core.rows import Row, join_parts, row
from trainer.data.described import MOST_CLASSES
from trainer.data.documents import REAL, STORED
from trainer.data.index import Index
from trainer.features.hugging_face.formats import columns_in
from trainer.features.hugging_face.task import WORDS
from trainer.plan.cut import IntArray

COUNTED = ("classes", "flags")
"""Kinds of labels that are counted."""


def record_rows(
    known: Mapping[str, Any], lengths: IntArray, max_length: int, *, learns: bool
) -> list[Row]:
    """Say what the records were recognised as, and what became of the others.

    `known` are the facts of the cache, and `lengths`, `(samples,)`, of at most so many tokens.
    """
    form, dropped, unread = known["format"], known["dropped"], known["unread"]
    kind, cut = form, 0
    if not learns:
        # `predict` has a line for each that is left out.
        kind, dropped = WORDS["formats"][form]["asked"], {}
        # What is left of a longer record has just so many tokens.
        if known["overlong"] == "cut":
            cut = int(np.count_nonzero(lengths >= max_length))
    columns = list[str]()
    for role, column in known["columns"].items():
        place = f"{role}: {' and '.join(columns_in(column))}"
        columns.append(role if column == role else place)
    count, (divided, answers) = sum(dropped.values()), known["divided"]
    text = join_parts(
        f"{kind} ({', '.join(columns)})",
        known.get("pairs"),
        known["kept"] and "{:,} of {:,} records by data.filter".format(*known["kept"]),
        count and f"{count:,} left out",
        divided
        and f"{plural(divided, 'conversation')} became {answers:,} samples, one for each answer",
        known.get("are_whole") and "real numbers, as 5.0 is (5 would be a class)",
        cut and f"{cut:,} of data.max_length={max_length} tokens, the rest is not read",
        learns and unread and f"{plural(len(unread), 'column')} not read",
    )
    about = {"data_format": form, "data_columns": known["columns"]}
    more = join_parts(
        *(f"{count:,} {why} left out" for why, count in dropped.items()),
        known["other_parts"] and f"other parts: {', '.join(known['other_parts'])}",
        unread and f"not read: {', '.join(unread)}",
    )
    return [
        row("", text, group="asked", **about),
        row("", more, num_dropped=dropped, unread_columns=unread, divided=known["divided"]),
    ]


def count_classes(index: Index, records: IntArray) -> IntArray:
    """Count the labels of each class, `(classes,)`, or how often each of several applies."""
    known, are_flags = index.facts, index.facts["label_kind"] == "flags"
    count, labels = known["num_classes"], list[npt.NDArray[Any]]()
    if known["format"] == "tags":
        for record in records.tolist():
            numbers = index.entry(record, STORED)
            labels.append(numbers[-int(numbers[len(known["kinds"]) - 1]) :])
    else:
        ends = index.offsets[1:][records, None] // STORED.itemsize
        last = np.arange(-count if are_flags else -1, 0)
        labels.append(index.blob.view(STORED)[ends + last])
    # Labels are the last field.
    every = np.concatenate(labels)
    if are_flags:
        return np.asarray((every.view(REAL) == 1).sum(0), dtype=np.int64)
    return np.bincount(every[every != IGNORED], minlength=count)


def classes_row(index: Index, records: IntArray) -> Row:
    """Name the classes, or the labels of which several may apply, each with its count."""
    kind, counts = index.facts["label_kind"], count_classes(index, records).tolist()
    shown = list[str]()
    for i, name in enumerate(index.facts["label_names"] or map(str, range(len(counts)))):
        # Class weights and predictions number the classes so.
        called = name if name == str(i) else f"{i} {name}"
        shown.append(f"{called}: {counts[i]:,}")
    if len(shown) > MOST_CLASSES:
        shown[MOST_CLASSES - 1 : -1] = ["..."]
    if kind == "classes" and len(counts) == 1:
        shown.append("one class alone, so every loss is 0 and nothing is learned")
    label = "labels" if kind == "flags" else kind
    return row(label, join_parts(*shown), group="asked", class_counts=counts, label_kind=kind)
