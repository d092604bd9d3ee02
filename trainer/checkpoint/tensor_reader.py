"""Tensors on disk, read when they are asked for, and no more rows of them than that.

What was written in slices by several ranks reads as one tensor. Files stay open for a while, so
that a reader survives the pruning of what it reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.checkpoint.manifest import DamagedError, Entry, Slice
from trainer.checkpoint.tensor_files import DTYPES
from trainer.core.bits import bits_of

_MOST_OPEN = 64

_TYPES = {word: dtype for dtype, word in DTYPES.items()}


@final
class Files:
    """The safetensors files of a verified checkpoint.

    Args:
        folder: where they are.
        entries: all tensors in them.
    """

    def __init__(self, folder: Path, entries: Mapping[str, Entry]) -> None:
        self._folder = folder
        self._expected: dict[str, dict[str, tuple[list[int], str]]] = {}
        for name, entry in entries.items():
            for part in entry.slices:
                told = list(entry.shape_of(part)), entry.dtype
                self._expected.setdefault(part.file, {})[name] = told
        self._opened: OrderedDict[str, Any] = OrderedDict()

    def open(self, name: str) -> Any:  # noqa: ANN401 - untyped in safetensors
        """Open a file whose header says what the manifest says; one stays open for a while.

        Raises:
            DamagedError: it says something else.
            OSError: it cannot be read.
        """
        if name in self._opened:
            self._opened.move_to_end(name)
            return self._opened[name]
        file = open_file(self._folder / name)
        found = {tensor: (shape, dtype) for tensor, shape, dtype in described(file)}
        if found != self._expected[name]:
            raise DamagedError(f"{name} holds other tensors than the manifest says")
        self._opened[name] = file
        if len(self._opened) > _MOST_OPEN:
            self._opened.popitem(last=False)
        return file


@final
@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor on disk.

    Attributes:
        name: its own.
        entry: where it lies.
        files: the files it lies in.
    """

    name: str
    entry: Entry
    files: Files

    @property
    def shape(self) -> torch.Size:
        """Sizes of its dimensions."""
        return torch.Size(self.entry.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Type of its elements."""
        return _TYPES[self.entry.dtype]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        """Read some rows, or all of it; the file's own memory where they lie in one.

        Args:
            rows: from one number up to another, or `...`.

        Returns:
            On the CPU, not to be written into.
        """
        parts = self.entry.slices
        if isinstance(rows, EllipsisType):
            if len(parts) == 1:
                whole: Tensor = self._slice(parts[0])[...]
                return whole
            rows = slice(0, self.shape[0])
        read = [
            self._slice(part)[max(rows.start - part.start, 0) : rows.stop - part.start]
            for part in parts
            if part.start < rows.stop and rows.start < part.stop
        ]
        if len(read) == 1:
            only: Tensor = read[0]
            return only
        return torch.cat(read) if read else torch.empty((0, *self.shape[1:]), dtype=self.dtype)

    def _slice(self, part: Slice) -> Any:  # noqa: ANN401 - untyped in safetensors
        return self.files.open(part.file).get_slice(self.name)


@final
class Whole(Mapping[str, Tensor]):
    """Stored tensors, each read whole every time it is asked for."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[name][...]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def stored_in(
    folder: Path, entries: Mapping[str, Entry], aliases: Mapping[str, str]
) -> tuple[dict[str, Stored], Files]:
    """List the tensors of a checkpoint under all of their names.

    Raises:
        DamagedError: one is of a type that is not known.
    """
    for name, entry in entries.items():
        if entry.dtype not in _TYPES:
            raise DamagedError(f"{name!r:.80} is of type {entry.dtype!r:.80}")
    files = Files(folder, entries)
    stored = {name: Stored(name, entry, files) for name, entry in entries.items()}
    return stored | {alias: stored[name] for alias, name in aliases.items()}, files


def stored_file(path: Path) -> dict[str, Stored]:
    """List the tensors of one safetensors file from anywhere.

    Raises:
        DamagedError: it is none, or holds types that are not known.
        OSError: it cannot be read.
    """
    entries = {
        name: Entry.whole(tuple(shape), dtype, path.name)
        for name, shape, dtype in described(open_file(path))
    }
    return stored_in(path.parent, entries, {})[0]


def same_bits(one: Mapping[str, Stored], other: Mapping[str, Stored], names: Iterable[str]) -> bool:
    """Whether stored tensors agree bit for bit, however they are sliced."""
    return all(
        one[name].shape == other[name].shape
        and one[name].dtype == other[name].dtype
        and torch.equal(bits_of(one[name][...]), bits_of(other[name][...]))
        for name in names
    )


def open_file(path: Path) -> Any:  # noqa: ANN401 - untyped in safetensors
    """Open a safetensors file.

    Raises:
        DamagedError: it is none.
        OSError: it cannot be read.
    """
    try:
        return safe_open(path, "pt")
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedError(f"{path.name} is not a safetensors file: {error}") from error


def described(file: Any) -> Iterator[tuple[str, list[int], str]]:  # noqa: ANN401 - as above
    """List the tensors of an open file.

    Yields:
        Name, sizes, and type as safetensors spells it.
    """
    for name in file.keys():  # noqa: SIM118 - no mapping
        part = file.get_slice(name)
        yield name, part.get_shape(), part.get_dtype()
