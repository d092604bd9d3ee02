"""Give every record of a source, whatever became of it: what `predict` writes a line for."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from trainer.core.urls import cache_folder
from trainer.data.conversation import ASSISTANT, normalize_messages
from trainer.data.samples import DataRecord
from trainer.features.hugging_face import encode, label_encoders
from trainer.features.hugging_face.formats import Format
from trainer.features.hugging_face.records import RecordSource
from trainer.features.hugging_face.task import WORDS


def all_records(
    source: RecordSource,
    facts: Mapping[str, Any],
    samples: Iterator[range],
    trained: Mapping[str, Any],
) -> Iterator[DataRecord]:
    """Give the records in the order of their files, those that are no samples with the reason.

    `facts` are those of the cache, and `samples` are of each record that is kept, in order. The
    files are read once more, for their lines, for what an answer is called, and for references in
    the columns of the run, `trained`.
    """
    begun = 0
    for part, num_records in facts["num_records"].items():
        left_out, is_sample = dict(facts["left_out"].get(part, ())), np.zeros(num_records, np.bool_)
        for first, count in facts["runs"][part]:
            is_sample[first : first + count] = True
        with closing(_answers(source, facts, part, trained)) as answers:
            for row, place in zip(range(num_records), source.places(part), strict=False):
                answer = next(answers)
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
                    number=begun + row, place=place, samples=own, why_none=why_none, **answer
                )
        begun += num_records


def _answers(
    source: RecordSource, facts: Mapping[str, Any], part: str, trained: Mapping[str, Any]
) -> Generator[dict[str, Any]]:
    """Give what the answer of each record is among, or is; see `DataRecord`."""
    form = Format(facts["format"], facts["columns"])
    column = trained.get("columns", {}).get(WORDS["formats"][form.name].get("reference"))
    if form.name not in {"choices", "span"} and column is None:
        yield from repeat({})
    with TemporaryDirectory(dir=cache_folder(), prefix=".records-") as scratch:
        parts, _ = source.load(Path(scratch))
        for batch in parts[part].iter(encode.BATCH):
            for record in encode.records_of(batch, is_json=source.kind == "json"):
                answer = dict[str, Any]()
                # One that is bad has no answer.
                with suppress(Exception):
                    if form.name == "choices":
                        answer["classes"] = label_encoders.choices_of(form.take(record))[1]
                    elif form.name == "span":
                        answer["text"] = form.take(record)["context"]
                    else:
                        answer["reference"] = _reference(form.name, record[column])
                yield answer


def _reference(form: str, value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Take the last answer of a conversation; else the value as it is."""
    if form in {"chat", "prompt and completion"} and not isinstance(value, str):
        last = normalize_messages(value)[-1]
        return last["content"] if last["role"] == ASSISTANT else None
    return value
