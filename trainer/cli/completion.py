"""Complete a line in bash, zsh and fish, where the name of a file is never read as code.

Hydra's own script lets the shell expand what is offered. Here each offer is a line of plain text,
and the shell quotes the one that it inserts. What answers is the program that installed this.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainer.cli.compose import Composer
from trainer.cli.offers import offers
from trainer.core.errors import ConfigError

_END = {
    "bash": "complete -r train\n",
    "zsh": "compdef -d train\n",
    "fish": "complete -e -c train\n",
}
"""What ends completion in each shell."""


def completion(lines: Sequence[str], composer: Composer) -> str:
    """Give the text that `--shell-completion` prints: what a shell evaluates, or offers."""
    action, _, shell = next(iter(lines), "").partition("=")
    if action not in ("install", "uninstall", "query") or shell not in _END:
        choices = "install=, uninstall= or query= with bash, zsh or fish"
        raise ConfigError(f"--shell-completion {' '.join(lines)}: type {choices}")
    if action == "uninstall":
        return _END[shell]
    if action == "install":
        program = shlex.join([sys.executable, "-P", "-m", "trainer", "--shell-completion"])
        suffix = ".fish" if shell == "fish" else ".sh"
        script = Path(__file__).with_suffix(suffix).read_text()
        return script.replace("PROGRAM", program)
    line = os.environ.get("COMP_LINE", "train ")
    (_, *words), quote = split_line(line)
    # A line break in a file's name would make two offers of it.
    found = [*filter(str.isprintable, offers(words, composer))]
    if shell == "bash" and (word := os.environ.get("COMP_WORD")) is not None:
        # Bash replaces what is behind the last `=`, `:` or open quote alone, and quotes no `$`.
        before = len(split_line(line.removesuffix(word))[0][-1])
        found = [quoted(each[before:], quote) for each in found]
    return "".join(f"{each}\n" for each in found)


def split_line(line: str) -> tuple[list[str], str]:
    """Split a line into words as a shell does, the last unfinished or empty; and its open quote."""
    for quote in ("", "'", '"'):
        # A ValueError says that another quote is open.
        with suppress(ValueError):
            *words, last = shlex.split(f"{line}\0{quote}")
            return [*words, last.removesuffix("\0")], quote
    return [line], ""


def quoted(text: str, quote: str) -> str:
    """Write a text as bash reads it back, behind an open quote or none."""
    if quote == "'":
        return text.replace("'", r"'\''")
    special = r"[^\w@%+=:,./~-]"
    # In double quotes these alone mean something.
    if quote:
        special = r'[$`"\\]'
    return re.sub(special, r"\\\g<0>", text)
