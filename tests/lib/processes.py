"""Commands in processes of their own, as a user or a cluster starts them."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lib.cli_support import CHECKOUT

LIMIT_S = 150.0


@dataclass
class Ended:
    """How a command ended: its lines on stderr, and when, in seconds since the epoch."""

    code: int
    errors: list[str]
    at: float


@dataclass
class Command:
    """A command in a folder, in a process group of its own."""

    place: Path
    process: subprocess.Popen[str]

    @classmethod
    def start(
        cls, place: Path, words: Sequence[str], launcher: Sequence[str] = (), **environment: str
    ) -> Command:
        """Start `train` with some words, perhaps by a launcher."""
        # Where these tests run behind a shell's `&` they ignore Ctrl-C, and so would the command.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        own = {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, *launcher, "-m", "trainer", *words],
            cwd=place,
            env={**os.environ, **own, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        signal.signal(signal.SIGINT, before)
        return cls(place, process)

    def end(self) -> Ended:
        """Wait for the command's end."""
        _, errors = self.process.communicate(timeout=LIMIT_S)
        lines = [line for line in errors.splitlines() if line.strip()]
        return Ended(self.process.returncode, lines, time.time())

    def wait_for(self, pattern: str, lines: int = 0) -> Path:
        """Wait until a file of so many lines matches the pattern."""
        limit = time.monotonic() + LIMIT_S
        while True:
            for path in self.place.glob(pattern):
                if not lines or path.read_bytes().count(b"\n") >= lines:
                    return path
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < limit, f"no {pattern}"
            time.sleep(0.02)


def free_port() -> int:
    """Find a port that the system, which begins at 32768, gives to nobody in the meantime."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port


def skip_without(python: str, module: str, remedy: str) -> None:
    """Skip where the Python that runs a server lacks its module."""
    asked = [python, "-c", f"import {module}"]
    if subprocess.run(asked, capture_output=True, check=False).returncode:
        pytest.skip(f"{python} has no {module}; {remedy}")


def typed_over(base: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Put settings over others of the same keys."""
    keys = {line.partition("=")[0] for line in typed}
    return [*(line for line in base if line.partition("=")[0] not in keys), *typed]
