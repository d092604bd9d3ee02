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
from typing import Any

from hydra.plugins.completion_plugin import DefaultCompletionPlugin

from trainer.cli.argv import COMMAND_HELP
from trainer.cli.compose import CONFIG_NAME
from trainer.cli.view_command import SETTINGS
from trainer.core.errors import ConfigError
from trainer.report.views import views

_END = {
    "bash": "complete -r train\n",
    "zsh": "compdef -d train\n",
    "fish": "complete -e -c train\n",
}
"""What ends completion in each shell."""


def completion(lines: Sequence[str], hydra: Any) -> str:  # noqa: ANN401 - Hydra's own class
    """Give the text that `--shell-completion` prints: what a shell evaluates, or offers."""
    action, _, shell = (lines[0] if lines else "").partition("=")
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
    found = [*filter(str.isprintable, offers(words, hydra))]
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


def offers(words: Sequence[str], hydra: Any) -> list[str]:  # noqa: ANN401
    """List what the last word may become; Hydra knows no commands, nor what views take."""
    *before, last = words or [""]
    commands, rest = list[str](), list[str]()
    for word in before:
        if word in COMMAND_HELP:
            commands.append(word)
        # Hydra would take a word with a space for two.
        elif word.split() == [word]:
            rest.append(word)
    if not views().keys().isdisjoint(commands) and "=" not in last:
        return [f"{key}=" for key in SETTINGS if f"{key}=".startswith(last)]
    key, equals, value = last.rpartition("=")
    plugin = DefaultCompletionPlugin(hydra.config_loader)
    if equals and value.startswith((".", "/")):
        return sorted(f"{key}={path}" for path in plugin.complete_files(value))
    found = list[str]()
    for word in COMMAND_HELP:
        if not commands and word.startswith(last):
            found.append(word)
    return [*found, *plugin._query(CONFIG_NAME, " ".join([*rest, last]))]
