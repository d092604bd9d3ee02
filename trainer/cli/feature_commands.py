"""Run what starts no run: the help, views, and commands that `conf/commands.yaml` names.

They show or remove what is on disk, and need no config. Imports neither Hydra nor torch.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, final

from trainer.cli.exit_messages import print_notes, print_out
from trainer.config.messages import clip, did_you_mean, either
from trainer.config.option_files import data_dir, load_yaml
from trainer.core.errors import ConfigError

# What has another `=` than this is a word, such as the path of a folder `lr=0.1`.
_KEY = re.compile(r"[\w.-]+")


@final
@dataclass(frozen=True, kw_only=True)
class FeatureCommand:
    """A command of a feature: `train NAME [WORD ...] [KEY=VALUE ...]`."""

    target: str  # a function of the words and of the settings by key, by its path
    help: str  # what it does
    # What may be typed, with its default; of a list it is one of the words, by default the first
    settings: Mapping[str, Any]
    words: str | None = None  # what its words name, as `RUN`; None where it takes none
    of_run: bool = False  # whether it takes a run's settings, too, which it gets among its words

    def run(self, command: str, lines: Sequence[str]) -> None:
        """Run it, with what was typed behind it."""
        words, typed = list[str](), list[str]()
        for line in lines:
            key, equals, _ = line.partition("=")
            is_own = not self.of_run or key in self.settings
            if equals and _KEY.fullmatch(key) and is_own:
                typed.append(line)
            else:
                words.append(line)
        hints = dict[str, str]()
        if self.words is not None:
            hints = dict.fromkeys(("run", "name"), f" Type train {command} {self.words}.")
        settings = read_settings(command, typed, self.settings, hints)
        pkgutil.resolve_name(self.target)(words, settings)


@cache
def feature_commands() -> dict[str, FeatureCommand]:
    """Read which there are, by name."""
    found = dict[str, FeatureCommand]()
    for name, each in load_yaml(data_dir("conf") / "commands.yaml").items():
        found[name] = FeatureCommand(target=each.pop("_target_"), **each)
    return found


def show_page(word: str, settings: Sequence[str], own_folder: str | None) -> None:
    """Run a command that composes no config, print the help, or say where a view was written."""
    found = feature_commands().get(word)
    if found is not None:
        own_options = [f"--config-dir={own_folder}"] * (found.of_run and own_folder is not None)
        found.run(word, [*settings, *own_options])
    elif word == "help":
        from trainer.cli import help_page  # noqa: PLC0415 - imports Hydra

        help_page.print_help(own_folder)
    else:
        from trainer.cli.view_command import show_runs  # noqa: PLC0415 - for these alone

        print_out(f"{show_runs(word, settings)}\n")


def read_settings(
    command: str, lines: Sequence[str], settings: Mapping[str, Any], hints: Mapping[str, str]
) -> dict[str, str]:
    """Read `key=value` lines; gives the value of each setting, typed or by default.

    `hints` say by key what to type instead, where it is none, and where it is typed twice.
    """
    found = dict[str, str]()
    for line in lines:
        key, equals, value = line.partition("=")
        value = value.strip("'\"")
        if key not in settings or not equals:
            takes = ", ".join(f"{each}=" for each in settings)
            hint = hints.get(key, did_you_mean(key, settings))
            if not settings:
                raise ConfigError(clip(f"{line}: train {command} takes no settings; leave it out"))
            raise ConfigError(clip(f"{key}: no setting of train {command}.{hint} It takes {takes}"))
        words = words_of(settings[key])
        if words and value not in words:
            near = did_you_mean(value, words)
            raise ConfigError(clip(f"{line}: must be {either(words)}{near and f'.{near}'}"))
        if not value and settings[key] != "":
            raise ConfigError(f"{line}: needs a value, as in {key}={_default(settings[key])}")
        if key in found:
            hint = hints.get(key, "")
            print_notes([f"{key}: typed twice; the last one counts{hint and f'.{hint}'}"])
        found[key] = value
    return {key: _default(each) for key, each in settings.items()} | found


def words_of(setting: object) -> list[str]:
    """List the words that a setting takes; none where it takes any value."""
    if not isinstance(setting, list):
        return []
    # As they are typed: YAML's true and false are no texts.
    return [str(word).lower() for word in setting]


def _default(setting: object) -> str:
    return next(iter(words_of(setting)), str(setting))
