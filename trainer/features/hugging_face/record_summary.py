"""Count the labels of each class in an index of records with labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core.micro_batch import IGNORED
from trainer.core.rows import Row, join_parts, row
from trainer.data.described import MOST_CLASSES
from trainer.data.documents import REAL, STORED
from trainer.data.index import Index
from trainer.plan.cut import IntArray

COUNTED = ("classes", "flags")
"""Kinds of labels that are counted."""


def count_classes(index: Index, records: IntArray) -> IntArray:
    """Count the labels of each class, `(classes,)`, or how often each of several applies."""
    known, are_flags = index.facts, index.facts["label_kind"] == "flags"
    count, labels = known["num_classes"], list[npt.NDArray[Any]]()
    if known["format"] == "tags":
        for record in records.tolist():
            numbers = stored_numbers(index, record)
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
    label = "labels" if kind == "flags" else kind
    return row(label, join_parts(*shown), group="asked", class_counts=counts, label_kind=kind)


def stored_numbers(index: Index, record: int) -> npt.NDArray[Any]:
    """Give what is stored of a record: how many numbers each field has, then the numbers."""
    first, last = map(int, index.offsets[record : record + 2])
    numbers: npt.NDArray[Any] = index.blob[first:last].view(STORED)
    return numbers
