"""How far a long read of the data has come, on stderr; a short one is not worth a word."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from trainer.core import signals

LONG_S = 1.0
"""Seconds of silence that need no explanation."""


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, one plain line elsewhere, and nothing beyond the first rank.

    The line comes when the read has taken `LONG_S`.

    What is called with the units also ends the read, by `Preempted`, when a signal asked to stop.

    Args:
        label: what is being done, e.g. `indexing the standard library`.
        total: units of work.

    Yields:
        A function to call with the units of work just finished.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield _polled
    elif sys.stderr.isatty():
        # Only a terminal pays for the import, some 50 ms.
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import Progress  # noqa: PLC0415

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total)

            def advance(amount: int) -> None:
                signals.check()
                bar.advance(task, amount)

            yield advance
    else:
        due = time.monotonic() + LONG_S

        def tell(amount: int) -> None:
            nonlocal due
            if time.monotonic() > due:
                due = math.inf
                with suppress(OSError):  # nobody listens
                    sys.stderr.write(f"train: {label} ...\n")
            _polled(amount)

        yield tell


def _polled(_: int) -> None:
    signals.check()
