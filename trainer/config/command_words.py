"""Name the commands that take a config: the program's own, and those that features bring."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import final

from trainer.config.messages import line
from trainer.config.option_files import data_dir, load_yaml


@final
@dataclass(frozen=True, kw_only=True)
class ReadingCommand:
    """A command that `conf/reading_commands.yaml` names; it leaves the run's status as it is."""

    target: str  # path of the function that runs it
    help: str
    example: str  # what is typed behind `run=RUN`
    # The key whose value is taken as it is typed, by none of Hydra's grammar; None without one
    text: str | None = None
    reads_data: bool = True
    # Whether it reads all of other data than the run's, which are typed; it takes no step then
    reads_other_data: bool = False
    on_all_ranks: bool = False  # else it runs in one process
    # Path of the function that gives Python what it wrote, by the config and the run's folder
    result: str | None = None


def _reading_commands() -> dict[str, ReadingCommand]:
    listed = load_yaml(data_dir("conf") / "reading_commands.yaml")
    found = dict[str, ReadingCommand]()
    for word, entry in listed.items():
        found[word] = ReadingCommand(target=entry.pop("_target_"), **entry)
    return found


READING_COMMANDS: Mapping[str, ReadingCommand] = _reading_commands()

READING = ("evaluate", "export", *READING_COMMANDS)
"""Commands that read another run and leave its status as it is."""
OF_OTHER_DATA = tuple(
    word for word, command in READING_COMMANDS.items() if command.reads_other_data
)
"""Commands that read all of other data than the run's, and take no step."""
ALL_COMMANDS = ("train", "plan", "verify", *READING)


def commands_but(*words: str) -> tuple[str, ...]:
    """Give all commands but some."""
    found = list[str]()
    for word in ALL_COMMANDS:
        if word not in words:
            found.append(word)
    return tuple(found)


def commands_without_data() -> Collection[str]:
    """Give the commands for which the files of a run's data may be gone."""
    found = ["export"]
    for word, each in READING_COMMANDS.items():
        if not each.reads_data:
            found.append(word)
    return found


def text_keys() -> dict[str, str]:
    """Give the keys whose values are taken as they are typed, each with its command."""
    found = dict[str, str]()
    for word, each in READING_COMMANDS.items():
        if each.text is not None:
            found[each.text] = word
    return found


def text_faults(texts: Mapping[str, object], command: object) -> Iterator[str]:
    """Refuse a text, by its key, that is another command's."""
    for key, owner in text_keys().items():
        if texts.get(key) is not None and command != owner:
            yield line(key, texts[key], f"is for train {owner} run=RUN; leave it out")
