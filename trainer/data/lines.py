"""Divide files into lines, paragraphs, and records of JSON or CSV, in one way for all data.

A line ends with LF or CR LF, whatever else it holds. A byte order mark at the beginning of a file
is left out. Records come as bytes, each with the number of its first line, from 1.
"""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from trainer.core.errors import DataError
from trainer.core.format import plural
from trainer.data.files import reading

NumberedLines = Iterator[tuple[int, bytes]]

LONGEST_LINE = 2**27
"""Most bytes of a line: some corpora are one line of 100 MB; of zeros it is read in a second."""

UNPACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "zstandard"}
"""Modules that unpack files, by their suffix."""

FAULT_COLUMN = "why the row cannot be read"
"""Where what is wrong with a row of CSV stands beside its cells."""

_BINARY_HEAD = 2**13
"""A file with a NUL among its first bytes is no text, as git has it."""

_BOM = b"\xef\xbb\xbf"


def kind_suffix(file: Path) -> str:
    """Give the suffix that says what a file holds, in small letters: `.csv` of `a.CSV.gz`."""
    for suffix in reversed(file.suffixes):
        if suffix.lower() not in UNPACKED:
            return suffix.lower()
    return ""


def open_unpacked(file: Path) -> Any:  # noqa: ANN401 - a stream of bytes
    """Open a file for reading; `.gz`, `.bz2`, `.xz` and `.zst` are unpacked."""
    module = UNPACKED.get(file.suffix.lower())
    if module is None:
        return file.open("rb")
    # All of these modules, also that of zstandard, have an `open` of this form.
    return import_module(module).open(file, "rb")


def is_text(file: Path) -> bool:
    """Whether a file looks like text."""
    with reading(file), open_unpacked(file) as stream:
        return b"\0" not in stream.read(_BINARY_HEAD)


def lines_of(file: Path) -> NumberedLines:
    """Give the lines of a file with their ends; a DataError for one beyond `LONGEST_LINE`."""
    number = 0
    with reading(file), open_unpacked(file) as stream:
        while line := stream.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                text = f"the line is longer than {LONGEST_LINE >> 20} MiB; is the file text?"
                raise DataError(f"data: {file}:{number}: {text}")
            if number == 1:
                line = line.removeprefix(_BOM)
            yield number, line


def paragraphs_of(file: Path) -> NumberedLines:
    """Give each run of lines that are not blank."""
    for is_blank, run in groupby(lines_of(file), lambda line: not line[1].strip()):
        if not is_blank:
            numbers, lines = zip(*run, strict=True)
            yield numbers[0], b"".join(lines).rstrip(b"\r\n")


def whole_text_of(file: Path) -> NumberedLines:
    """Give all of a file."""
    yield 1, b"".join(line for _, line in lines_of(file)).rstrip(b"\r\n")


def json_records_of(file: Path) -> NumberedLines:
    """Give the lines of a file that are not blank, or the records, by number, of a list in it."""
    if not holds_list(file):
        for number, line in lines_of(file):
            if line.strip():
                yield number, line
        return
    with reading(file), open_unpacked(file) as stream:
        # Read at once, since a list is often one line, whatever its size.
        content = stream.read().removeprefix(_BOM)
    try:
        records = _parsed(content)
    except ValueError as error:
        before, text = fault(error)
        raise DataError(f"data: {file}:{1 + before}: {text}") from error
    for number, each in enumerate(records, start=1):
        yield number, json.dumps(each).encode()


def csv_separator(file: Path) -> str:
    """Find what parts the cells of CSV: a tab in `.tsv`, else what the first line has most of."""
    _, head = next(lines_of(file), (1, b""))
    separators = b",;\t"
    if kind_suffix(file) == ".tsv":
        separators = b"\t"
    return chr(max(separators, key=head.count))


def csv_rows_of(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Give the cells of CSV as they stand, the head first; blank lines are no rows.

    Rows are given for which `row_fault` has words, too.
    """
    # The limit is the process's; by default it is 128 KiB, less than some texts have.
    csv.field_size_limit(LONGEST_LINE)
    errors = "strict"
    texts = (line.decode(errors=errors) for _, line in lines_of(file))
    found = csv.reader(texts, delimiter=csv_separator(file), strict=True)
    number = 1
    try:
        for row in found:
            if len(row) > 1 or "".join(row).strip():
                yield number, row
                errors = "surrogateescape"  # of the lines behind the head
            number = found.line_num + 1
    except csv.Error as error:
        raise DataError(f"data: {file}:{number}: not CSV ({error})") from error
    except UnicodeDecodeError as error:
        place = f"{file}:{found.line_num + 1}"
        remedy = f"save it as UTF-8: iconv -f latin1 -t utf-8 {shlex.quote(file.name)} > new.csv"
        raise DataError(f"data: {place}: {fault(error)[1]}; {remedy}") from error


def row_fault(row: list[str], num_names: int) -> str | None:
    """Say what is wrong with a row of CSV; None where nothing is."""
    if len(row) != num_names:
        return f"{plural(len(row), 'cell')}, and {plural(num_names, 'name')} of columns"
    try:
        "".join(row).encode()
    except UnicodeEncodeError as error:
        # A byte that is not UTF-8 was decoded to a character that stands for it.
        byte = ord(error.object[error.start]) - 0xDC00
        return f"not UTF-8 (byte 0x{byte:02x}); save the file as UTF-8 (iconv -f latin1 -t utf-8)"
    return None


def holds_list(file: Path) -> bool:
    """Whether the records of a file are those of one list of JSON."""
    if kind_suffix(file) != ".json":
        return False
    with reading(file), open_unpacked(file) as stream:
        return bool(stream.read(_BINARY_HEAD).lstrip(_BOM + b" \t\r\n").startswith(b"["))


def name_below(file: Path, root: Path) -> str:
    """Name a file as it is called below the path that was typed, which may be the file itself."""
    if file == root:
        return file.name
    return str(file.relative_to(root))


def record_place(file: Path, number: int) -> str:
    """Name a record by its line, or by its number in a list."""
    return f"{file}: record {number}" if holds_list(file) else f"{file}:{number}"


def json_object(record: bytes) -> dict[str, Any]:
    """Read an object of JSON; a ValueError says what is wrong."""
    found = _parsed(record)
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ValueError(f"not a JSON object but of type {kind} (write an object a line)")
    return found


def _parsed(record: bytes) -> Any:  # noqa: ANN401 - any JSON
    text = record.decode()
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error


def fault(error: ValueError) -> tuple[int, str]:
    """Say how many lines of a record are before what is wrong with it, and what that is."""
    if not isinstance(error, UnicodeDecodeError):
        return 0, str(error)
    before = error.object.count(b"\n", 0, error.start)
    return before, f"not UTF-8 (byte 0x{error.object[error.start]:02x})"
