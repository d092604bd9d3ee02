"""Name the sample that is read for long: a data set that blocks would look like a run that hangs.

One thread per process looks at what its other threads read; a read costs 1 us more.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

LOOK_S = 0.5

_reads: dict[int, tuple[float, float, Callable[[], str]]] = {}
"""By thread: since when it reads, how long it may, and what it is."""
_watched: list[int] = []
"""The process that looks: a fork has the list of its parent, and no thread."""


@contextmanager
def named_if_slow(name: Callable[[], str], limit_s: float) -> Iterator[None]:
    """Name on stderr what this thread reads inside the block, if it takes longer than `limit_s`."""
    if limit_s < math.inf and _watched != [os.getpid()]:
        _watched[:] = [os.getpid()]
        _reads.clear()
        threading.Thread(target=_watch, name="slow-reads", daemon=True).start()
    _reads[threading.get_ident()] = time.monotonic(), limit_s, name
    try:
        yield
    finally:
        _reads.pop(threading.get_ident(), None)


def _watch() -> None:
    named = 0.0  # when the newest of those that were named began
    while True:
        time.sleep(LOOK_S)
        for since, limit_s, name in sorted(_reads.copy().values(), key=lambda read: read[0]):
            if since > named and time.monotonic() - since > limit_s:
                named = since
                with suppress(OSError, ValueError):  # stderr may be a closed pipe
                    sys.stderr.write(
                        f"train: data: {name()}: no answer for {limit_s:g} s "
                        "(parallel.timeout_s); still waiting\n"
                    )
                    sys.stderr.flush()
