"""The manifest of a checkpoint: the exact files and tensors it consists of, and proof of itself.

`manifest.json` is one JSON object, written last. Its key `sha256` is the digest of all the others,
and its bytes must be those that this module writes, so no bit of it can change unnoticed. That
holds for every format version, which lets a newer format be told from damage.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

from trainer.durable import Written

FILE_NAME = "manifest.json"
FORMAT_VERSION = 1

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
class Shape:
    """Where a tensor lies and what it is.

    Attributes:
        shape: sizes of its dimensions.
        dtype: as safetensors spells it.
        file: the shard that holds it.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str


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
    tensors: Mapping[str, Shape]
    aliases: Mapping[str, str]
    meta: Mapping[str, Any]


def dump(manifest: Manifest) -> bytes:
    """Write a manifest; equal manifests give equal bytes.

    Raises:
        ValueError: `meta` holds NaN or infinity.
        TypeError: `meta` holds something that is not JSON.
    """
    body = {"format_version": FORMAT_VERSION, **asdict(manifest)}
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
    if version != FORMAT_VERSION:
        raise NewerFormatError(f"format {version!r}, this version reads {FORMAT_VERSION}")
    try:
        manifest = _read(body)
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{FILE_NAME} lacks a field or holds a wrong one") from error
    _check(manifest)
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
        tensors={
            name: Shape(tuple(content["shape"]), content["dtype"], content["file"])
            for name, content in body["tensors"].items()
        },
        aliases=dict(body["aliases"].items()),
        meta=dict(body["meta"].items()),
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
    if {shape.file for shape in manifest.tensors.values()} != manifest.files.keys():
        raise DamagedError(f"{FILE_NAME} has files without tensors, or tensors without a file")
    if not all(map(_is_size, (n for shape in manifest.tensors.values() for n in shape.shape))):
        raise DamagedError(f"{FILE_NAME} has a shape that is none")
    if manifest.aliases.keys() & manifest.tensors.keys() or not (
        set(manifest.aliases.values()) <= manifest.tensors.keys()
    ):
        raise DamagedError(f"{FILE_NAME} has an alias of no tensor")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
