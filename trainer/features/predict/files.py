"""Write what `train predict` found: a line of JSON a record, and CSV beside CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from trainer.core.durable import as_save_error, strict, write_pieces_atomic
from trainer.core.format import loss, percent, plural
from trainer.data.lines import csv_rows_of, csv_separator, kind_suffix

COLUMNS = ("prediction", "probability", "loss", "terms", "error")
"""What of a line is appended to a row of CSV, where any line has it."""
SHOWN = 3
"""Lines that the screen shows."""
WIDEST = 60
"""Characters of a prediction that are shown."""


@final
@dataclass
class WrittenLines:
    """What was written."""

    count: int = 0
    names: set[str] = field(default_factory=set)  # of what lines have
    # Records without a prediction, by their reason
    missing: dict[str, int] = field(default_factory=dict)
    first_missing: str | None = None  # where the first of them is from
    first: list[Mapping[str, Any]] = field(default_factory=list)  # lines, to show
    # References and predictions, of lines that have both
    labelled: list[Mapping[str, Any]] = field(default_factory=list)


def write_lines(file: Path, lines: Iterable[Mapping[str, Any]]) -> WrittenLines:
    """Write predictions as they come; the file shows all of them, or what it held before."""
    written = WrittenLines()

    def pieces() -> Iterator[bytes]:
        for line in lines:
            written.count += 1
            written.names.update(line)
            if len(written.first) < SHOWN:
                written.first.append(line)
            if "label" in line:
                pair = {"label": line["label"], "prediction": line["prediction"]}
                written.labelled.append(pair)
            if (why := line.get("error")) is not None:
                written.missing[why] = written.missing.get(why, 0) + 1
                place = line.get("source", f"record {line['id']}")
                written.first_missing = written.first_missing or place
            yield f"{json.dumps(strict(line), ensure_ascii=False)}\n".encode()

    with as_save_error(file):
        write_pieces_atomic(file, pieces())
    return written


def write_table(table: Path, file: Path, written: WrittenLines) -> Path:
    """Write the rows of a file of CSV, their cells as they stand, with what was predicted of each.

    `file` has the lines of the predictions, whose ids are the numbers of the rows.
    """
    to, separator = file.with_suffix(kind_suffix(table)), csv_separator(table)
    names = sorted(written.names.intersection(COLUMNS), key=COLUMNS.index)

    def pieces() -> Iterator[bytes]:
        rows = (row for _, row in csv_rows_of(table))
        head = next(rows)
        yield _as_csv([*head, *(_free(name, head) for name in names)], separator)
        with file.open("rb") as lines:
            line = json.loads(next(lines, b"{}"))
            for number, row in enumerate(rows):
                if line.get("id") == number:
                    cells = _below(head, row, separator)
                    cells += [_cell(line.get(name)) for name in names]
                    yield _as_csv(cells, separator)
                    line = json.loads(next(lines, b"{}"))

    with as_save_error(to):
        write_pieces_atomic(to, pieces())
    return to


def shown_line(line: Mapping[str, Any]) -> str:
    """Write a line for people: where its record is from, and what is predicted or why nothing."""
    place = line.get("source", f"record {line['id']}")
    if (why := line.get("error")) is not None:
        return f"{place}: no prediction: {why}"
    if "prediction" not in line:
        return f"{place}: loss {loss(line['loss'])} over {plural(line['terms'], 'term')}"
    found = _cell(line["prediction"])
    text = json.dumps(found, ensure_ascii=False)[1:-1]
    if len(text) > WIDEST:
        text = f"{text[:WIDEST]}..."
    chance = line.get("probability")
    if isinstance(chance, float):
        text += f" ({percent(chance)})"
    return f"{place}: {text or 'nothing'}"


def _free(name: str, taken: Iterable[str]) -> str:
    """Name a column as none of the file is named."""
    found, number = name, 2
    while found in taken:
        found, number = f"{name}_{number}", number + 1
    return found


def _below(head: list[str], row: list[str], separator: str) -> list[str]:
    """Put a cell below each name: of too many the last one has the rest, and too few are filled."""
    last = len(head) - 1
    cells = [*row[:last], separator.join(row[last:])]
    return cells + [""] * (len(head) - len(cells))


def _cell(value: Any) -> str:  # noqa: ANN401 - any JSON
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _as_csv(cells: list[str], separator: str) -> bytes:
    text = io.StringIO()
    csv.writer(text, delimiter=separator, lineterminator="\n").writerow(cells)
    # Bytes that are not UTF-8 come back as they were.
    return text.getvalue().encode(errors="surrogateescape")
