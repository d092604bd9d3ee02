"""Read documents from text of one's own: a file, a folder of files, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Literal, final

from trainer.config.components import ExistingPath, FieldName, Overlong, Pair, Share
from trainer.core.errors import DataError
from trainer.core.format import expanded
from trainer.data.documents import ByteDocuments
from trainer.data.files import files_at, progress, reading
from trainer.data.index import SKIP_CAP, Add, Index, cached_index

_JSON_LINES = frozenset({".jsonl", ".ndjson", ".jsonlines"})
_JSON = ".json"
_FIELD = "text"
_BOM = b"\xef\xbb\xbf"


@final
class Text(ByteDocuments):
    """Documents of a file or folder, in UTF-8.

    * JSON lines: one document per line, the string under `field`; blank lines are none. All files
      are that where `field` is given or all are `.json`, else `.jsonl`, `.jsonlines` and `.ndjson`.
    * any other single file: one document per paragraph, that is, per run of non-blank lines.
    * a folder: all its files in order of their names, subfolders included, hidden ones left out;
      one document per file, but per record in JSON lines.

    Bad are records that are not UTF-8, not JSON, not an object, lack `field`, hold something
    else than a string there, or nothing but white space. Documents are held out by a hash of
    their bytes, so that copies of one stay on one side. See `ByteDocuments` for the tokens and
    for what the arguments raise.

    Args:
        path: file or folder.
        field: name of the text in JSON lines; None is `text`.
        split: `train` or `held_out`.
        max_length: most tokens of a sample, BOS and EOS counted.
        holdout: share of the distinct documents that is held out.
        seed: selects which.
        overlong: what becomes of longer documents.
        on_bad: `stop` at the first bad record, or `skip`: pass over up to 1 % of them, counted
            by `num_skipped` and listed in `skipped`.

    Raises:
        DataError: the path cannot be read, a record is bad, or there is no document; names file
            and line.
    """

    def __init__(
        self,
        path: ExistingPath,
        field: FieldName | None = None,
        split: str = "train",
        max_length: Pair = 256,
        holdout: Share = 0.05,
        seed: int = 0,
        overlong: Overlong = "chunk",
        on_bad: Literal["stop", "skip"] = "stop",
    ) -> None:
        index = _text_index(expanded(path).absolute(), field, on_bad == "skip")
        super().__init__(index, split, max_length, holdout, seed, overlong)


def _text_index(path: Path, field: str | None, skips: bool) -> Index:
    with reading(path):
        files = files_at(path)
        states = {str(file): file.stat() for file in files}
    size = sum(status.st_size for status in states.values())

    def build(add: Add) -> tuple[list[str], dict[str, str]]:
        total, bad = 0, list[str]()
        with progress(f"indexing {path}, {size:,} bytes") as advance:
            in_lines = _json_lines(files, field)
            for file, number, record in _records(path, files, in_lines):
                advance()
                total += 1
                try:
                    document = _document(record, field or _FIELD, is_json=file in in_lines)
                except ValueError as error:
                    bad.append(_fault(file, number, error))
                    if not skips:
                        text = f"data: {bad[0]}; fix it, or use data.on_bad=skip"
                        raise DataError(text) from error
                else:
                    add(document, document)
        if len(bad) > max(1, SKIP_CAP * total):
            raise DataError(
                f"data: {len(bad)} of {total} records are bad, more than the {SKIP_CAP:.0%} that "
                f"data.on_bad=skip allows; the first: {bad[0]}"
            )
        if len(bad) == total:
            raise DataError(f"data.path={path}: holds no documents")
        return bad, {}

    return cached_index("text", f"{path}|{field}|{skips}", states, build, reader="3")


def _json_lines(files: Sequence[Path], field: str | None) -> frozenset[Path]:
    """Find the files that are JSON lines."""
    if field is not None or all(file.suffix.lower() == _JSON for file in files):
        return frozenset(files)
    return frozenset(file for file in files if file.suffix.lower() in _JSON_LINES)


def _records(
    path: Path, files: Sequence[Path], in_lines: Container[Path]
) -> Iterator[tuple[Path, int, bytes]]:
    """Divide files into records; yields file, number of the first line, and bytes."""
    for file in files:
        with reading(file), file.open("rb") as stream:
            if file not in in_lines and file != path:
                yield file, 1, stream.read().removeprefix(_BOM)
                continue
            lines = enumerate(chain([stream.readline().removeprefix(_BOM)], stream), start=1)
            for is_blank, run in groupby(lines, lambda line: not line[1].strip()):
                if not is_blank and file in in_lines:
                    yield from ((file, number, line) for number, line in run)
                elif not is_blank:
                    numbers, paragraph = zip(*run, strict=True)
                    yield file, numbers[0], b"".join(paragraph)


def _document(record: bytes, name: str, *, is_json: bool) -> bytes:
    """Take the text out of a record, in UTF-8; a ValueError says what is bad."""
    if not is_json:
        record.decode()
        if not record.strip():
            raise ValueError("the document is empty")
        return record.rstrip(b"\r\n")
    try:
        fields = json.loads(record.decode())
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError(
            f"not a JSON object but of type {type(fields).__name__} (write an object a line)"
        )
    if name not in fields:
        has = ", ".join(map(repr, fields)) or "none"
        raise ValueError(f"no field {name!r}; it has {has}; data.field=NAME takes another")
    text = fields[name]
    if not isinstance(text, str):
        raise ValueError(f"field {name!r} is of type {type(text).__name__}, not a string")
    if not text.strip():
        raise ValueError(f"field {name!r} is empty")
    return text.encode()


def _fault(file: Path, number: int, error: ValueError) -> str:
    """Name file and line of a bad record, and what is wrong with it."""
    if isinstance(error, UnicodeDecodeError):
        number += error.object.count(b"\n", 0, error.start)
        return f"{file}:{number}: not UTF-8 (byte 0x{error.object[error.start]:02x})"
    return f"{file}:{number}: {error}"
