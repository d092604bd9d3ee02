"""Turn a signal into a stop at the next step boundary.

Imports nothing heavy, so that signals count from the moment a run has a folder, before torch is
there. What cannot be handed the flag, reading the data for one, asks `check`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import final

from trainer.core.errors import Preempted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

TOGETHER_S = 0.2
"""Signals that come this close are one: a terminal, a scheduler or torchrun reaches a process
directly and once more through what started it."""

UNBEGUN = "stopped before the first step"  # how a run ends that was asked to before it could train

STOPPING = "stopping once this step is saved; Ctrl-C again stops at once"
"""What the first signal says on a terminal, ahead of what would be saved then."""

_listening: list[StopFlag] = []  # the flag of this process while it listens; at most one


@final
@dataclass
class StopFlag:
    """Whether a signal asked the run to stop at the next step boundary."""

    is_set: bool = False
    # Says what is saved by now, which a second signal would leave
    saved_by_now: Callable[[], str] | None = None

    def __call__(self) -> bool:
        """Ask it."""
        return self.is_set


def caught() -> list[signal.Signals]:
    """List the signals that stop a run: SIGHUP only where nobody, as nohup does, has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [each for each in SIGNALS if each != signal.SIGHUP or not ignored]


@contextmanager
def stop_signals(*, ends_at_second: bool = True) -> Iterator[StopFlag]:
    """Let the first of `SIGNALS` set a flag, which it gives, and the second one end the process.

    Within another such context its flag is given. Signals reach the main thread only; elsewhere
    the flag stays as it is. A rank is ended by its supervisor (`ends_at_second=False`).
    """
    if _listening:
        yield _listening[0]
        return
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if flag.is_set:
            return
        flag.is_set = True
        if not ends_at_second:
            return
        if sys.stderr.isatty():
            text = f"train: {STOPPING}\n"
            with suppress(OSError):
                if flag.saved_by_now is not None:
                    text += f"train: {flag.saved_by_now()}\n"
            # Not through the stream, which may be in the midst of writing. With a blank line at
            # the end: a progress bar of two lines is next drawn over the last two.
            os.write(sys.stderr.fileno(), f"\n{text}\n".encode())
        # Until then the same signal, come a second time, does nothing.
        time.sleep(TOGETHER_S)
        for each in caught():
            signal.signal(each, signal.SIG_DFL)

    before = {each: signal.signal(each, on_signal) for each in caught()}
    _listening.append(flag)
    try:
        # A supervisor starts its ranks with signals blocked; one that came waits until here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        yield flag
    finally:
        _listening.clear()
        for each, handler in before.items():
            # A rank that is done is about to exit, and its supervisor passes signals on.
            signal.signal(each, handler if ends_at_second else signal.SIG_IGN)


def show_when_stopped(saved_by_now: Callable[[], str]) -> None:
    """Have the first signal show, on a terminal, what a second one would leave."""
    for flag in _listening:
        flag.saved_by_now = saved_by_now


def ignore_further() -> None:
    """Ignore signals while listening: all is saved, and how the run ended is about to be shown."""
    if _listening and threading.current_thread() is threading.main_thread():
        for each in caught():
            signal.signal(each, signal.SIG_IGN)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise, as Python does, where `__main__` had it end the process until now.

    Raised while a command line is read it could come out of a parser as anything.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def check() -> None:
    """Raise `Preempted` in what takes long before the first step, if a signal asked to."""
    if _listening and _listening[0].is_set:
        raise Preempted(UNBEGUN)
