"""List what the last word of a command line may become: commands, keys, values, paths and runs.

No torch is imported, and nothing is run that the line or a folder holds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final, get_args

from hydra.plugins.completion_plugin import DefaultCompletionPlugin
from omegaconf import OmegaConf

from trainer.cli.argv import COMMAND_HELP, PAGE_WORDS, takes_words
from trainer.cli.compose import CONFIG_NAME, Composer
from trainer.cli.feature_commands import feature_commands, words_of
from trainer.cli.overrides import classify, parse
from trainer.cli.run_names import RunNames, training_names
from trainer.cli.view_command import SETTINGS
from trainer.config import trackers
from trainer.config.components import NAMES_A_PATH, ExistingPath, owner_of
from trainer.config.consent import TARGET
from trainer.config.declared import alternatives, declared
from trainer.config.keys import KEYS
from trainer.core.format import expanded
from trainer.core.run_folder import AUTO, all_runs
from trainer.report.views import views

# What takes a path, beside arguments of classes
_FOLDERS = {"outputs", "export.to", "hydra.run.dir", "hydra.sweep.dir"}
_PATHS = {"to", "recipe", "init", *_FOLDERS}
_RUNS = {"run", "resume", "init"}


@final
@dataclass(frozen=True, kw_only=True)
class LineBefore:
    """What stands before the word that is completed."""

    composer: Composer
    words: Sequence[str]  # settings, without the command
    # What the command takes that composes no config, each with its default; None of a run's
    settings: Mapping[str, Any] | None
    outputs: Path


def offers(words: Sequence[str], composer: Composer) -> list[str]:
    """List what the last word may become."""
    *before, last = words or [""]
    commands, rest, outputs = list[str](), list[str](), Path("outputs")
    for word in before:
        # A run may be called as a command is.
        if word in COMMAND_HELP and not commands:
            commands.append(word)
        # Hydra would take a word with a space for two.
        elif word.split() == [word]:
            rest.append(word)
        if word.startswith("outputs="):
            outputs = expanded(word.removeprefix("outputs="))
    settings = _settings_of(commands)
    line = LineBefore(composer=composer, words=rest, settings=settings, outputs=outputs)
    key, equals, value = last.partition("=")
    if equals:
        found = [f"{key}={each}" for each in _values(line, key, value)]
    else:
        found = [f"{name}=" for name in settings or ()]
        if not commands:
            found += COMMAND_HELP
        if takes_words(commands) and settings is not None:
            names = RunNames(outputs, all_runs(outputs))
            found += [*names.beginning(last), *_folders(last)]
        # It would take a flag for one of its own.
        if settings is None and not last.startswith("-"):
            found += _of_hydra(line, last)
    return sorted({each for each in found if each.startswith(last)})


def _settings_of(commands: Sequence[str]) -> Mapping[str, Any] | None:
    for command in commands:
        if (found := feature_commands().get(command)) is not None:
            return None if found.of_run else found.settings
        if command in PAGE_WORDS:
            return SETTINGS if command in views() else {}
    return None


def _values(line: LineBefore, key: str, value: str) -> list[str]:
    """List what a value may become: words, runs and paths, else what it is now."""
    name = key.lstrip("+-").replace("/", ".")
    if line.settings is None:
        words, takes_path = _words_of(line, name)
    else:
        words, takes_path = words_of(line.settings.get(name)), name in _PATHS
    # Of several values all but the last; a path may have a comma.
    head = re.match(r".*[\[,]|", value)[0]  # type: ignore[index] # it matches anything
    start, found = value.removeprefix(head), list[str]()
    if name in _RUNS:
        is_job = line.settings is None
        words += training_names(line.outputs).beginning(start, is_job=is_job)
        found += [head + each for each in _folders(start)]
    if name in ("run", "resume"):
        words.append(AUTO)
    found += [head + word for word in words]
    if takes_path:
        found += paths(value, only_folders=name in _FOLDERS)
    if not found and line.settings is None:
        now = [each.removeprefix(f"{key}=") for each in _of_hydra(line, f"{key}=")]
        return ["false", "true"] if now in (["false"], ["true"]) else now
    return found


def _folders(typed: str) -> list[str]:
    """List the folders that begin as typed, once something is."""
    return paths(typed, only_folders=True) if typed else []


def _words_of(line: LineBefore, name: str) -> tuple[list[str], bool]:
    """Give the words that a key of a run takes, and whether it takes a path."""
    with line.composer.open():
        if name in line.composer.groups:
            return [*line.composer.groups[name]], name in _PATHS
        kind = KEYS[name].annotation if name in KEYS else _type_of(line, name)
    if name == trackers.TRACKER_GROUP:
        return [*trackers.options()], False
    words = list[str]()
    for word, is_typed in alternatives(kind):
        if is_typed:
            words.append(word)
    is_named = owner_of(name) and NAMES_A_PATH.fullmatch(name)
    return words, bool(is_named) or name in _PATHS or ExistingPath in (kind, *get_args(kind))


def _type_of(line: LineBefore, name: str) -> Any:  # noqa: ANN401 - a type, which has no type of its own
    """Give the type of an argument of a class that the line chooses; None where it is not known."""
    section, _, argument = name.rpartition(".")
    # What is wrong on the line is said once it is typed.
    with suppress(Exception):
        parts = classify(parse(line.words)[0], line.composer.groups)
        composed = line.composer.compose(parts.choices, parts.values)
        target = OmegaConf.select(composed, f"{section}.{TARGET}")
        return declared(target).types.get(argument)
    return None


def _of_hydra(line: LineBefore, last: str) -> list[str]:
    """Ask Hydra, which knows the keys of the options that the line chooses."""
    with line.composer.open() as hydra:
        plugin = DefaultCompletionPlugin(hydra.config_loader)
        for words in (line.words, []):
            # As above: then for a line without what is wrong
            with suppress(Exception):
                if found := plugin._query(CONFIG_NAME, " ".join([*words, last])):
                    return [*found]
    return []


def paths(typed: str, *, only_folders: bool = False) -> list[str]:
    """List the paths that begin as typed, folders with `/` behind; a dot asks for hidden ones."""
    above, slash, start = typed.rpartition("/")
    found = list[str]()
    # A folder may not be read, or be none.
    with suppress(OSError):
        for entry in os.scandir(expanded(f"{above}{slash}" or ".")):
            is_folder = os.path.isdir(entry)  # noqa: PTH112 - of pathlib it raises
            is_shown = start or not entry.name.startswith(".")
            if is_shown and entry.name.startswith(start) and (is_folder or not only_folders):
                found.append(f"{above}{slash}{entry.name}{'/' if is_folder else ''}")
    # Elsewhere a shell, or this program, would read the name as a home.
    return [each if slash or each[0] != "~" else f"./{each}" for each in found]
