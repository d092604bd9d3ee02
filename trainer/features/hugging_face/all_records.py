"""Give every record of a source, whatever became of it: what `predict` writes a line for."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from trainer.data import index
from trainer.data.samples import DataRecord
from trainer.features.hugging_face import encode, label_encoders
from trainer.features.hugging_face.formats import Format
from trainer.features.hugging_face.records import RecordSource

Answers = tuple[Sequence[str] | None, str | None]
"""The choices of a record, and the text that its answer is a part of."""


def all_records(
    source: RecordSource, facts: Mapping[str, Any], samples: Iterator[range]
) -> Iterator[DataRecord]:
    """Give the records in the order of their files, those that are no samples with the reason.

    `facts` are those of the cache, and `samples` are of each record that is kept, in order. The
    files are read once more, for their lines and for what an answer is called.
    """
    begun = 0
    for part, num_records in facts["num_records"].items():
        left_out, is_sample = dict(facts["left_out"].get(part, ())), np.zeros(num_records, np.bool_)
        for first, count in facts["runs"][part]:
            is_sample[first : first + count] = True
        with closing(_answers(source, facts, part)) as answers:
            for row, place in zip(range(num_records), source.places(part), strict=False):
                classes, text = next(answers)
                own, why_none = range(0), left_out.get(row)
                if is_sample[row]:
                    own = next(samples)
                elif why_none is None:
                    # Of `data.max_samples` it is none.
                    continue
                # A text that is to be dropped where it is too long is kept, and has no sample.
                if not own and why_none is None:
                    why_none = encode.LONGER
                yield DataRecord(
                    number=begun + row,
                    place=place,
                    samples=own,
                    why_none=why_none,
                    classes=classes,
                    text=text,
                )
        begun += num_records


def _answers(source: RecordSource, facts: Mapping[str, Any], part: str) -> Generator[Answers]:
    """Give what the answer of each record is among, where it is a choice or a part of a text."""
    form = Format(facts["format"], facts["columns"])
    if form.name not in {"choices", "span"}:
        yield from repeat((None, None))
    with TemporaryDirectory(dir=index.cache_folder(), prefix=".records-") as scratch:
        parts, _ = source.load(Path(scratch))
        for batch in parts[part].iter(encode.BATCH):
            for record in encode.records_of(batch, is_json=source.kind == "json"):
                classes, text = None, None
                # One that is bad has no answer.
                with suppress(Exception):
                    values = form.take(record)
                    if form.name == "choices":
                        classes = label_encoders.choices_of(values)[1]
                    else:
                        text = values["context"]
                yield classes, text
