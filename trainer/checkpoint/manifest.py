"""List the files of a checkpoint, and check that they are what was written, bit for bit.

`manifest.json` is one JSON object, written last. Its key `sha256` is the digest of all the others,
and its bytes must be those that this module writes, so no bit of it can change unnoticed.
`format_version` and `sha256` are the same in every format, so that another can be told from damage.
Tensors are described in the headers of their files alone.
"""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import Annotated, Any, final

from pydantic import BaseModel, ConfigDict, Field

from trainer.core.run_folder import RunFolder

FORMAT_VERSION = 4

MAX_BYTES = 256 << 20
"""A larger file is no manifest of ours, and is not read."""

_Size = Annotated[int, Field(ge=0)]
_FileName = Annotated[str, Field(pattern=r"\A[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors\z")]


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is that of a checkpoint, in whatever state."""
    return (folder / RunFolder.MANIFEST).is_file()


class DamagedError(Exception):
    """A checkpoint is not what was written; the text says in what, without its path."""


class OtherFormatError(Exception):
    """A checkpoint is intact, and of a format that this program does not read."""


@final
class FileDigest(BaseModel):
    """What a file holds."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    size: _Size  # in bytes
    sha256: Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]


@final
class Manifest(BaseModel):
    """What a checkpoint consists of."""

    model_config = ConfigDict(strict=True, frozen=True)

    format_version: int = FORMAT_VERSION
    step: _Size  # optimizer steps taken
    files: dict[_FileName, FileDigest]  # every file but the manifest itself
    # By name of a part its `version`, and its `state` as JSON, which names its tensors
    parts: dict[str, Any]


def dump(manifest: Manifest) -> bytes:
    """Write a manifest; equal ones give equal bytes, and NaN or infinity a `ValueError`."""
    return sign(json.loads(json.dumps(manifest.model_dump(), allow_nan=False)))


def sign(body: dict[str, Any]) -> bytes:
    """Write an object with its own digest."""
    digest = hashlib.sha256(_to_text(body)).hexdigest()
    return _to_text({**body, "sha256": digest})


def parse_manifest(data: bytes) -> Manifest:
    """Read a manifest, perhaps a stranger's, and check that it is whole and of this format."""
    try:
        body = json.loads(data)
        # Written again, and compared: a changed bit shows even where JSON would not see it.
        unsigned = {key: value for key, value in body.items() if key != "sha256"}
        is_whole = sign(unsigned) == data
    except (ValueError, RecursionError, AttributeError) as error:
        raise DamagedError(f"{RunFolder.MANIFEST} is not JSON") from error
    if not is_whole:
        raise DamagedError(f"{RunFolder.MANIFEST} does not match its own SHA-256")
    version = body.get("format_version")
    if version != FORMAT_VERSION:
        raise OtherFormatError(
            f"checkpoint format {version!r:.20}, and this version reads format {FORMAT_VERSION}: "
            "use the version that wrote it"
        )
    try:
        return Manifest.model_validate(body)
    except ValueError as error:
        raise DamagedError(f"{RunFolder.MANIFEST} has a missing or invalid field") from error


def verify_folder(
    folder: Path, step: int | None = None, *, rank: int = 0, num_ranks: int = 1
) -> Manifest:
    """Check that a checkpoint's folder, of `step` or any, holds exactly what was written.

    Names and sizes are checked of all files; contents of this rank's share.
    """
    found = _list_files(folder)
    if RunFolder.MANIFEST not in found or found.pop(RunFolder.MANIFEST) > MAX_BYTES:
        raise DamagedError(f"{RunFolder.MANIFEST} is missing or too large")
    manifest = parse_manifest((folder / RunFolder.MANIFEST).read_bytes())
    if step is not None and manifest.step != step:
        raise DamagedError(f"its manifest says step {manifest.step}")
    if differing := sorted(found.keys() ^ manifest.files.keys()):
        what = "foreign" if differing[0] in found else "missing"
        raise DamagedError(f"{differing[0]!r:.80} is {what}")
    for name, content in manifest.files.items():
        if found[name] != content.size:
            raise DamagedError(f"{name} has {found[name]} bytes, not {content.size}")
    # Dealt in turn, the largest first, so that ranks read about as much.
    largest_first = sorted(manifest.files, key=lambda name: -manifest.files[name].size)
    for name in largest_first[rank::num_ranks]:
        with (folder / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest.files[name].sha256:
                raise DamagedError(f"{name} does not match its SHA-256")
    return manifest


def _list_files(folder: Path) -> dict[str, int]:
    """List the files of a checkpoint with their sizes; a link, folder or device is damage."""
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise DamagedError("it is not a folder")
    found = dict[str, int]()
    for entry in folder.iterdir():
        status = entry.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"{entry.name!r:.80} is not a plain file")
        found[entry.name] = status.st_size
    return found


def _to_text(body: dict[str, Any]) -> bytes:
    return f"{json.dumps(body, indent=1)}\n".encode()
