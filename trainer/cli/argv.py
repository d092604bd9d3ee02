"""Split the command line into command word, Hydra's flags, and overrides.

Text in, text out. Hydra 1.3 takes its flags only before or after all overrides; here they may
stand anywhere.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from trainer.cli.feature_commands import feature_commands
from trainer.config.command_words import READING_COMMANDS
from trainer.config.messages import clip, did_you_mean, near_file, one_line, show
from trainer.core.errors import ConfigError
from trainer.core.format import expanded
from trainer.core.run_folder import RunFolder
from trainer.report.views import views

COMMAND_HELP: Mapping[str, str] = {
    "train": "train (the default command)",
    "plan": "print the micro-batches of each step and their memory; do not train",
    "verify": "check on your model and data that accumulation gives the whole-batch gradient",
    "evaluate": "evaluate a run on the held-out data: run=RUN",
    "export": "write a run's weights as safetensors: run=RUN export.to=DIR",
    **{word: command.help for word, command in READING_COMMANDS.items()},
    **{name: view.help for name, view in views().items()},
    **{name: each.help for name, each in feature_commands().items()},
}

PAGE_WORDS = ("help", *views(), *feature_commands())
"""Commands, and the help, that compose no config."""

_SHOWING = ("--help", "--version", "--info", "--shell-completion")
_SWITCHES = {"--help", "--version", "--resolve", "--multirun", "--shell-completion"}
_VALUED = {"--cfg", "--package", "--config-dir", "--info"}
_SHORT: Mapping[str, str] = {
    **{"-h": "--help", "-m": "--multirun", "-sc": "--shell-completion"},
    **{"-c": "--cfg", "-p": "--package", "-i": "--info", "-cd": "--config-dir"},
}
_WORDS: Mapping[str, Sequence[str]] = {
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--cfg": ("job", "hydra", "all"),
}
"""What some flags take."""

_OFF = ("false", "no", "none", "null", "off", "0")
_RECORDS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
# What begins a flag, or a setting of its own, is no value of the word before it.
_NO_VALUE = re.compile(r"~|--?[A-Za-z]|.*=|--$")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """What was typed."""

    command: str | None  # the command word, or `None` if none was typed
    flags: Mapping[str, str]  # Hydra's flags by their long names; the value is empty for a switch
    overrides: Sequence[str]  # everything else, in order; a command may take words among them
    faults: Sequence[str] = ()  # of flags that are none; the others may be checked all the same

    @property
    def lines(self) -> list[str]:
        """The overrides, the command word as one of them."""
        if self.command is None:
            return [*self.overrides]
        typed = [*self.overrides]
        if self.command == "plan":
            typed = [re.sub("^ranks=", "parallel.ranks=", each) for each in typed]
        return [f"command={self.command}", *typed]


def split_argv(argv: Sequence[str]) -> CommandLine:
    """Tell command word, flags and overrides apart; `--a.b=c` is the override `a.b=c`."""
    faults, unknown = list[str](), list[str]()
    flags: dict[str, str] = {}
    words, overrides, stray = list[str](), list[str](), list[str]()
    waiting = list(reversed(argv))
    while waiting:
        token = waiting.pop()
        if apart := _typed_apart(token, waiting):
            unknown.append(apart[0])
            overrides += apart[1:]
            continue
        name, equals, value = token.partition("=")
        flag = _SHORT.get(name, name)
        if flag in _VALUED or (flag in _SWITCHES and not equals):
            faults += _take_flag(flag, value, waiting, flags)
        elif equals or token.startswith("~") or (takes_words(words) and name[:1] != "-"):
            key = name
            # Other programs write `--batch-size=8`; no key of ours has a hyphen.
            if name.startswith("-"):
                key = name.lstrip("-").replace("-", "_")
            overrides.append(f"{key}{equals}{value}")
        elif token in COMMAND_HELP and words:
            faults.append(f"{token}: the command is already {words[0]}; give only one command")
        elif token in COMMAND_HELP:
            words.append(token)
        elif token.startswith("-"):
            unknown.append(_unknown_word(token))
        else:
            stray.append(token)
    command = next(iter(words), None)
    faults += _stray_faults(stray, command)
    only_shows = not flags.keys().isdisjoint(_SHOWING) or not set(words).isdisjoint(PAGE_WORDS)
    if faults or (unknown and only_shows):
        raise ConfigError(*unknown, *faults)
    return CommandLine(command=command, flags=flags, overrides=overrides, faults=unknown)


def takes_words(commands: Sequence[str]) -> bool:
    """Whether a command takes words behind it, which are no settings: `train rm RUN`."""
    brought = feature_commands()
    return any(each in brought and brought[each].words is not None for each in commands)


def _typed_apart(token: str, waiting: list[str]) -> list[str]:
    """Say how a setting is typed that came in several words: `a= 5`, `a =5`, `a = 5`, `--a 5`.

    Takes the words behind the token; empty where the token stands for itself. Gives the fault,
    and the setting that is meant, where it is clear.
    """
    words, after = [token], waiting[-1] if waiting else "--"
    name, equals, value = token.partition("=")
    is_flag = name.startswith("-") and _SHORT.get(name, name) not in {*_SWITCHES, *_VALUED}
    is_value = not _NO_VALUE.match(after) and after not in COMMAND_HELP
    if not equals and after.startswith("=") and token not in COMMAND_HELP:
        words.append(waiting.pop())
        # Of `a = 5` the value is the third word.
        if after == "=" and waiting:
            words.append(waiting.pop())
    elif not value and (equals or is_flag) and is_value:
        words.append(waiting.pop())
    else:
        return []
    from trainer.config.keys import KEYS  # noqa: PLC0415 - where it is needed
    from trainer.config.other_trainers import hint_for, suits  # noqa: PLC0415

    key, value = name.lstrip("-").replace("-", "_"), words[-1].removeprefix("=")
    hint = hint_for(key, KEYS)
    meant = re.search(r"mean ([\w.]+)\?$", hint)
    found = list[str]()
    if meant and suits(meant[1], value):
        found.append(f"{meant[1]}={value}")
    if meant and (found or meant[1] == key):
        hint = f" Did you mean {meant[1]}={value}?"
    # What is typed to be off, `precision=bf16` would turn on.
    elif value.lower() in _OFF:
        hint = ""
    if is_flag and not equals:
        fault = f"{name}: unknown flag. Settings are key=value.{hint or ' See --help'}"
    else:
        fault = f"{' '.join(words)}: a setting has no spaces.{hint or f' Type {key}={value}'}"
    return [clip(fault), *found]


def _hint_for_key(word: str) -> str:
    """Say that a key, ours or another trainer's, takes a value; empty where a word is none."""
    from trainer.config.keys import KEYS  # noqa: PLC0415 - where it is needed
    from trainer.config.other_trainers import NONE_HERE, OTHER_WORDS, hint_for  # noqa: PLC0415
    from trainer.config.trackers import OURS  # noqa: PLC0415

    is_own = word in KEYS or ("." in word and word.partition(".")[0] in OURS)
    hint = ""
    if word not in KEYS and (is_own or word in {*OTHER_WORDS, *NONE_HERE}):
        hint = hint_for(word, KEYS)
    return hint or f" Did you mean {word}=VALUE?" * is_own


