"""The manifest of a checkpoint: the exact files and tensors it consists of, and proof of itself.

`manifest.json` is one JSON object, written last. Its key `sha256` is the digest of all the others,
and its bytes must be those that this module writes, so no bit of it can change unnoticed. That
holds for every format version, which lets a newer format be told from damage.

Format 2 lets a tensor lie in several files, each with some rows of it; format 1 had one file each.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

from trainer.core.durable import Written

FILE_NAME = "manifest.json"
FORMAT_VERSION = 2
READABLE = (1, 2)

MAX_BYTES = 256 << 20
"""A larger file is no manifest of ours, and is not read."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class DamagedError(Exception):
    """A checkpoint is not what was written; the text says in what, without its path."""


class NewerFormatError(Exception):
    """A checkpoint is intact, and of a format that this program does not know."""


@final
@dataclass(frozen=True, slots=True)
class Slice:
    """Some rows of a tensor, and the file that holds them under the tensor's name.

    Attributes:
        file: its name.
        start: the first row along dimension 0.
        stop: the one after the last.
    """

    file: str
    start: int
    stop: int


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """What a tensor is and where it lies.

    Attributes:
        shape: sizes of its dimensions.
        dtype: as safetensors spells it.
        slices: the rows in order, without a gap; a scalar counts as one row.
    """

    shape: tuple[int, ...]
    dtype: str
    slices: tuple[Slice, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...], dtype: str, file: str) -> Entry:
        """Describe a tensor that lies in one file."""
        return cls(shape, dtype, (Slice(file, 0, _num_rows(shape)),))

    def shape_of(self, part: Slice) -> tuple[int, ...]:
        """Give the sizes that a slice has in its file."""
        return self.shape if len(self.slices) == 1 else (part.stop - part.start, *self.shape[1:])


@final
@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: optimizer steps taken.
        files: every file but the manifest itself.
        tensors: every tensor.
        aliases: further names of tensors (tied weights), each with the name that is stored.
        meta: everything that is not a tensor, as JSON.
    """

    step: int
    files: Mapping[str, Written]
    tensors: Mapping[str, Entry]
    aliases: Mapping[str, str]
    meta: Mapping[str, Any]


def dump(manifest: Manifest) -> bytes:
    """Write a manifest; equal manifests give equal bytes.

    Raises:
        ValueError: `meta` holds NaN or infinity.
        TypeError: `meta` holds something that is not JSON.
        DamagedError: it is not consistent, and could not be read back.
    """
    _check(manifest)
    body = {
        "format_version": FORMAT_VERSION,
        "step": manifest.step,
        "files": {name: asdict(content) for name, content in manifest.files.items()},
        "tensors": {name: _told(entry) for name, entry in manifest.tensors.items()},
        "aliases": dict(manifest.aliases),
        "meta": manifest.meta,
    }
    return _sign(json.loads(json.dumps(body, allow_nan=False)))


def parse(data: bytes) -> Manifest:
    """Read a manifest and check that it is whole and consistent.

    Raises:
        DamagedError: it is not.
        NewerFormatError: it is whole, but of another format version.
    """
    try:
        body = json.loads(data)
        whole = isinstance(body, dict) and "sha256" in body
        whole = whole and _sign({k: v for k, v in body.items() if k != "sha256"}) == data
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{FILE_NAME} is not JSON") from error
    if not whole:
        raise DamagedError(f"{FILE_NAME} does not match its own SHA-256")
    version = body.pop("format_version", None)
    if isinstance(version, bool) or version not in READABLE:
        raise NewerFormatError(f"format {version!r}, this version reads up to {FORMAT_VERSION}")
    try:
        manifest = _read(body)
        _check(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{FILE_NAME} lacks a field or holds a wrong one") from error
    return manifest


def _sign(body: dict[str, Any]) -> bytes:
    signed = {**body, "sha256": hashlib.sha256(_text(body)).hexdigest()}
    return _text(signed)


def _text(body: dict[str, Any]) -> bytes:
    return f"{json.dumps(body, indent=1)}\n".encode()


def _read(body: dict[str, Any]) -> Manifest:
    return Manifest(
        step=body["step"],
        files={name: Written(**content) for name, content in body["files"].items()},
        tensors={name: _heard(content) for name, content in body["tensors"].items()},
        aliases=dict(body["aliases"].items()),
        meta=dict(body["meta"].items()),
    )


def _told(entry: Entry) -> dict[str, Any]:
    told: dict[str, Any] = {"shape": entry.shape, "dtype": entry.dtype}
    if len(entry.slices) == 1:
        return {**told, "file": entry.slices[0].file}
    slices = [{"rows": [part.start, part.stop], "file": part.file} for part in entry.slices]
    return {**told, "slices": slices}


def _heard(content: dict[str, Any]) -> Entry:
    shape, dtype = tuple(content["shape"]), content["dtype"]
    if not all(map(_is_size, shape)) or not isinstance(dtype, str):
        raise DamagedError(f"{FILE_NAME} has a shape or a type that is none")
    if "file" in content:
        return Entry.whole(shape, dtype, content["file"])
    slices = [(part["file"], *part["rows"]) for part in content["slices"]]
    return Entry(shape, dtype, tuple(Slice(*part) for part in slices))


def _num_rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


def _tiles(entry: Entry) -> bool:
    """Whether the slices are the rows: one file each, without a gap or an overlap."""
    ends = [0, *(part.stop for part in entry.slices)]
    return (
        [part.start for part in entry.slices] == ends[:-1]
        and ends[-1] == _num_rows(entry.shape)
        and len({part.file for part in entry.slices}) == len(entry.slices) > 0
        and (len(entry.slices) == 1 or all(part.start < part.stop for part in entry.slices))
    )


def _check(manifest: Manifest) -> None:
    """Refuse what a stranger may have written under a right digest.

    Raises:
        DamagedError: names, sizes or references are not such as `dump` writes.
    """
    for name, content in manifest.files.items():
        if not _PLAIN_NAME.fullmatch(name):
            raise DamagedError(f"{FILE_NAME} names a file {name!r:.80}")
        if not _is_size(content.size) or not _DIGEST.fullmatch(str(content.sha256)):
            raise DamagedError(f"{FILE_NAME} has no size or digest of {name}")
    if not _is_size(manifest.step):
        raise DamagedError(f"{FILE_NAME} has no step")
    slices = [part for entry in manifest.tensors.values() for part in entry.slices]
    if {part.file for part in slices} != manifest.files.keys():
        raise DamagedError(f"{FILE_NAME} has files without tensors, or tensors without a file")
    if torn := [name for name, entry in manifest.tensors.items() if not _tiles(entry)]:
        raise DamagedError(f"{FILE_NAME} has slices of {torn[0]!r:.80} that are not its rows")
    if manifest.aliases.keys() & manifest.tensors.keys() or not (
        set(manifest.aliases.values()) <= manifest.tensors.keys()
    ):
        raise DamagedError(f"{FILE_NAME} has an alias of no tensor")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
