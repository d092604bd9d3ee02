"""Read, write, list and remove objects below a URL, by fsspec and the library of its store."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, final

import fsspec  # type: ignore[import-untyped]

from trainer.config.messages import clip
from trainer.config.secrets import without_secrets
from trainer.core import durable
from trainer.core.errors import ConfigError
from trainer.core.run_folder import RunFolder

Info = Mapping[str, Any]
"""What a listing says of an object, as its library has it: `name`, `size` and more."""

# What libraries call the time of the last change
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
# The library would try for minutes before it says that nobody answers.
_S3 = {"config_kwargs": {"connect_timeout": 10, "retries": {"max_attempts": 2}}}
_LENGTH = 160  # of what a library says is wrong
_PROBE = ".written"
_OPTIONS: Mapping[str, Mapping[str, Any]] = {"s3": _S3, "file": {"auto_mkdir": True}}


class StoreError(Exception):
    """A store does not answer, or refuses; the text says why."""

    def __init__(self, error: Exception) -> None:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        super().__init__(without_secrets(text, os.environ)[:_LENGTH])
        is_unknown = "Credential" in type(error).__name__
        self.is_refusal = is_unknown or isinstance(error, FileNotFoundError | PermissionError)


@final
class Store:
    """What is below a URL, by names relative to it; the empty name is the URL itself."""

    def __init__(self, url: str) -> None:
        options = _OPTIONS.get(url.partition("://")[0], {})
        try:
            self._fs, self._root = fsspec.url_to_fs(url, **options)
        except ImportError as error:
            remedy = "pip install '.[storage]' brings those of s3:// and gs://"
            raise ConfigError(clip(f"{url}: {error}: {remedy}")) from error
        except ValueError as error:
            raise ConfigError(clip(f"{url}: {error}")) from error

    def objects(self) -> dict[str, Info]:
        """List all objects by name; none where nothing is there."""
        with _answers():
            self._fs.invalidate_cache()
            found = dict[str, Info]()
            for path, info in self._fs.find(self._root, detail=True).items():
                name = path.removeprefix(self._root).lstrip("/")
                # Anyone may have written there; a folder is an object to some programs.
                if ".." not in name.split("/") and not path.endswith("/"):
                    found[name] = info
            return found

    def read(self, name: str) -> bytes | None:
        """Read a small object; None where it is not there."""
        with _answers():
            try:
                return bytes(self._fs.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def get(self, info: Info, file: Path) -> bool:
        """Write an object into a file, whole or not at all; gives whether it was still there.

        The file has the time of the object's last change.
        """
        durable.make_folders(file.parent)
        unfinished = file.with_name(f"{durable.UNFINISHED}{file.name}")
        with _answers():
            try:
                self._fs.get_file(info["name"], str(unfinished))
            except FileNotFoundError:
                return False
        if (changed := time_of(info)) is not None:
            os.utime(unfinished, (changed, changed))
        durable.rename(unfinished, file)
        return True

    def put(self, name: str, content: bytes | Path) -> None:
        """Write an object: bytes, or what a file holds."""
        with _answers():
            if isinstance(content, bytes):
                self._fs.pipe_file(self._path(name), content)
            else:
                self._fs.put_file(str(content), self._path(name))

    def try_writing(self) -> None:
        """Write an object, and remove it."""
        self.put(_PROBE, b"")
        with _answers():
            self._fs.rm(self._path(_PROBE))

    def remove(self, name: str) -> None:
        """Remove all below a name, of a checkpoint its manifest first."""
        manifest, folder = self._path(f"{name}/{RunFolder.MANIFEST}"), self._path(name)
        with _answers():
            self._fs.invalidate_cache()
            if self._fs.exists(manifest):
                self._fs.rm(manifest)
            if self._fs.find(folder):
                self._fs.rm(folder, recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/")


@contextmanager
def _answers() -> Iterator[None]:
    """Turn whatever a store's library raises into one class of error."""
    try:
        yield
    except Exception as error:
        raise StoreError(error) from error


def time_of(info: Info) -> float | None:
    """Read when an object was changed, in seconds since the epoch; None where nobody says."""
    value = next((info[name] for name in _TIMES if name in info), None)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return value.timestamp() if isinstance(value, datetime) else value
