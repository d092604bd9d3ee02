"""Split the command line into command word, Hydra's flags, and overrides.

Text in, text out. Hydra 1.3 takes its flags only before or after all overrides; here they may
stand anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from trainer.config.habits import key_of, spaced
from trainer.config.messages import clip, did_you_mean
from trainer.core.errors import ConfigError

COMMANDS: Mapping[str, str] = {
    "train": "train (what happens without a command)",
    "plan": "print how each step is cut and what memory it needs; start nothing",
    "verify": "prove on your model and data that the planned step is the whole-batch step",
    "evaluate": "evaluate a run on the held-out data: run=RUN",
    "export": "write a run's weights as safetensors: run=RUN export.to=DIR",
}

_SWITCHES: Mapping[str, str] = {
    "-h": "--help",
    "--hydra-help": "--hydra-help",
    "--version": "--version",
    "--resolve": "--resolve",
    "-r": "--run",
    "-m": "--multirun",
    "-sc": "--shell-completion",
}
_VALUED: Mapping[str, str] = {
    "-c": "--cfg",
    "-p": "--package",
    "-cp": "--config-path",
    "-cn": "--config-name",
    "-cd": "--config-dir",
    "-i": "--info",
    "--experimental-rerun": "--experimental-rerun",
}
_BY_SHORT = {**_SWITCHES, **_VALUED}
_FLAGS = {**_BY_SHORT, **{name: name for name in _BY_SHORT.values()}}
_WORDS: Mapping[str, Sequence[str]] = {
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--cfg": ("job", "hydra", "all"),
}
"""What some flags take."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """What was typed.

    Attributes:
        command: the command word, or `None` if none was typed.
        flags: Hydra's flags by their long names; the value is empty for a switch.
        overrides: everything else, in order.
    """

    command: str | None
    flags: Mapping[str, str]
    overrides: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """The overrides, the command word as one of them."""
        return [*([] if self.command is None else [f"command={self.command}"]), *self.overrides]

    @property
    def only_shows(self) -> bool:
        """Whether Hydra is asked for something about itself, which no config can spoil."""
        return not self.flags.keys().isdisjoint({"--hydra-help", "--shell-completion", "--info"})

    def hydra_flags(self) -> list[str]:
        """Write the flags as Hydra's own parser reads them."""
        return [f"{flag}={value}" if value else flag for flag, value in self.flags.items()]


def split(argv: Sequence[str]) -> CommandLine:
    """Tell command word, flags and overrides apart.

    Args:
        argv: the arguments after the program's name.

    Raises:
        ConfigError: an unknown flag or command word, or two command words.
    """
    apart = spaced(argv)
    if apart is not None:
        raise ConfigError(apart)
    faults: list[str] = []
    flags: dict[str, str] = {}
    words: list[str] = []
    overrides: list[str] = []
    waiting = list(reversed(argv))
    while waiting:
        token = waiting.pop()
        if token.startswith("-"):
            faults += _take_flag(token, waiting, flags)
        elif "=" in token or token.startswith("~"):
            overrides.append(token)
        else:
            words.append(token)
    unknown = [_unknown_word(word) for word in words if word not in COMMANDS]
    if len(words) > 1 and not unknown:
        unknown = [f"{words[1]}: {words[0]} is already the command; one run does one thing"]
    if faults or unknown:
        raise ConfigError(*faults, *unknown)
    return CommandLine(command=words[0] if words else None, flags=flags, overrides=tuple(overrides))


def _take_flag(token: str, waiting: list[str], flags: dict[str, str]) -> list[str]:
    """Read one flag, with its value where it has one, and return its faults."""
    name, equals, value = token.partition("=")
    flag = _FLAGS.get(name)
    if flag is None or (equals and flag in _SWITCHES.values()):
        after = waiting[-1] if waiting and not equals else "="
        is_value = after not in COMMANDS and not after.startswith("-") and "=" not in after
        return [_unknown_flag(token, waiting.pop() if is_value else "VALUE")]
    words = _WORDS.get(flag, ())
    if flag in _VALUED.values() and not value:
        if flag == "--info":
            value = waiting.pop() if waiting and waiting[-1] in words else "all"
        elif not waiting:
            return [f"{name}: needs a value"]
        else:
            value = waiting.pop()
    flags[flag] = value
    if flag == "--experimental-rerun":
        return [f"{flag}: would unpickle a file, which runs code in it; use resume=RUN"]
    if words and value not in words:
        return [f"{flag}={value}: no such view.{did_you_mean(value, words)} {_among(words)}"]
    return []


def _unknown_flag(token: str, after: str) -> str:
    """Name what is meant by a flag that is none.

    Args:
        token: as typed.
        after: the word after it, where that is its value.
    """
    from trainer.config.keys import KEYS  # noqa: PLC0415 - a flag that is one needs no schema

    word, equals, value = token.lstrip("-").partition("=")
    same = word.replace("-", "_")
    key = same if "." in same or same in KEYS else key_of(word)
    if key is not None:
        typed = f"{key}={value if equals else after}"
        return clip(f"{token}: settings are written without dashes: {typed}")
    near = did_you_mean(token.partition("=")[0], [*_BY_SHORT.values()])
    return clip(f"{token}: unknown flag.{near} See train --help")


def _unknown_word(word: str) -> str:
    key, colon, value = word.partition(":")
    if word == "help":
        return "help: unknown command. Did you mean --help?"
    if word.endswith((".yaml", ".yml")):
        return f"{word}: unknown command. Did you mean recipe={word}?"
    if colon and "/" not in word:
        return clip(f"{word}: unknown command. Did you mean {key}={value}?")
    if "." in word:
        return f"{word}: needs a value, as in {word}=VALUE"
    near = did_you_mean(word, COMMANDS)
    return f"{word}: unknown command.{near} {_among(COMMANDS)}; settings are key=value"


def _among(choices: Iterable[str]) -> str:
    return f"Choices: {', '.join(choices)}"
