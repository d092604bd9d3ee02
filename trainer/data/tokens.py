"""Read text that is tokenised already: raw token files, memory-mapped."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.config.components import Count, ExistingPath, Pair, Share
from trainer.core.errors import DataError
from trainer.core.format import expanded
from trainer.core.rows import Row, RunFacts
from trainer.data.documents import divide
from trainer.data.files import files_at, reading
from trainer.data.split import HELD_OUT, HOLDOUT, TRAIN, held_out_count
from trainer.plan.cut import IntArray

_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_SUFFIXES = {".u16": "uint16", ".uint16": "uint16", ".u32": "uint32", ".uint32": "uint32"}
_HASHED_BLOCKS = 64
_BLOCK_BYTES = 2**16
_INSPECTED_TOKENS = 4096
_FEWEST_INSPECTED = 64


@final
class TokenWindows(Dataset[dict[str, Tensor]]):
    """Windows of `max_length` tokens; the last one of a file may be shorter.

    A later window begins with the last token of the one before as context, so that every token
    but a file's first is predicted once. A file is raw little-endian unsigned integers without a
    header. Of a folder all `.bin` files but hidden ones are read in order of their names; no window
    crosses from one into the next. Held out are the last windows; but a folder with files named
    `train*` and `val*` brings its own split, and `holdout` is not used. `labels` are `input_ids`;
    the objective shifts.

    Args:
        path: file, or folder of `.bin` files.
        split: `train` or `held_out`.
        max_length: tokens of a window; at least 2.
        dtype: `uint16`, `uint32`, or `auto`: by a suffix `.u16`, `.uint16`, `.u32`, `.uint32`
            (also before `.bin`), else `uint16`.
        holdout: share of the windows that is held out, at least one.
        vocab_size: tokens must be below it; `None` leaves them unchecked.

    Raises:
        DataError: no such file, an empty one, or one whose size is not a whole number of tokens.
    """

    draws_randomness = False

    def __init__(
        self,
        path: ExistingPath,
        split: str = "train",
        max_length: Pair = 256,
        dtype: Literal["auto", "uint16", "uint32"] = "auto",
        holdout: Share = HOLDOUT,
        vocab_size: Count | None = None,
    ) -> None:
        of_path = partial(TokenWindows, path, max_length=max_length, dtype=dtype)
        self._of_side = partial(of_path, holdout=holdout, vocab_size=vocab_size)
        place = expanded(path).absolute()
        with reading(place):
            self._listing = files_at(place, lambda file: file.suffix == ".bin", ".bin files")
        if not (paths := self._listing.files):
            raise DataError(f"data.path={path}: the folder holds no .bin files")
        named = _by_name(paths)
        self._paths, self.split_rule = paths, "the last windows"
        self.holdout: float | None = holdout
        if named is not None:
            self._paths, self.split_rule = named[split], "files named train* and val*"
            self.holdout = None
        self.max_length, self.vocab_size = max_length, vocab_size
        stated: str | None = dtype
        if dtype == "auto":
            stated = None
            for suffix in paths[0].suffixes:
                stated = _SUFFIXES.get(suffix, stated)
        self._dtype = _DTYPES[stated or "uint16"]
        sizes = np.array([_num_tokens(file, self._dtype) for file in self._paths])
        self._maps: dict[int, npt.NDArray[Any]] = {}
        # One token alone is a window too, which predicts nothing.
        files, _, lengths = divide(sizes, max_length, "chunk")
        self._ends = np.cumsum(np.bincount(files))
        boundary = len(lengths) - held_out_count(len(lengths), holdout)
        sides = {TRAIN: slice(boundary), HELD_OUT: slice(boundary, None)}
        side = sides[split]
        if named is not None:
            side = slice(None)
        self.lengths: IntArray = lengths[side]
        self.original_ids: IntArray = np.arange(len(lengths))[side]
        settings = split, max_length, self._dtype, repr(holdout), self.vocab_size, "with context"
        self._settings = "|".join(map(str, settings))
        head = self._mapped(0)[:_INSPECTED_TOKENS]
        is_guessed = stated is None and len(head) >= _FEWEST_INSPECTED
        if is_guessed and head.any() and not head[1::2].any():
            raise DataError(
                f"data: {self._paths[0]}: every second uint16 is 0, as if the tokens were "
                f"uint32; set data.dtype"
            )

    def splits(self) -> dict[str, TokenWindows]:
        """Give both sides of the same files."""
        return {name: self._of_side(split=name) for name in (TRAIN, HELD_OUT)}

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Give `input_ids` and `labels`, both `(length,)` int64 and the same tensor."""
        window = int(self.original_ids[i])
        number = int(np.searchsorted(self._ends, window, side="right"))
        first = int(self._ends[number - 1]) if number else 0
        begin = (window - first) * (self.max_length - 1)
        tokens = self._mapped(number)[begin : begin + self.max_length].astype(np.int64)
        if self.vocab_size is not None and tokens.max() >= self.vocab_size:
            position = int(tokens.argmax())
            raise DataError(
                f"data: {self._paths[number]}: token {tokens[position]} at position "
                f"{begin + position} is not below data.vocab_size={self.vocab_size}; "
                "check data.dtype"
            )
        input_ids = torch.from_numpy(tokens)
        return {"input_ids": input_ids, "labels": input_ids}

    def describe_records(self, facts: RunFacts) -> Sequence[Row]:
        """Say what of a folder was passed over."""
        return self._listing.describe()

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memmap is a copy of the whole file; another process maps it anew.
        return {**self.__dict__, "_maps": {}}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the settings, the files' sizes, and blocks taken evenly from each.

        Reading all of a corpus of tokens at every start would cost minutes; files of up to 4 MiB
        are read whole, of larger ones 4 MiB, divided among the files where there are many.
        """
        digest = hashlib.sha256(self._settings.encode())
        blocks = max(_HASHED_BLOCKS // len(self._paths), 1)
        for number, file in enumerate(self._paths):
            mapped = self._mapped(number).view(np.uint8)
            digest.update(f"|{len(mapped)}|{file.name}|".encode())
            # The first block and the last are among them.
            for begin in np.linspace(0, max(len(mapped) - _BLOCK_BYTES, 0), blocks, dtype=int):
                digest.update(mapped[begin : begin + _BLOCK_BYTES].tobytes())
        return digest.hexdigest()

    def _mapped(self, number: int) -> npt.NDArray[Any]:
        if number not in self._maps:
            file = self._paths[number]
            with reading(file):
                self._maps[number] = np.asarray(np.memmap(file, dtype=self._dtype, mode="r"))
        return self._maps[number]


def _by_name(paths: Sequence[Path]) -> dict[str, list[Path]] | None:
    """Part files by what their names begin with; None where not both sides have one."""
    parts: dict[str, list[Path]] = {TRAIN: [], HELD_OUT: []}
    for path in paths:
        if path.name.startswith("train"):
            parts[TRAIN].append(path)
        elif path.name.startswith("val"):
            parts[HELD_OUT].append(path)
    return None if not all(parts.values()) else parts


def _num_tokens(path: Path, dtype: np.dtype[Any]) -> int:
    with reading(path), path.open("rb") as file:
        size = path.stat().st_size
        magic = file.read(6)
    if magic == b"\x93NUMPY":
        raise DataError(
            f"data: {path}: is a NumPy file, whose header would be read as tokens; write the "
            "numbers alone: np.load(...).tofile(...)"
        )
    if size == 0:
        raise DataError(f"data: {path}: holds no tokens")
    if size % dtype.itemsize:
        raise DataError(
            f"data: {path}: {size} bytes are not a whole number of {dtype.name} tokens; "
            f"the file is cut short, or data.dtype is wrong"
        )
    return size // dtype.itemsize
