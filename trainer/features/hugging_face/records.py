"""Read records through `datasets`: files of the field's formats, folders of them, names on the hub.

A record of JSON stays text until it is encoded: so it is as it was written, whatever the others
hold, and one that is bad has a line. Nothing is written beside the files.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, final

from trainer.core.errors import DataError
from trainer.core.format import expanded
from trainer.core.hub_cache import HUB_NAME, read_cache_without_network
from trainer.core.user_code import causes, quiet
from trainer.data import lines
from trainer.data.files import OTHER, Listing, files_at, progress, reading
from trainer.data.split import HELD_OUT_NAMES, TRAIN
from trainer.features.hugging_face.model_folder import not_found
from trainer.features.hugging_face.task import WORDS

_KINDS: Mapping[str, str] = WORDS["files"]
_SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")
_PART = re.compile(rf"(?<![a-z])({TRAIN}|{'|'.join(HELD_OUT_NAMES)})(?![a-z])")
_HASHED_BYTES = 2**30
"""Up to here files are known by their contents, beyond it by their name, size and time: a start may
cost a second, not a reading of the whole corpus."""
WHOLE_TEXT = "whole text"
"""A kind: each file is a text."""
_ROWS_AT_ONCE = 100
"""Records at a time: bounds the memory where a record is a book."""

NumberedRows = Iterator[tuple[int, dict[str, Any]]]
"""Records, each with the number of its first line."""


@final
@dataclass(frozen=True)
class RecordSource:
    """Where records are read from."""

    path: str  # as it was typed
    kind: str  # of the files; `saved` by `save_to_disk`, or a name on the `hub`
    subset: str | None = None  # of a name on the hub, its configuration
    part: str | None = None  # which is trained on; None is the one that is called so
    one_part_only: bool = False  # whether no other part is taken beside it
    # By part, the one that is trained on first. Empty for a name on the hub.
    files: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    others: Sequence[str] = ()  # parts of the files that are not taken
    listing: Listing = field(default_factory=Listing)  # of the files, of all parts

    @property
    def digest(self) -> str:
        """Tell the files apart from others; empty for a name on the hub."""
        digest = hashlib.blake2b(digest_size=16)
        every = [(part, file, file.stat()) for part, files in self.files.items() for file in files]
        if not every:
            return ""
        is_hashed = sum(state.st_size for _, _, state in every) <= _HASHED_BYTES
        for part, file, state in every:
            known = f"{file}|{state.st_size}|{state.st_mtime_ns}"
            if is_hashed:
                with reading(file), file.open("rb") as stream:
                    known = hashlib.file_digest(stream, hashlib.blake2b).hexdigest()
            digest.update(f"{part}|{known}|".encode())
        return digest.hexdigest()

    def load(self, scratch: Path) -> tuple[dict[str, Any], Sequence[str]]:
        """Give a `datasets.Dataset` of each part, mapped from files in `scratch` where it can be.

        Records of JSON, and texts, are bytes in a column `text`. Gives by name the part that is
        trained on and, where there is one, the held-out part beside it; and the names of those that
        are not taken.
        """
        files = [*chain.from_iterable(self.files.values())]
        if files and not sum(file.stat().st_size for file in files):
            raise DataError(f"data.path={self.path}: holds no records")
        with _explained(self), quiet():
            opened = self._opened(scratch)
        if self.kind not in {"saved", "hub"}:
            return {name: _without_media(opened[name]) for name in self.files}, self.others
        parts = opened
        # One without parts, as `save_to_disk` may write it
        if not isinstance(opened, Mapping):
            parts = {TRAIN: opened}
        taken, others = _chosen([*parts], self)
        return {name: _without_media(parts[name]) for name in taken}, others

    def _opened(self, scratch: Path) -> Any:  # noqa: ANN401 - a Dataset, or several by name
        read_cache_without_network(self.path)
        import datasets  # type: ignore[import-untyped]  # noqa: PLC0415 - seconds, for this option

        is_shown = sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0"
        # A download alone has a bar of the library; what follows has one of ours.
        if self.kind == "hub" and is_shown:
            datasets.enable_progress_bars()
        else:
            datasets.disable_progress_bars()
        if self.kind == "saved":
            return datasets.load_from_disk(str(expanded(self.path)))
        if self.kind == "hub":
            return datasets.load_dataset(self.path, self.subset)
        if self.kind in {"parquet", "arrow"}:
            links = {part: list[str]() for part in self.files}
            # By links: the library takes names for patterns
            for part, files in self.files.items():
                for i, file in enumerate(files):
                    (link := scratch / f"{part}-{i}").symlink_to(file)
                    links[part].append(glob.escape(str(link)))
            return datasets.load_dataset(self.kind, data_files=links, cache_dir=str(scratch))
        tables = dict[str, Any]()
        for part, files in self.files.items():
            tables[part] = read_table(files, self.kind, scratch / f"{part}.rows")
        return tables

    @property
    def table(self) -> Path | None:
        """Name the file of CSV that all records are rows of; None where there is none."""
        files = [*chain.from_iterable(self.files.values())]
        return files[0] if self.kind == "csv" and len(files) == 1 else None

    def places(self, part: str) -> Iterator[str]:
        """Name all records of a part in their order, by the file's own name and the line."""
        if self.kind not in ROWS:
            yield from (f"record {number}" for number in count(1))
        root = expanded(self.path).absolute()
        for file in self.files.get(part, ()):
            name, mark = lines.name_below(file, root), ":"
            if lines.holds_list(file):
                mark = ": record "
            for line, _ in ROWS[self.kind](file):
                yield f"{name}{mark}{line}"

    def name_of(self, part: str, row: int, before: int = 0) -> str:
        """Name a record, by its number from 0 in its part: by its line where it has one.

        `before` are the lines of the record ahead of the one that is meant.
        """
        files = self.files.get(part, ())
        if self.kind not in ROWS:
            return f"{files[0] if len(files) == 1 else self.path}: record {row + 1}"
        numbered = ((file, line) for file in files for line, _ in ROWS[self.kind](file))
        file, line = next(islice(numbered, row, None))
        return lines.record_place(file, line + before)


