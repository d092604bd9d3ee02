"""Name the line of the user's code that an error comes from, and silence what libraries log."""

from __future__ import annotations

import logging
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.core.own_code import INSTALLED

_PROGRAM = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), "<frozen ")
_MOST_CAUSES = 3
_MOST_SHAPES = 6


def place_of(error: BaseException) -> str:
    """Name file and line of the user's code where an error arose: ` (net.py:3)`.

    Empty where no code outside of this program and of installed packages was running.
    """
    if (found := _last_frame(error)) is None:
        return ""
    frame, line = found
    return f" ({Path(frame.f_code.co_filename).name}:{line})"


def described(error: BaseException) -> str:
    """Put an exception on one line, with its place in the user's code, and what caused it."""
    words = []
    for each in causes(error):
        text = " ".join(str(each).split())
        words.append(f"{type(each).__name__}{text and f': {text}'}{place_of(each)}")
    return "; caused by ".join(words[:_MOST_CAUSES])


def excerpt(error: BaseException) -> str:
    """Show the place in the user's code as tracebacks do, with the shapes of tensors in its frame.

    Empty where `place_of` is, for the error and all that caused it.
    """
    found = next(filter(None, map(_last_frame, causes(error))), None)
    if found is None:
        return ""
    shapes = [f"{name} {shape}" for name, shape in _shapes(found[0].f_locals)][:_MOST_SHAPES]
    place = "".join(traceback.StackSummary.extract([found]).format())
    return place + (f"  with {', '.join(shapes)}\n" if shapes else "")


def causes(error: BaseException) -> Iterator[BaseException]:
    """Give an error and what it was raised from, or while handling, as tracebacks show them."""
    # Who sets `__cause__` by hand can close a circle.
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _last_frame(error: BaseException) -> tuple[FrameType, int] | None:
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        # The innermost that is the user's: a library which it called may have raised.
        if not file.startswith(_PROGRAM) and INSTALLED.isdisjoint(Path(file).parts):
            found = frame, line
    return found


def _shapes(variables: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Describe what looks like a tensor or array among the variables of a frame."""
    for name, value in variables.items():
        kinds = getattr(value, "shape", None), getattr(value, "dtype", None)
        if isinstance(kinds[0], tuple) and kinds[1] is not None:
            yield name, f"{tuple(kinds[0])} {str(kinds[1]).removeprefix('torch.')}"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what a library logs as it loads or runs a model; the start says it in rows."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
