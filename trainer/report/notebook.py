"""Show progress in a notebook: one line of output that is drawn anew."""

from __future__ import annotations

import time
from typing import Any, final

INTERVAL_S = 0.25
WIDTH = 24  # characters of the bar


@final
class NotebookLine:
    """A line below the cell; what is printed comes under it."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown_at = -INTERVAL_S

    def show(self, share: float, text: str) -> None:
        """Draw the share that is done, 0 to 1, and a text beside it, a few times a second."""
        now = time.monotonic()
        if now - self._shown_at < INTERVAL_S and share < 1:
            return
        self._shown_at = now
        done = round(share * WIDTH)
        content = {"text/plain": f"{'█' * done}{'░' * (WIDTH - done)}  {text}"}
        if self._handle is None:
            from IPython.display import display  # noqa: PLC0415 - is there in a notebook

            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
