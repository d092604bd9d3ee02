"""Print the page of `train --help`: commands, groups with their options, every key, the flags.

Keys come from the schema and options from the folders, so the page cannot fall behind them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainer.cli.argv import COMMANDS
from trainer.config.components import COMPONENTS, GROUPS, OWN
from trainer.config.keys import KEYS, data_dir, default_options
from trainer.config.messages import show as show_value
from trainer.config.recipes import GROUP, available

_WIDTH = 100  # of a file or a pipe

_EXAMPLES = (
    ("train batch.global=512 accum=auto", "the default model on real text, in minutes"),
    ("train plan batch.global=4096 model=gpt2", "see how a step would be cut; start nothing"),
    ("train accum=fixed accum.micro=8", "cut as a hand-written loop does"),
    ("train model._target_=net.Net model.width=64", "a class of your own, from this folder"),
    ("train resume=auto", "go on with the newest run"),
    ("train -m optimizer.lr=0.01,0.02 seed=0,1", "a sweep, with a table at the end"),
)
_FLAGS = (
    ("-m", "sweep: every combination of KEY=A,B"),
    ("--cfg job", "show the composed config; --cfg hydra, --cfg all"),
    ("hydra.run.dir=DIR", "the run folder itself, instead of one below outputs; may be absolute"),
    ("--config-dir DIR", "a folder of options of your own, laid out as conf/ is"),
    ("--info", "where options come from, and the defaults list"),
    ("--shell-completion install=bash", 'eval "$(train --shell-completion install=bash)"'),
    ("--hydra-help", "everything else that Hydra takes"),
)


def show(own_folder: str | None = None) -> None:
    """Print the page.

    Args:
        own_folder: the user's `--config-dir`.
    """
    is_wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, width=None if is_wide else _WIDTH)
    console.print(
        "[bold]train[/]: state the optimizer step; get exactly that step, at the least cost"
    )
    console.print(
        "[bold]usage[/]: train \\[COMMAND] \\[GROUP=OPTION ...] \\[KEY=VALUE ...] \\[FLAG ...]\n"
    )
    folders = [data_dir("conf"), *([Path(own_folder)] if own_folder is not None else [])]
    _print(console, "commands", COMMANDS.items())
    _print(console, "examples", _EXAMPLES)
    _print(console, "groups  (the default first)", _groups(folders))
    where = f"{folders[0]}/GROUP/OPTION.yaml"
    console.print(f"keys of one option, as model.width, are in {where}\n", markup=False)
    for title, rows in _sections():
        _print(console, title, rows)
    _print(console, "flags", _FLAGS)


def _print(console: Console, title: str, rows: Iterable[tuple[str, str | Text]]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, doc in rows:
        table.add_row(Text(name), doc if isinstance(doc, Text) else Text(doc))
    console.print(f"[bold]{title}[/]")
    console.print(Padding(table, (0, 0, 1, 2)))


def _groups(folders: Sequence[Path]) -> Iterator[tuple[str, Text]]:
    """Give every group with its options, the default one first and bold.

    Yields:
        Dotted key and options.
    """
    defaults = default_options(folders[0])
    for group in GROUPS:
        path = group.replace(".", "/")
        names = {file.stem for folder in folders for file in (folder / path).glob("*.yaml")}
        default = defaults.get(group, "")
        others = sorted(names - {default, OWN})
        line = Text(default, style="bold")
        line.append(f"{'  ' if others else ''}{'  '.join(others)}", style="not bold")
        if group in COMPONENTS:
            line.append(f"  {group}._target_=package.Class", style="not bold dim")
        yield group, line
    yield GROUP, Text("  ".join([*available(), "path/to/file.yaml"]))


def _sections() -> Iterator[tuple[str, list[tuple[str, Text]]]]:
    """Give the keys by section, with what they mean and their defaults.

    Yields:
        Title and rows.
    """
    rows: dict[str, list[tuple[str, Text]]] = {}
    for key, entry in KEYS.items():
        if key in GROUPS:
            continue
        head, _, tail = key.partition(".")
        line = Text(entry.doc)
        words = entry.choices if len(entry.choices) > 1 else ()
        if entry.default not in (None, [], {}):
            shown = dict.fromkeys((show_value(entry.default), *words))
            line.append(f"  [{'|'.join(shown)}]", style="dim")
        rows.setdefault(head if tail else "run", []).append((key, line))
    yield "keys  (in brackets: the default|other words)", rows.pop("run")
    yield from rows.items()