def _without_media(records: Any) -> Any:  # noqa: ANN401 - a Dataset
    """Leave out images, sounds and films, whose decoding a file may turn into running programs."""
    from datasets.features.features import require_decoding  # type: ignore[import-untyped]  # noqa: PLC0415 - as above

    names = [name for name, kind in records.features.items() if require_decoding(kind)]
    return records if not names else records.remove_columns(names)


def find_records(
    path: str,
    subset: str | None = None,
    part: str | None = None,
    *,
    one_part_only: bool = False,
    learns: bool = True,
) -> RecordSource:
    """Find out what a path holds; a folder or files are parted by words in their names, if at all.

    `subset` is the configuration of a name on the hub. The `part` is trained on, None for the one
    whose name begins with `train`; with `one_part_only` no other is taken beside it. Without
    `learns` files are not parted.
    """
    source = RecordSource(path, "hub", subset, part, one_part_only)
    place = expanded(path).absolute()
    is_file = lines.kind_suffix(place) in _KINDS or place.suffix.lower() in lines.UNPACKED
    is_name = HUB_NAME.fullmatch(path) and not is_file
    if not place.exists() and is_name and not (place.parent.exists() and "/" in path):
        return source
    with reading(place):
        listing = files_at(place, _takes)
    files = listing.files
    if place.is_dir() and any((place / name).is_file() for name in _SAVED):
        return replace(source, kind="saved", files={TRAIN: files})
    kinds = Counter(_KINDS.get(lines.kind_suffix(file), "") for file in files)
    # A file that was named itself may have any suffix.
    kinds.pop("", None)
    if len(kinds) > 1:
        # Text beside data of another kind is such as a licence.
        listing.others[OTHER] += kinds.pop("text", 0)
    if len(kinds) != 1:
        text = f"no file ends with one of {', '.join(_KINDS)}"
        if kinds:
            there = ", ".join(kinds)
            text = f"holds files of several kinds ({there}); name one file, or a folder of one"
        raise DataError(f"data.path={path}: {text}")
    (kind,) = kinds
    files = [file for file in files if _KINDS[lines.kind_suffix(file)] == kind]
    parts: Mapping[str, Sequence[Path]] = {TRAIN: files}
    if learns:
        parts = _parted(files, place, chooses=part is not None)
    taken, others = _chosen(list(parts), source)
    if kind == "text" and place.is_dir():
        kind = WHOLE_TEXT
    parts = {name: parts[name] for name in taken}
    return replace(source, kind=kind, files=parts, others=others, listing=listing)


def _takes(file: Path) -> bool:
    kind = _KINDS.get(lines.kind_suffix(file))
    return kind is not None and (kind != "text" or lines.is_text(file))


def _parted(files: Sequence[Path], root: Path, *, chooses: bool) -> Mapping[str, Sequence[Path]]:
    """Part files by words such as `train` and `test`, where all of their names have one.

    Without a `train` among them they are one part, unless a part is chosen.
    """
    named: dict[str, list[Path]] = {}
    for file in files:
        # "." of a single file
        word = _PART.search(str(file.relative_to(root)).lower())
        part = "" if word is None else word[1]
        named.setdefault(part, []).append(file)
    if "" in named or not (TRAIN in named or chooses):
        return {TRAIN: files}
    return named


