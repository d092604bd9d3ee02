"""Keep the records that have a value in a column: `data.filter`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainer.config.messages import did_you_mean_name, show
from trainer.core.errors import DataError
from trainer.features.hugging_face import encode
from trainer.plan.cut import IntArray

_MOST_VALUES = 1000
"""Values of a column that are noted, for a message."""
_SHOWN = 10


def values_by_column(typed: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Give the values that are kept of each column, as what they are compared by."""
    found = dict[str, list[Any]]()
    for column, value in typed.items():
        found[column] = [*map(_compared, value if isinstance(value, list | tuple) else [value])]
    return found


def selected_rows(
    place: str, parts: Mapping[str, Any], filter_by: Mapping[str, Sequence[Any]], *, is_json: bool
) -> dict[str, IntArray]:
    """Give the rows of each part that have one of the values in every column.

    A DataError names a column that is not there, or a value that no record has. A record that
    cannot be read is kept, and named where it is encoded.
    """
    found, names = dict[str, IntArray](), dict[str, None]()
    seen: dict[str, dict[Any, None]] = {column: {} for column in filter_by}
    for part, records in parts.items():
        rows, row = list[int](), 0
        for batch in records.iter(1000):
            for record in encode.records_of(batch, is_json=is_json):
                if isinstance(record, Mapping):
                    names |= dict.fromkeys(record)
                if _has_values(record, filter_by, seen):
                    rows.append(row)
                row += 1
        found[part] = np.array(rows, dtype=np.int64)
    for column, values in filter_by.items():
        if column not in names:
            near = did_you_mean_name(column, names)
            text = f"no such column.{near} There are {', '.join(names)}"
            raise DataError(f"data.filter={{{column}: {show(values[0])}}}: {text}")
        _refuse_absent(place, column, values, [*seen[column]])
    if not any(map(len, found.values())):
        raise DataError(f"{place}: data.filter keeps no record: none has all of these values")
    return found


def _refuse_absent(place: str, column: str, values: Sequence[Any], known: Sequence[Any]) -> None:
    """Refuse a value that no record has in a column."""
    words = [*map(str, known)]
    for value in values:
        if value not in known:
            near, path = did_you_mean_name(str(value), words), place.partition("=")[2]
            some = ", ".join(words[:_SHOWN]) + ", ..." * (len(words) > _SHOWN)
            text = f"no record of {path} has it.{near} There are {some}"
            raise DataError(f"data.filter={{{column}: {show(value)}}}: {text}")


def _has_values(
    record: object, filter_by: Mapping[str, Sequence[Any]], seen: Mapping[str, dict[Any, None]]
) -> bool:
    if not isinstance(record, Mapping):
        return True
    has_values = True
    for column, values in filter_by.items():
        value = _compared(record.get(column))
        if len(seen[column]) < _MOST_VALUES or value in values:
            seen[column][value] = None
        has_values &= value in values
    return has_values


def _compared(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Give a number for what is written as one, else the text; nothing is an empty text."""
    if value is None:
        return ""
    text, word = str(value), str(value).lower()
    # Python, pandas and Excel spell them otherwise.
    return word if word in {"true", "false"} else encode.number_in(text)