def _take_flag(flag: str, value: str, waiting: list[str], flags: dict[str, str]) -> list[str]:
    """Take one flag, with its value where it has one, and return its faults."""
    words = _WORDS.get(flag, ())
    if flag == "--info" and not value and not (waiting and waiting[-1] in words):
        value = "all"
    if flag in _VALUED and not value:
        if not waiting:
            return [f"{flag}: needs a value"]
        value = waiting.pop()
    flags[flag] = value
    if words and value not in words:
        near = did_you_mean(value, words)
        # Other programs have a flag `-c` for a file of settings.
        if meant := setting_of_file(value):
            near = f" Did you mean {meant}?"
        return [f"{flag}={value}: no such view.{near} Choices: {', '.join(words)}"]
    return []


def _stray_faults(words: Sequence[str], command: str | None) -> list[str]:
    """Say what is meant by words that are neither commands nor settings."""
    found = READING_COMMANDS.get(command or "")
    if words and found is not None:
        return [clip(f"{' '.join(words)}: is no setting; type it as in {found.example}")]
    return [*map(_unknown_word, words)]


def _unknown_word(word: str) -> str:
    if word.startswith("-"):
        near = did_you_mean(word, (*_SWITCHES, *_VALUED))
        return clip(f"{word}: unknown flag.{near} Settings are key=value; see train --help")
    near = _hint_for_key(word) or did_you_mean(word, (*COMMAND_HELP, "--help"))
    if word in ("test", "infer", "inference"):
        near = " For predictions: train predict run=RUN data.path=FILE."
    if meant := setting_of_file(word):
        near = f" Did you mean {meant}?"
    return one_line(f"{show(word)}: unknown command.{near} Choices: {', '.join(COMMAND_HELP)}")


def setting_of_file(word: str) -> str:
    """Give the setting for a path, such as `recipe=my.yaml`; empty where nothing is meant."""
    path = expanded(word)
    # A key has a dot, too.
    if not os.path.exists(path):  # noqa: PTH110 - of pathlib it raises for long names
        if "." not in word or (near := near_file(word)) is None:
            return ""
        path = Path(near)
    typed = shlex.quote(str(path))
    if path.suffix == ".yaml":
        return f"recipe={typed}"
    if path.suffix == ".py":
        return f"model._target_={_class_of(path)}"
    if (path / RunFolder.HYDRA).is_dir():
        return f"resume={typed}"
    if (path / "config.json").is_file():
        return f"model=hf model.path={typed}"
    kind = "hf" if path.suffix.lower() in _RECORDS else "text"
    return f"data={kind} data.path={typed}"


def _class_of(path: Path) -> str:
    """Give the import path of the first model in a file, else that of a class to be named."""
    module = ".".join(path.with_suffix("").parts)
    with suppress(OSError, SyntaxError, ValueError):
        for each in ast.parse(path.read_bytes()).body:
            if isinstance(each, ast.ClassDef):
                bases = [*map(ast.unparse, each.bases)]
                if any(base.endswith("Module") for base in bases):
                    return f"{module}.{each.name}"
    return f"{module}.CLASS"