def _chosen(names: Sequence[str], source: RecordSource) -> tuple[Sequence[str], Sequence[str]]:
    """Choose the part that is trained on, and a held-out one beside it, by their names.

    Beside `train_sft` that is `test_sft`, else the one part that is called as held-out ones are.
    Gives their names, and those of the others; a DataError where none fits, or several do.
    """
    place, there = f"data.path={source.path}", ", ".join(names)
    if source.part is not None and source.part not in names:
        text = "it has one alone; leave it out, or null"
        if len(names) > 1:
            text = f"there are {there}"
        raise DataError(f"data.part={source.part}: no such part of {source.path}; {text}")
    if len(names) == 1:
        found = [*names]
    elif source.part:
        found = [source.part]
    else:
        found = [name for name in names if name.startswith(TRAIN)]
    if len(found) != 1:
        several = "no part is train"
        if found:
            several = f"{' and '.join(found)} are parts to train on"
        raise DataError(f"{place}: {several}; there are {there}: type data.part=NAME")
    taken = [found[0]]
    partner = _partner(found[0], names)
    if partner is not None and not source.one_part_only:
        taken.append(partner)
    return taken, [name for name in names if name not in taken]


def _partner(part: str, names: Sequence[str]) -> str | None:
    """Find the held-out part that goes with one that is trained on; None where none does."""
    rest = [name for name in names if name != part]
    for word in HELD_OUT_NAMES:
        if (name := part.replace(TRAIN, word)) in rest:
            return name
    # Else of the first word that some begin with: of several nobody says which one.
    for word in HELD_OUT_NAMES:
        begun = [name for name in rest if name.startswith(word)]
        if len(begun) > 1:
            return None
        if begun:
            return begun[0]
    return None


@contextmanager
def _explained(source: RecordSource) -> Iterator[None]:
    """Say in one line what `datasets` cannot read."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        *_, first = causes(error)
        why = " ".join(str(first).split())
        where = f"data.path={source.path}"
        if source.kind == "hub":
            text = not_found("data set", source.path)
            if not (isinstance(first, OSError) or "cached in None" in why):
                text = f"cannot be loaded from the hub: {why:.200}"
            raise DataError(f"{where}: {text}") from error
        raise DataError(f"{where}: cannot be read as {source.kind}: {why:.300}") from error


def read_table(files: Sequence[Path], kind: str, to: Path) -> Any:  # noqa: ANN401 - a Dataset
    """Copy the rows of files into a file of Arrow, and map that as a `datasets.Dataset`."""
    import pyarrow as pa  # type: ignore[import-untyped]  # noqa: PLC0415 - seconds, as `datasets`
    from datasets import Dataset  # noqa: PLC0415

    numbered = chain.from_iterable(map(ROWS[kind], files))
    rows = (row for _, row in numbered)
    batches = iter(lambda: [*islice(rows, _ROWS_AT_ONCE)], [])
    first = next(batches, list[dict[str, Any]]([{}]))
    # With offsets of 64 bits: a column may have more than 2 GiB.
    cell = pa.large_string() if kind == "csv" else pa.large_binary()
    schema = pa.schema([(name, cell) for name in first[0]])
    place = files[0].parent if files[1:] else files[0]
    with (
        progress(f"reading {place}") as advance,
        pa.OSFile(str(to), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        for batch in chain([first], batches):
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
            advance()
    return Dataset.from_file(str(to))


def _csv_rows(file: Path) -> NumberedRows:
    """Give the rows of CSV by the names of its columns; of bad ones why they are."""
    rows = lines.csv_rows_of(file)
    _, head = next(rows, (1, []))
    names = [name or f"Unnamed: {i}" for i, name in enumerate(head)]
    if len(names) != len({*names}):
        twice = max(names, key=names.count)
        raise DataError(f"data: {file}:1: two columns are named {twice!r}; rename one")
    for number, row in rows:
        cells: dict[str, str | None] = dict.fromkeys(names)
        why = lines.row_fault(row, len(names))
        if why is None:
            cells.update(zip(names, row, strict=True))
        yield number, {**cells, lines.FAULT_COLUMN: why}


def _text_rows(divide: Callable[[Path], lines.NumberedLines], file: Path) -> NumberedRows:
    for number, text in divide(file):
        yield number, {"text": text}


ROWS: Mapping[str, Callable[[Path], NumberedRows]] = {
    "csv": _csv_rows,
    "json": partial(_text_rows, lines.json_records_of),
    "text": partial(_text_rows, lines.paragraphs_of),
    WHOLE_TEXT: partial(_text_rows, lines.whole_text_of),
}
"""What divides files into rows, by their kind: strings of CSV, else bytes in a column `text`."""
