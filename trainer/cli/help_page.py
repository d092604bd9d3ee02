"""Print the pages of `train --help`, with commands, options, every key and flag, and of recipes.

Keys come from the schema and options from the folders, so the page cannot fall behind them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainer.cli.argv import COMMAND_HELP
from trainer.cli.exit_messages import print_out
from trainer.config import trackers
from trainer.config.components import GROUPS
from trainer.config.keys import KEYS
from trainer.config.messages import show as show_value
from trainer.config.option_files import OWN, data_dir, default_options
from trainer.config.recipes import FOLDERS_VARIABLE, RECIPE_GROUP, about, available, path_of
from trainer.core.format import expanded

# Where there is no terminal
_WIDTH = 100
_RUN = "keys (in brackets: the default|other choices)"

_EXAMPLES = {
    "train batch.global=512 accum=auto": "the default model on real text, in minutes",
    "train plan batch.global=4096 model=gpt2": "show the micro-batches of a step; do not train",
    "train model._target_=net.Net model.width=64": "a class of your own, from this folder",
    "train resume=auto": "go on with the newest run",
    "train -m optimizer.lr=0.01,0.02 seed=0,1": "a sweep, with a table at the end",
}
_FLAGS = {
    "-m": "sweep: every combination of KEY=A,B",
    "--cfg job": "show the composed config; --cfg hydra, --cfg all",
    "hydra.run.dir=DIR": "the run folder itself, instead of one below outputs; may be absolute",
    "--config-dir DIR": "a folder of options of your own, laid out as conf/ is",
    "--info": "where options come from, and the defaults list",
    "--shell-completion install=bash": 'eval "$(train --shell-completion install=bash)"',
}


def print_help(own_folder: str | None = None) -> None:
    """Print the page, with the options of the user's `--config-dir`."""
    # None is the width of the terminal, or what COLUMNS says.
    width = None
    if not any(map(os.isatty, range(3))) and "COLUMNS" not in os.environ:
        width = _WIDTH
    console = Console(highlight=False, markup=False, width=width)
    folders = [data_dir("conf")]
    if own_folder is not None:
        folders.append(expanded(own_folder))
    console.begin_capture()
    console.print(
        "train: a PyTorch trainer; state the global batch, get exactly that step at least cost\n"
        "usage: train [COMMAND] [GROUP=OPTION ...] [KEY=VALUE ...] [FLAG ...]\n"
        f"keys of one option, as model.width, are in {folders[0]}/GROUP/OPTION.yaml\n"
    )
    for title, rows in _sections(folders):
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan", no_wrap=True)
        for name, doc in rows:
            table.add_row(Text(name), Text(doc))
        console.print(title, style="bold")
        console.print(Padding(table, (0, 0, 1, 2)))
    # Tables pad their lines with blanks.
    for line in console.end_capture().splitlines():
        sys.stdout.write(f"{line.rstrip()}\n")


def list_recipes(words: Sequence[str], settings: Mapping[str, str]) -> None:
    """Print each recipe with its purpose, its cost and the result to expect."""
    for name in available():
        print_out(f"recipe={name}\n")
        if path := path_of(name):
            for key, value in about(path).items():
                print_out(f"  {key:<10}{value}\n")
    own = f"NAME.yaml in a folder on {FOLDERS_VARIABLE}, or recipe=path/to/file.yaml"
    print_out(f"your own: {own}\n")


def _sections(folders: list[Path]) -> Iterator[tuple[str, Iterable[tuple[str, str]]]]:
    """Give the blocks of the page: a title, and rows of two cells."""
    yield "commands", COMMAND_HELP.items()
    yield "examples", _EXAMPLES.items()
    defaults = default_options(folders[0])
    groups = {RECIPE_GROUP: [*available(), "path/to/file.yaml"]}
    for group in GROUPS:
        names = set[str]()
        for folder in folders:
            names.update(file.stem for file in (folder / group.replace(".", "/")).glob("*.yaml"))
        names.discard(OWN)
        # By name, but for the default, which is the first
        groups[group] = sorted(names, key=lambda name: (name != defaults.get(group), name))
    groups[f"{trackers.TRACKER_GROUP}=[...]"] = sorted(trackers.options(str(folders[-1])))
    yield "groups  (the default first)", ((name, "  ".join(row)) for name, row in groups.items())
    sections: dict[str, list[tuple[str, str]]] = {}
    for key, entry in KEYS.items():
        if key in GROUPS:
            continue
        words, doc, section = [show_value(entry.default)], entry.doc, _RUN
        if len(entry.choices) > 1:
            words += map(str, entry.choices)
        if entry.default not in (None, [], {}):
            doc += f"  [{'|'.join(dict.fromkeys(words))}]"
        if "." in key:
            section = key.partition(".")[0]
        sections.setdefault(section, []).append((key, doc))
    yield _RUN, sections.pop(_RUN)
    yield from sections.items()
    yield "flags", _FLAGS.items()
