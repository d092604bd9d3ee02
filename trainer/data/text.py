"""Read documents from text of one's own: a file, a folder of files, or JSON lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, final

from trainer.config.components import ExistingPath, FieldName, Overlong, Pair, Share
from trainer.config.messages import near_names
from trainer.core.errors import DataError
from trainer.core.format import expanded
from trainer.core.rows import Row, RunFacts, row
from trainer.data import lines
from trainer.data.documents import ByteDocuments, samples_of
from trainer.data.files import files_at, progress, reading
from trainer.data.index import Add, Index, cached_index, refuse_many
from trainer.data.samples import DataRecord
from trainer.data.split import HOLDOUT

_JSON_LINES = frozenset({".jsonl", ".ndjson", ".jsonlines"})
_JSON = ".json"
_FIELD = "text"
_OnBad = Literal["stop", "skip", "note"]


@final
class Text(ByteDocuments):
    """Documents of a file or folder, in UTF-8.

    * JSON lines: one document per line, the string under `field`; blank lines are none. All files
      are that where `field` is given or all are `.json`, else `.jsonl`, `.jsonlines` and `.ndjson`.
      A file `.json` may hold one list of such records.
    * any other single file: one document per paragraph, that is, per run of non-blank lines.
    * a folder: all its files in order of their names, subfolders included, hidden ones left out;
      one document per file, but per record in JSON lines. Files that are no text are passed over,
      and folders of runs.

    Bad are records that are not UTF-8, not JSON, not an object, lack `field`, or hold something
    else than a string there. Those with nothing but white space are left out and counted. Documents
    are held out by a hash of their bytes, so that copies of one stay on one side. See
    `ByteDocuments` for the tokens.

    Args:
        path: file or folder.
        field: name of the text in JSON lines; None is `text`.
        split: `train` or `held_out`.
        max_length: most tokens of a sample, BOS and EOS counted.
        holdout: share of the distinct documents that is held out.
        seed: selects which.
        overlong: what becomes of longer documents.
        on_bad: `stop` at the first bad record, or `skip`: pass over up to 1 % of them, counted
            and listed.
        learns: without it bad records, however many, are no documents, each with why.

    Raises:
        DataError: the path cannot be read, a record is bad, or there is no document; names file
            and line.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the keys of `data`
        self,
        path: ExistingPath,
        field: FieldName | None = None,
        split: str = "train",
        max_length: Pair = 256,
        holdout: Share = HOLDOUT,
        seed: int = 0,
        overlong: Overlong = "chunk",
        on_bad: Literal["stop", "skip"] = "stop",
        learns: bool = True,
    ) -> None:
        place = expanded(path).absolute()
        with reading(place):
            self._listing = files_at(place, _takes)
        self._place, self._field = place, field
        bad_are: _OnBad = on_bad
        if not learns:
            bad_are = "note"
        index = _text_index(place, self._listing.files, field, bad_are)
        super().__init__(index, split, max_length, holdout, seed, overlong)

    def describe(self, _: RunFacts) -> Sequence[Row]:
        """Say what was left out, and passed over."""
        empty = self._index.facts["empty"]
        rows = list[Row]()
        if empty:
            rows.append(row("", f"{empty:,} without text left out", num_empty=empty))
        return [*rows, *self._listing.describe()]

    def predicted_records(self) -> Iterator[DataRecord]:
        """Give all records by file and line, those that are no documents too. Reads the files."""
        samples = samples_of(self._samples.documents, self._index)
        records = _records(self._place, self._listing.files, self._field)
        for number, (file, line, record, document_of) in enumerate(records):
            own, why_none = range(0), None
            try:
                if document_of(record).strip():
                    own = next(samples)
                else:
                    why_none = "without text"
            except ValueError as error:
                why_none = lines.fault(error)[1]
            if not own and why_none is None:
                why_none = "longer than data.max_length"
            name = lines.name_below(file, self._place)
            place = f"{name}{lines.record_place(file, line).removeprefix(str(file))}"
            yield DataRecord(number=number, place=place, samples=own, why_none=why_none)


def _takes(file: Path) -> bool:
    return lines.kind_suffix(file) in {_JSON, *_JSON_LINES} or lines.is_text(file)


def _text_index(path: Path, files: Sequence[Path], field: str | None, on_bad: _OnBad) -> Index:
    with reading(path):
        states = {str(file): file.stat() for file in files}
    size = sum(status.st_size for status in states.values())

    def build(add: Add) -> tuple[list[str], dict[str, int]]:
        total, empty, bad = 0, 0, list[str]()
        with progress(f"indexing {path}, {size:,} bytes") as advance:
            for file, number, record, document_of in _records(path, files, field):
                advance()
                try:
                    document = document_of(record)
                except ValueError as error:
                    before, why = lines.fault(error)
                    bad.append(f"{lines.record_place(file, number + before)}: {why}")
                    if on_bad == "stop":
                        text = f"data: {bad[0]}; fix it, or use data.on_bad=skip"
                        raise DataError(text) from error
                else:
                    if document.strip():
                        add(document, document)
                    else:
                        empty += 1
                total += 1
        if on_bad != "note":
            refuse_many(bad, total)
        elif bad and len(bad) + empty == total:
            raise DataError(f"data: {bad[0]}")
        if len(bad) + empty == total:
            raise DataError(f"data.path={path}: holds no documents")
        return bad, {"empty": empty}

    # The number of the reader goes up where the same files give other documents.
    return cached_index("text", f"{path}|{field}|{on_bad}", states, build, reader="4")


def _records(
    path: Path, files: Sequence[Path], field: str | None
) -> Iterator[tuple[Path, int, bytes, Callable[[bytes], bytes]]]:
    """Divide files into records; yields file, number, bytes, and what reads the text in them."""
    is_json = field is not None or all(lines.kind_suffix(file) == _JSON for file in files)
    of_object = partial(_text_in, name=field or _FIELD)
    of_text = lines.paragraphs_of if files == [path] else lines.whole_text_of
    for file in files:
        divide: Callable[[Path], lines.NumberedLines] = of_text
        document_of: Callable[[bytes], bytes] = _checked
        if is_json or lines.kind_suffix(file) in _JSON_LINES:
            divide, document_of = lines.json_records_of, of_object
        for number, record in divide(file):
            yield file, number, record, document_of


def _checked(text: bytes) -> bytes:
    """Give a text; a ValueError where it is not UTF-8."""
    text.decode()  # bytes are stored, so that the string is not needed
    return text


def _text_in(record: bytes, name: str) -> bytes:
    """Take the text out of a record, in UTF-8; a ValueError says what is bad."""
    fields = lines.json_object(record)
    if name not in fields:
        has = ", ".join(map(repr, fields)) or "none"
        meant = [*near_names(name, fields), *fields][:1] or ["NAME"]
        raise ValueError(f"no field {name!r}; it has {has}; data.field={meant[0]} takes another")
    text = fields[name]
    if not isinstance(text, str):
        raise ValueError(f"field {name!r} is of type {type(text).__name__}, not a string")
    return text.encode()
