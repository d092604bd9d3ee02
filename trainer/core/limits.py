"""Limit what the code in a stranger's file, such as a chat template, may take."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SECONDS, MEBIBYTES = 10, 512


@contextmanager
def limited(what: str) -> Iterator[None]:
    """Give a block 10 s, in the main thread, and 512 MiB, on Linux.

    Of C, it can end what asks for memory, and not what takes long.

    Raises:
        ValueError: it takes more.
    """

    def refuse(*_: object) -> None:
        raise ValueError(f"{what} takes more than {SECONDS} s")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    # The file is not there on a Mac, and less may be allowed already.
    with suppress(OSError, ValueError), open("/proc/self/statm", "rb", 0) as file:  # noqa: PTH123 - 5 us
        pages = int(file.read().split()[0])
        most = pages * resource.getpagesize() + MEBIBYTES * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGALRM, refuse) if is_main else None
    timer = signal.setitimer(signal.ITIMER_REAL, SECONDS) if is_main else (0.0, 0.0)
    try:
        yield
    except MemoryError as error:
        raise ValueError(f"{what} takes more than {MEBIBYTES} MiB") from error
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)
