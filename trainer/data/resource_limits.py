"""Limit what the code in a stranger's file, such as a chat template, may take."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SECONDS, MEBIBYTES = 10, 512


@contextmanager
def limited(what: str) -> Iterator[None]:
    """Give a block 10 s, in the main thread, and 512 MiB, on Linux; `ValueError` beyond these."""

    def refuse(*_: object) -> None:
        raise ValueError(f"{what} takes more than {SECONDS} s")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    # Raised outside of Linux, which has no such file, or where less is allowed already.
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEBIBYTES * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    is_main = threading.current_thread() is threading.main_thread()
    # Python lets no other thread set a handler.
    if is_main:
        handler = signal.signal(signal.SIGALRM, refuse)
        timer = signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    except MemoryError as error:
        raise ValueError(f"{what} takes more than {MEBIBYTES} MiB") from error
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)
