"""Read CSV, and texts of any other kind, into tables that are mapped and not held in memory."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from trainer.core.errors import DataError
from trainer.data import lines
from trainer.data.files import progress

WHOLE_TEXT = "whole text"
"""A kind: each file is a text."""

_BATCH = 100
"""Records at a time: bounds the memory where a record is a book."""

NumberedRows = Iterator[tuple[int, dict[str, Any]]]
"""Records, each with the number of its first line."""


def read_table(files: Sequence[Path], kind: str, to: Path) -> Any:  # noqa: ANN401 - a Dataset
    """Copy the rows of files into a file of Arrow, and map that as a `datasets.Dataset`."""
    import pyarrow as pa  # type: ignore[import-untyped]  # noqa: PLC0415 - seconds, as `datasets`
    from datasets import Dataset  # type: ignore[import-untyped]  # noqa: PLC0415

    rows = (row for file in files for _, row in ROWS[kind](file))
    batches = iter(lambda: [*islice(rows, _BATCH)], [])
    first = next(batches, list[dict[str, Any]]([{}]))
    cell = pa.large_string() if kind == "csv" else pa.large_binary()
    schema = pa.schema([(name, cell) for name in first[0]])
    with (
        progress(f"reading {files[0].parent if files[1:] else files[0]}") as advance,
        pa.OSFile(str(to), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        for batch in chain([first], batches):
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
            advance()
    return Dataset.from_file(str(to))


def _csv_rows(file: Path) -> NumberedRows:
    """Divide CSV by tabs where it is named `.tsv`, else by what the first line has most of."""
    csv.field_size_limit(lines.LONGEST_LINE)
    _, head = next(lines.lines_of(file), (1, b""))
    separators = b"\t" if lines.kind_suffix(file) == ".tsv" else b",;\t"
    separator = chr(max(separators, key=head.count))
    texts = (line.decode() for _, line in lines.lines_of(file))
    names, number, found = list[str](), 1, csv.reader(texts, delimiter=separator, strict=True)
    try:
        for row in found:
            if not names:
                names = [name or f"Unnamed: {i}" for i, name in enumerate(row)]
            elif len(row) > 1 or "".join(row).strip():  # else the line is blank
                if len(row) != len({*names}):
                    raise csv.Error(f"{len(row)} cells, and {len({*names})} names of columns")
                yield number, dict(zip(names, row, strict=True))
            number = found.line_num + 1
    except csv.Error as error:
        raise DataError(f"data: {file}:{number}: not CSV ({error})") from error
    except UnicodeDecodeError as error:
        place = f"{file}:{found.line_num + 1}"
        raise DataError(f"data: {place}: {lines.fault(error)[1]}") from error


def _text_rows(divide: Callable[[Path], lines.NumberedLines], file: Path) -> NumberedRows:
    return ((number, {"text": text}) for number, text in divide(file))


ROWS: Mapping[str, Callable[[Path], NumberedRows]] = {
    "csv": _csv_rows,
    "json": partial(_text_rows, lines.json_records_of),
    "text": partial(_text_rows, lines.paragraphs_of),
    WHOLE_TEXT: partial(_text_rows, lines.whole_text_of),
}
"""What divides files into rows, by their kind: strings of CSV, else bytes in a column `text`."""
