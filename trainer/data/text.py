"""One's own text: a file, a folder of files, or JSON lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from trainer.core.errors import ConfigError, DataError
from trainer.data.documents import ByteDocuments, Overlong
from trainer.data.folder import files_at
from trainer.data.index import LISTED_SKIPS, SKIP_CAP, Add, Index, cached_index
from trainer.data.progress import progress
from trainer.data.samples import reading

_JSON_LINES = frozenset({".jsonl", ".ndjson"})
_BOM = b"\xef\xbb\xbf"


@final
class Text(ByteDocuments):
    """Documents of a file or folder, in UTF-8.

    * `.jsonl`, `.ndjson`: one document per line, the string under `field`; blank lines are none.
    * any other single file: one document per paragraph, that is, per run of non-blank lines.
    * a folder: all its files in order of their names, subfolders included, hidden ones left out;
      one document per file, but per record in JSON lines.

    Bad are records that are not UTF-8, not JSON, not an object, lack `field`, hold something
    else than a string there, or nothing but white space. Documents are held out by a hash of
    their bytes, so that copies of one stay on one side. See `ByteDocuments` for the tokens and
    for what the arguments raise.

    Args:
        path: file or folder.
        field: name of the text in JSON lines.
        split: `train` or `held_out`.
        max_length: most tokens of a sample, BOS and EOS counted.
        holdout: share of the distinct documents that is held out.
        seed: selects which.
        overlong: what becomes of longer documents.
        on_bad: `stop` at the first bad record, or `skip`: pass over up to 1 % of them, counted
            by `num_skipped` and listed in `skipped`.

    Raises:
        ConfigError: `on_bad` is neither.
        DataError: the path cannot be read, a record is bad, or there is no document; names file
            and line.
    """

    def __init__(
        self,
        path: str,
        field: str = "text",
        split: str = "train",
        max_length: int = 256,
        holdout: float = 0.05,
        seed: int = 0,
        overlong: Overlong = "chunk",
        on_bad: Literal["stop", "skip"] = "stop",
    ) -> None:
        if on_bad not in {"stop", "skip"}:
            raise ConfigError(f"data.on_bad={on_bad}: must be stop or skip")
        index = _text_index(Path(path).expanduser().absolute(), field, on_bad == "skip")
        super().__init__(
            index,
            split=split,
            max_length=max_length,
            holdout=holdout,
            seed=seed,
            overlong=overlong,
        )


@dataclass(frozen=True, slots=True)
class _Record:
    """One document or one fault, and where it stands; `fields` hold text in place of the asked."""

    place: str
    document: bytes = b""
    fault: str = ""
    fields: tuple[str, ...] = ()


@dataclass(slots=True)
class _Tally:
    """Counts good and bad records, and stops where bad ones are not to be passed over."""

    skips: bool
    num_documents: int = 0
    num_skipped: int = 0
    skipped: list[str] = field(default_factory=list)

    def refuse(self, record: _Record) -> None:
        """Note a bad record.

        Raises:
            DataError: bad records are not to be skipped.
        """
        reason = f"{record.place}: {record.fault}"
        if record.fields and not self.num_documents + self.num_skipped:
            meant = " or ".join(f"data.field={name}" for name in record.fields)
            raise DataError(f"data: {reason}; type {meant}")
        if not self.skips:
            raise DataError(f"data: {reason}; mend it, or set data.on_bad=skip")
        self.num_skipped += 1
        if len(self.skipped) < LISTED_SKIPS:
            self.skipped.append(reason)

    def check_share(self) -> None:
        """Hold the skipped records against the cap.

        Raises:
            DataError: there are too many.
        """
        total = self.num_documents + self.num_skipped
        if self.num_skipped > max(1, SKIP_CAP * total):
            raise DataError(
                f"data: {self.num_skipped} of {total} records are bad, more than the "
                f"{SKIP_CAP:.0%} that data.on_bad=skip passes over; the first: {self.skipped[0]}"
            )


def _text_index(path: Path, name: str, skips: bool) -> Index:
    with reading(path):
        files = _files(path)
        states = [file.stat() for file in files]
    key = hashlib.sha256(f"{path}|{name}|{skips}".encode())
    total = sum(status.st_size for status in states)
    for file, status in zip(files, states, strict=True):
        key.update(f"|{file}|{status.st_size}|{status.st_mtime_ns}".encode())

    def build(add: Add) -> Mapping[str, Any]:
        with progress(f"indexing {path}, {total:,} bytes", total) as advance:
            tally = _build(_records(path, files, name, advance), add, skips)
        if tally.num_documents == 0:
            raise DataError(f"data.path={path}: holds no documents")
        return {"num_skipped": tally.num_skipped, "skipped": tally.skipped}

    place = hashlib.sha256(f"{path}|{name}|{skips}".encode()).hexdigest()[:12]
    return cached_index(f"text-{place}", key.hexdigest(), build)


def _build(records: Iterator[_Record], add: Add, skips: bool) -> _Tally:
    tally = _Tally(skips)
    for record in records:
        if record.fault:
            tally.refuse(record)
        else:
            add(record.document, record.document)
            tally.num_documents += 1
    tally.check_share()
    return tally


def _files(path: Path) -> list[Path]:
    """List the files to read, in order.

    Raises:
        DataError: there are none.
    """
    if path.suffix == ".json" and path.is_file():
        raise DataError(f"data.path={path}: one JSON object per line is read, from a .jsonl file")
    files = files_at(path)
    if not files:
        raise DataError(f"data.path={path}: the folder holds no files")
    return files


def _records(
    path: Path, files: list[Path], name: str, advance: Callable[[int], None]
) -> Iterator[_Record]:
    for file in files:
        with reading(file):
            if file.suffix in _JSON_LINES:
                yield from _json_lines(file, name, advance)
            elif file == path:
                yield from _paragraphs(file, advance)
            else:
                yield from _whole(file, advance)


def _lines(file: Path, advance: Callable[[int], None]) -> Iterator[tuple[int, bytes]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            advance(len(line))
            yield number, line.removeprefix(_BOM) if number == 1 else line


def _json_lines(file: Path, name: str, advance: Callable[[int], None]) -> Iterator[_Record]:
    for number, line in _lines(file, advance):
        if line.strip():
            place = f"{file}:{number}"
            try:
                yield _Record(place, document=_text_of(line, name))
            except _NoFieldError as error:
                yield _Record(place, fault=str(error), fields=error.fields)
            except ValueError as error:
                yield _Record(place, fault=str(error))


class _NoFieldError(ValueError):
    """A record lacks the field; says which it has, and knows which of them hold text."""

    def __init__(self, name: str, record: Mapping[str, Any]) -> None:
        super().__init__(f"no field {name!r}; it has {', '.join(map(repr, record)) or 'none'}")
        self.fields = tuple(key for key, value in record.items() if isinstance(value, str))[:3]


def _text_of(line: bytes, name: str) -> bytes:
    """Take the text out of one JSON record.

    Raises:
        ValueError: it is bad; says how.
        _NoFieldError: it lacks the field.
    """
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(error)) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object but of type {type(record).__name__}")
    if name not in record:
        raise _NoFieldError(name, record)
    text = record[name]
    if not isinstance(text, str):
        raise ValueError(f"field {name!r} is of type {type(text).__name__}, not a string")
    if not text.strip():
        raise ValueError(f"field {name!r} is empty")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"field {name!r} holds half a surrogate pair") from error


def _paragraphs(file: Path, advance: Callable[[int], None]) -> Iterator[_Record]:
    paragraph: list[bytes] = []
    begin = 1
    for number, line in _lines(file, advance):
        if line.strip():
            begin = begin if paragraph else number
            paragraph.append(line)
        elif paragraph:
            yield _checked(file, begin, b"".join(paragraph))
            paragraph = []
    if paragraph:
        yield _checked(file, begin, b"".join(paragraph))


def _whole(file: Path, advance: Callable[[int], None]) -> Iterator[_Record]:
    contents = file.read_bytes()
    advance(len(contents))
    yield _checked(file, 1, contents.removeprefix(_BOM))


def _checked(file: Path, first_line: int, document: bytes) -> _Record:
    """Check the encoding, and name the line of the first byte that breaks it."""
    try:
        document.decode()
    except UnicodeDecodeError as error:
        line = first_line + document.count(b"\n", 0, error.start)
        return _Record(f"{file}:{line}", fault=_not_utf8(error))
    if not document.strip():
        return _Record(f"{file}:{first_line}", fault="the document is empty")
    return _Record(f"{file}:{first_line}", document=document.rstrip(b"\r\n"))


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 (byte 0x{error.object[error.start]:02x})"
