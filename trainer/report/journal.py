"""Write files of JSON lines that only grow, whole lines at a time; mend them after a crash."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeGuard, final

from trainer.core.durable import append, parsed, save_error, strict, write_file_atomic
from trainer.core.errors import SaveError

Entry = dict[str, Any]

MOST_STEPS = 2**63
_LARGEST = 1e300  # of a number of a file
# Wall time; evaluations in metrics.jsonl have it, steps have not
EVAL_SECONDS = "eval_seconds"
_as_json = json.JSONEncoder(allow_nan=False, default=methodcaller("item")).encode


def to_line(entry: Mapping[str, Any]) -> bytes:
    """Write one strict JSON object and a newline; numpy's numbers count as numbers."""
    try:
        line = _as_json(entry)
    except (ValueError, TypeError, AttributeError):  # NaN, say; `strict` walks all ids
        line = _as_json(strict(entry))
    return line.encode() + b"\n"


@final
class Journal:
    """Appends JSON lines; each is with the operating system when `write` returns.

    A line that cannot be written (a full disk, a lost mount) never stops training: it waits in
    memory and is tried again with the next one. `warn` is called once.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path, self._warn = path, warn
        self._unwritten = b""
        # Size before a write that failed, and may have left a part
        self._whole: int | None = None
        self._has_warned = False

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one entry."""
        self._unwritten += to_line(entry)
        error = self._try()
        if error is not None and not self._has_warned:
            self._has_warned = True
            self._warn(f"{self._path.name}: {error.strerror}; its lines wait in memory")

    def sync(self) -> None:
        """Write what is left, and wait until the disk holds it all."""
        error = self._try(durable=True)
        if error is not None:
            failure: SaveError = save_error(error, self._path, len(self._unwritten))
            raise failure from error

    def _try(self, *, durable: bool = False) -> OSError | None:
        """Write all that waits; a failure before may have left some of it."""
        try:
            size = self._path.stat().st_size if self._path.exists() else 0
            # Somebody may have made the file shorter, so the smaller of the two counts.
            if self._whole is None or size < self._whole:
                self._whole = size
            # To cut a file takes no room on the disk, so a full one allows it.
            if size > self._whole:
                os.truncate(self._path, self._whole)
            append(self._path, self._unwritten, durable=durable)
        except OSError as error:
            return error
        self._unwritten, self._whole = b"", None
        return None


def read(path: Path) -> list[Entry]:
    """Read every whole entry of a journal; a torn line, or a stranger's, is passed over."""
    return list(stream(path))


def stream(path: Path) -> Iterator[Entry]:
    """Read as `read` does, an entry at a time."""
    if path.is_file():
        with path.open("rb") as file:
            yield from filter(None, map(_parse, file))


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a file is a number that can be rounded, added and drawn."""
    return type(value) in (float, int) and abs(value) < _LARGEST  # type: ignore[arg-type] # one of both


def read_end(path: Path, most: int = 1 << 20) -> tuple[int, list[Entry]]:
    """Read the last step, 0 without one, and the evaluations, in so many bytes of a journal's end.

    Of the others no line is parsed, so that it takes some milliseconds.
    """
    lines, last, evaluations = list[bytes](), 0, list[Entry]()
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - most))
                lines = file.read(most).splitlines()
    for line in lines:
        if b'"eval_' in line and (entry := _parse(line)) is not None:
            evaluations.append(entry)
    for line in reversed(lines):
        if (entry := _parse(line)) is not None:
            last = entry["step"]
            break
    return last, evaluations


def totals(path: Path) -> dict[str, float | None]:
    """Add up metrics.jsonl for result.json: of all steps, whichever process took them."""
    last: Entry = {}
    seconds, skipped_steps, replays = 0.0, 0, 0
    for entry in stream(path):
        if "loss" in entry:
            last = entry
            seconds += entry.get("seconds", 0.0)
            skipped_steps += "skipped" in entry
            replays += entry.get("replays", 0)
    tokens_per_second = None
    if seconds:
        # Tokens of a step are counted from the beginning of the run.
        tokens_per_second = last.get("tokens", 0) / seconds
    return {
        "loss": last.get("loss"),
        "tokens_per_second": tokens_per_second,
        "skipped_steps": skipped_steps,
        "replays": replays,
    }


def least_loss(path: Path) -> dict[str, str | float] | None:
    """Find the evaluation with the least held-out loss; None where none has a loss."""
    best: dict[str, str | float] | None = None
    least = math.inf
    for entry in stream(path):
        value = entry.get("eval_loss")
        if is_number(value) and value < least:
            least = value
            best = {"metric": "eval_loss", "value": value, "step": entry["step"]}
    return best


@final
class Follower:
    """Reads what a journal, which may not exist yet, holds and gets."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new(self) -> list[Entry]:
        """Read the whole entries that have come since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            # What follows the last newline is still being written.
            lines, _, _ = file.read().rpartition(b"\n")
        self._offset += len(lines) + bool(lines)
        return [*filter(None, map(_parse, lines.splitlines()))]


def truncate_after(path: Path, step: float = math.inf) -> None:
    """Cut entries beyond a checkpoint's step, and mend a line torn by a crash. Atomic."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file; move it away")
    content = path.read_bytes() if path.exists() else b""
    whole = bytearray()
    for line in content.splitlines(keepends=True):
        entry = _parse(line)
        if entry is not None and entry["step"] <= step:
            whole += line.rstrip(b"\n") + b"\n"
    if whole != content:
        write_file_atomic(path, bytes(whole))


def _parse(line: bytes) -> Entry | None:
    """Read one line; None when it is torn or no entry of ours."""
    entry = parsed(line)
    if not isinstance(entry, dict):
        return None
    step = entry.get("step")
    # By its type: a `bool` is an `int` too.
    return entry if type(step) is int and abs(step) < MOST_STEPS else None
