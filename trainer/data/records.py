"""Read records through `datasets`: files of the field's formats, folders of them, names on the hub.

A record of JSON stays text until it is encoded: so it is as it was written, whatever the others
hold, and one that is bad has a line. Nothing is written beside the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import numpy as np

from trainer.core.errors import DataError
from trainer.core.format import expanded
from trainer.core.hub_cache import HUB_NAME, read_cache_without_network
from trainer.data.files import files_at, reading
from trainer.data.samples import HELD_OUT_NAMES, TRAIN
from trainer.models.transformers_classes import quiet
from trainer.plan.cut import IntArray

_KINDS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines", ".json"), "json"),
    **{".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text"},
}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
_SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")
_PART = re.compile(rf"(?<![a-z])({TRAIN}|{'|'.join(HELD_OUT_NAMES)})(?![a-z])")
_HASHED_BYTES = 2**30
"""Up to here files are known by their contents, beyond it by their name, size and time: a start may
cost a second, not a reading of the whole corpus."""


@final
@dataclass(frozen=True, kw_only=True)
class RecordSource:
    """Where records are read from."""

    path: str  # as it was typed
    kind: str  # of the files; `saved` by `save_to_disk`, or a name on the `hub`
    # By part, the one that is trained on first. Empty for a name on the hub.
    files: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    subset: str | None = None  # of a name on the hub, its configuration
    part: str | None = None  # which is trained on; None is the one that is called so
    is_alone: bool = False  # whether no other part is taken beside it
    # Parts of the files that are not taken
    others: Sequence[str] = ()

    @property
    def digest(self) -> str:
        """Tell the files apart from others; empty for a name on the hub."""
        digest = hashlib.blake2b(digest_size=16)
        every = [(part, file) for part, files in self.files.items() for file in files]
        states = [file.stat() for _, file in every]
        is_hashed = sum(state.st_size for state in states) <= _HASHED_BYTES
        for (part, file), state in zip(every, states, strict=True):
            known = f"{file}|{state.st_size}|{state.st_mtime_ns}"
            if is_hashed:
                with reading(file), file.open("rb") as stream:
                    known = hashlib.file_digest(stream, hashlib.blake2b).hexdigest()
            digest.update(f"{part}|{known}|".encode())
        return digest.hexdigest() if every else ""

    def load(self, scratch: Path) -> tuple[dict[str, Any], Sequence[str]]:
        """Give a `datasets.Dataset` of each part, mapped from files in `scratch` where it can be.

        Records of JSON are strings in a column `text`.

        Returns:
            The part that is trained on and, where there is one, the held-out part beside it, by
            name; and the names of those that are not taken.

        Raises:
            DataError: a file cannot be read, or no part is the one to take; names it.
        """
        files = [file for each in self.files.values() for file in each]
        if files and not sum(file.stat().st_size for file in files):
            raise DataError(f"data.path={self.path}: holds no records")
        with _explained(self), quiet():
            opened = self._opened(scratch)
        if self.kind not in {"saved", "hub"}:
            return {name: opened[name] for name in self.files}, self.others
        parts = opened if isinstance(opened, Mapping) else {TRAIN: opened}
        taken, others = _chosen(list(parts), self)
        return {name: parts[name] for name in taken}, others

    def _opened(self, scratch: Path) -> Any:  # noqa: ANN401 - a Dataset, or several by name
        read_cache_without_network(self.path)
        import datasets  # type: ignore[import-untyped]  # noqa: PLC0415 - seconds, for this option

        is_shown = sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0"
        (datasets.enable_progress_bars if is_shown else datasets.disable_progress_bars)()
        if self.kind == "saved":
            return datasets.load_from_disk(str(expanded(self.path)))
        if self.kind == "hub":
            return datasets.load_dataset(self.path, self.subset)
        files = {part: [str(file) for file in each] for part, each in self.files.items()}
        if self.kind == "json" and _holds_lists(self.files):
            lists = {part: {"text": _listed(each)} for part, each in self.files.items()}
            return {part: datasets.Dataset.from_dict(each) for part, each in lists.items()}
        options: dict[str, Any] = {}
        if self.kind == "text":
            is_file = expanded(self.path).is_file()
            options["sample_by"] = "paragraph" if is_file else "document"
        elif self.kind == "csv" and ".tsv" in next(iter(self.files.values()))[0].suffixes:
            options["sep"] = "\t"
        reader = "text" if self.kind == "json" else self.kind
        return datasets.load_dataset(reader, data_files=files, cache_dir=str(scratch), **options)

    def name_of(self, part: str, row: int) -> str:
        """Name a record, by its number from 0 in its part: by its line where it has one."""
        files = self.files.get(part, ())
        is_lines = self.kind == "json" and not _holds_lists(self.files)
        if not is_lines or any(_COMPRESSED & set(file.suffixes) for file in files):
            return f"{files[0] if len(files) == 1 else self.path}: record {row + 1}"
        for file in files:
            with file.open(errors="replace", encoding="utf-8") as stream:
                count = sum(1 for _ in stream)
            if row < count:
                return f"{file}:{row + 1}"
            row -= count
        return self.path


def find_records(
    path: str, subset: str | None = None, part: str | None = None, *, is_alone: bool = False
) -> RecordSource:
    """Find out what a path holds; a folder or files are parted by words in their names.

    Args:
        path: file, folder, or name on the hub.
        subset: of a name on the hub, its configuration.
        part: the one that is trained on; None is the one whose name begins with `train`.
        is_alone: whether no other part is taken beside it.

    Raises:
        DataError: there is nothing, or files of several kinds, or no part is the one to take.
    """
    source = RecordSource(path=path, kind="hub", subset=subset, part=part, is_alone=is_alone)
    place = expanded(path).absolute()
    is_name = HUB_NAME.fullmatch(path) and place.suffix.lower() not in {*_KINDS, *_COMPRESSED}
    if not place.exists() and is_name and not (place.parent.exists() and "/" in path):
        return source
    with reading(place):
        files = files_at(place)
    if place.is_dir() and any((place / name).is_file() for name in _SAVED):
        return replace(source, kind="saved", files={TRAIN: files})
    found = {file: kind for file in files if (kind := _kind_of(file))}
    kinds = Counter(found.values())
    if len(kinds) > 1:
        del kinds["text"]  # such as a licence beside the data
    if len(kinds) != 1:
        text = (
            f"holds files of several kinds ({', '.join(kinds)}); name one file, or a folder of one"
        )
        known = ", ".join(_KINDS)
        raise DataError(
            f"data.path={path}: {text if kinds else f'no file ends with one of {known}'}"
        )
    (kind,) = kinds
    files = [file for file in files if found.get(file) == kind]
    parts = _parted(files, place, chooses=part is not None)
    taken, others = _chosen(list(parts), source)
    return replace(source, kind=kind, files={n: parts[n] for n in taken}, others=others)


def _kind_of(file: Path) -> str | None:
    suffixes = [each.lower() for each in file.suffixes if each.lower() not in _COMPRESSED]
    return _KINDS.get(suffixes[-1]) if suffixes else None


def _parted(files: Sequence[Path], root: Path, *, chooses: bool) -> Mapping[str, Sequence[Path]]:
    """Part files by words such as `train` and `test`, where all of their names have one.

    Without a `train` among them they are one part, unless a part is chosen.
    """
    named: dict[str, list[Path]] = {}
    for file in files:
        words = _PART.findall(str(file.relative_to(root)).lower()) if file != root else []
        named.setdefault(words[0] if words else "", []).append(file)
    is_parted = "" not in named and (TRAIN in named or chooses)
    return named if is_parted else {TRAIN: files}


def _chosen(names: Sequence[str], source: RecordSource) -> tuple[Sequence[str], Sequence[str]]:
    """Choose the part that is trained on, and a held-out one beside it, by their names.

    Beside `train_sft` that is `test_sft`, else the one part that is called as held-out ones are.

    Returns:
        Their names, and those of the others.

    Raises:
        DataError: no name is that of the part, or several may be.
    """
    place, there = f"data.path={source.path}", ", ".join(names)
    if source.part is not None and source.part not in names:
        text = f"there are {there}" if len(names) > 1 else "it has one alone; leave it out, or null"
        raise DataError(f"data.part={source.part}: no such part of {source.path}; {text}")
    found = [source.part] if source.part else [n for n in names if n.startswith(TRAIN)]
    found = found if len(names) > 1 else list(names)
    if len(found) != 1:
        several = f"{' and '.join(found)} are parts to train on" if found else "no part is train"
        raise DataError(f"{place}: {several}; there are {there}: type data.part=NAME")
    (part,) = found
    rest = [name for name in names if name != part]
    partners = [n for w in HELD_OUT_NAMES if (n := part.replace(TRAIN, w)) in rest][:1]
    # Else the first word that some begin with, if that is one.
    begun = ([name for name in rest if name.startswith(word)] for word in HELD_OUT_NAMES)
    partners = partners or next(filter(None, begun), [])
    taken = [part, *(partners if len(partners) == 1 and not source.is_alone else ())]
    return taken, [name for name in names if name not in taken]


def _holds_lists(files: Mapping[str, Sequence[Path]]) -> bool:
    """Whether files of JSON hold one list each, and no lines."""
    first = next(iter(files.values()))[0]
    if first.suffix.lower() != ".json":
        return False
    with reading(first), first.open("rb") as stream:
        return stream.read(2**16).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _listed(files: Sequence[Path]) -> list[str]:
    """Read files that hold a list of records each."""
    records = list[str]()
    for file in files:
        try:
            records += map(json.dumps, json.loads(file.read_bytes()))
        except ValueError as error:
            raise DataError(f"data: {file}: not JSON ({error})") from error
    return records


def select(records: Any, count: int | None) -> tuple[Any, IntArray]:  # noqa: ANN401 - a Dataset
    """Take at most so many records, at even distances; gives them, and their numbers."""
    if count is None or count >= len(records):
        return records, np.arange(len(records))
    rows = np.linspace(0, len(records) - 1, count, dtype=np.int64)
    return records.select(rows), rows


@contextmanager
def _explained(source: RecordSource) -> Iterator[None]:
    """Say in one line what `datasets` cannot read."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)
        decoding = next((c for c in causes if isinstance(c, UnicodeDecodeError)), None)
        why = "not UTF-8" if decoding else " ".join(str(causes[-1]).split())
        where = f"data.path={source.path}"
        if source.kind == "hub":
            text = "no such file or folder, and no data set that the hub or its cache gives"
            raise DataError(f"{where}: {text} ({why:.200})") from error
        raise DataError(f"{where}: cannot be read as {source.kind}: {why:.300}") from error
