"""Keep the records that have a value in a column: `data.filter`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainer.config.messages import did_you_mean_name, first_of, show
from trainer.core.errors import DataError
from trainer.features.hugging_face import encode
from trainer.features.hugging_face.choose_encoder import records_of_parts
from trainer.features.hugging_face.records import RecordSource
from trainer.plan.cut import IntArray

_COMPARED_WITH = 1000
"""Values of a column that one which no record has is compared with, for a message."""


def selected_rows(
    source: RecordSource, parts: Mapping[str, Any], filter_by: Mapping[str, Any]
) -> dict[str, IntArray]:
    """Give the rows of each part that have one of the values in every column.

    A DataError names a column that is not there, or a value that no record has. A record that
    cannot be read is kept, and named where it is encoded.
    """
    wanted, found, names = dict[str, list[Any]](), dict[str, IntArray](), dict[str, None]()
    for column, value in filter_by.items():
        wanted[column] = [*map(_compared, value if isinstance(value, list | tuple) else [value])]
    seen: dict[str, dict[Any, None]] = {column: {} for column in wanted}
    for part, records in parts.items():
        rows = list[int]()
        for row, record in enumerate(records_of_parts(source, {part: records})):
            keeps = True
            if isinstance(record, Mapping):
                names |= dict.fromkeys(record)
                for column, values in wanted.items():
                    keeps &= _is_wanted(_compared(record.get(column)), values, seen[column])
            if keeps:
                rows.append(row)
        found[part] = np.array(rows, dtype=np.int64)
    for column, values in wanted.items():
        if column not in names:
            near = did_you_mean_name(column, names)
            text = f"no such column.{near} There are {', '.join(names)}"
            raise DataError(f"data.filter={{{column}: {show(values[0])}}}: {text}")
        _refuse_absent(source.path, column, values, seen[column])
    if not any(map(len, found.values())):
        text = "data.filter keeps no record: none has all of these values"
        raise DataError(f"data.path={source.path}: {text}")
    return found


def _is_wanted(value: Any, wanted: Sequence[Any], seen: dict[Any, None]) -> bool:  # noqa: ANN401
    """Whether a value is one of those wanted; it is noted, and as many others as messages need."""
    if (found := value in wanted) or len(seen) < _COMPARED_WITH:
        seen[value] = None
    return found


def _refuse_absent(
    path: str, column: str, values: Sequence[Any], known: Mapping[Any, None]
) -> None:
    """Refuse a value that no record has in a column."""
    for value in values:
        if value not in known:
            words = [*map(str, known)]
            near = did_you_mean_name(str(value), words)
            text = f"no record of {path} has it.{near} There are {first_of(words)}"
            raise DataError(f"data.filter={{{column}: {show(value)}}}: {text}")


def _compared(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Give a number for what is written as one, else the text; nothing is an empty text."""
    if value is None:
        return ""
    text, word = str(value), str(value).lower()
    # Python, pandas and Excel spell them otherwise.
    return word if word in {"true", "false"} else encode.number_in(text)
