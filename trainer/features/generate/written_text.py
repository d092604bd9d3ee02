"""Write tokens as text while they come, one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TextIO, final

from trainer.core.format import printable

HALF_WRITTEN = "\N{REPLACEMENT CHARACTER}"
"""What stands for bytes that are no character, or not yet."""
_LONGEST = 4  # bytes of a character in UTF-8


@final
class WrittenText:
    """Decodes each token among the few before it, by which it may be written otherwise."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], file: TextIO
    ) -> None:
        self._decode, self._file = decode, file
        self._ids, self._num_prompt = [*prompt], len(prompt)
        # Where the piece before begins, and where what is not yet written does
        self._before, self._next = 0, len(prompt)

    def put(self, token: int) -> None:
        """Add a token, and write what is whole by now."""
        self._ids.append(token)
        text = self._behind()
        if not text.endswith(HALF_WRITTEN) or len(self._ids) - self._next >= _LONGEST:
            self._write(text)

    def end(self) -> int:
        """Write what is left and end the line; gives the number of tokens."""
        self._write(f"{self._behind()}\n")
        return len(self._ids) - self._num_prompt

    def _behind(self) -> str:
        """Give the text of the tokens that are not yet written."""
        known = self._decode(self._ids[self._before : self._next])
        return self._decode(self._ids[self._before :])[len(known) :]

    def _write(self, text: str) -> None:
        self._before, self._next = self._next, len(self._ids)
        # What a model writes must not steer a terminal.
        if self._file.isatty():
            text = "".join(map(_shown, text))
        self._file.write(text)
        self._file.flush()


def _shown(letter: str) -> str:
    return letter if letter in "\n\t" else printable(letter)
