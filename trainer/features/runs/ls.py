"""List runs as a table: `train ls sort=when last=20 outputs=DIR`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.cli import remote
from trainer.cli.exit_messages import print_notes
from trainer.cli.run_names import RunNames
from trainer.config.messages import by_key, clip, show
from trainer.config.option_files import OWN
from trainer.core.errors import ConfigError
from trainer.core.format import expanded, plural, printable, shown_path
from trainer.core.run_folder import RunFolder, all_runs, is_training
from trainer.features.runs.state import held_out_of, last_step_of, progress_of, word_of_state

# Wider than any line: what is piped is not cut.
_NO_LIMIT = 100_000
_ORDERS = {
    "when": "newest first",
    "metric": "by metric, the best first",
    "name": "by name",
    "step": "most steps first",
}
_COLOURS = {"completed": "green", "running": "cyan", "preempted": "yellow", "pruned": "yellow"}
# Quotes that Hydra has around a path, which nobody typed
_UNQUOTED = re.compile(r"^(['\"])(.*)\1$")
_UNITS = {"d": 86_400, "h": 3600, "min": 60, "s": 1}


def list_runs(words: Sequence[str], settings: Mapping[str, str]) -> None:
    """Print the table; how many more there are is said on stderr."""
    outputs, order = expanded(settings["outputs"]), settings["sort"]
    last = settings["last"]
    if not last.isdecimal() or int(last) < 1:
        raise ConfigError(clip(f"last={last}: must be a whole number of at least 1, e.g. 20"))
    remote.bring(outputs, whole=False)
    if not outputs.is_dir() and settings["outputs"] != "outputs":
        raise ConfigError(clip(f"outputs={settings['outputs']}: no such folder"))
    found = [*all_runs(outputs)]
    names, runs = RunNames(outputs, found), [*filter(is_training, found)]
    if not runs:
        print_notes([f"no run below {shown_path(outputs)} yet; `train` begins one"])
        return
    keys: Mapping[str, Callable[[RunFolder], Any]] = {
        "when": lambda run: -run.began(),
        "metric": lambda run: held_out_of(run).by_rank(),
        "name": names.shortest,
        "step": lambda run: -last_step_of(run),
    }
    runs.sort(key=RunFolder.by_start, reverse=True)
    runs.sort(key=keys[order])
    shown = runs[: int(last)]
    _print(shown, [*map(names.shortest, shown)])
    sys.stdout.flush()
    count = plural(len(runs), "run")
    if len(shown) < len(runs):
        print_notes([f"{len(shown)} of {count}, {_ORDERS[order]}; last={len(runs)} shows all"])
    elif len(runs) > 1:
        print_notes([f"{count}, {_ORDERS[order]}"])


def _print(runs: Sequence[RunFolder], names: Sequence[str]) -> None:
    """Print a line for each run; on a narrow terminal what was typed stands in one below it."""
    console, columns = Console(highlight=False, markup=False), _columns(runs, names)
    room = console.width if console.is_terminal else _NO_LIMIT
    # A name that is cut cannot be copied.
    console.width = _NO_LIMIT
    below = [Text()] * len(runs)
    if console.measure(_table(columns)).maximum > room:
        below = columns.pop("typed")
    # Folders have the date in their path, and the time in their name.
    if console.measure(_table(columns)).maximum > room:
        columns.pop("started")
    with console.capture() as captured:
        console.print(_table(columns))
    for line, words in zip(captured.get().splitlines(), [Text(), *below], strict=True):
        console.out(line.rstrip())
        if words:
            for each in words.wrap(console, room - 2):
                console.out(f"  {each.plain.rstrip()}", style="dim")


def _table(columns: Mapping[str, Sequence[Text]]) -> Table:
    table = Table(*columns, box=None, pad_edge=False)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _columns(runs: Sequence[RunFolder], names: Sequence[str]) -> dict[str, list[Text]]:
    """Give the cells of each column, by its title."""
    figures, states = [*map(held_out_of, runs)], list[Text]()
    for state in map(word_of_state, runs):
        states.append(Text(state, style=_COLOURS.get(state, "red")))
    metrics, title = {each.metric for each in figures}, "held out"
    cells = [f"{each.metric.removeprefix('eval_')} {each}" for each in figures]
    if len(metrics) == 1:
        (title,), cells = metrics, [*map(str, figures)]
    days, ages = zip(*(_when(run.began()) for run in runs), strict=True)
    texts: dict[str, Iterable[str]] = {"step": map(progress_of, runs), title: cells}
    texts |= {"started": days, "ago": ages, "typed": _what_differs(runs)}
    columns = {"name": [Text(printable(name), style="bold") for name in names], "state": states}
    return columns | {title: [*map(Text, column)] for title, column in texts.items()}


def _what_differs(runs: Sequence[RunFolder]) -> list[str]:
    """Give of each run what was typed and is not the same in all of them; of one run all of it."""
    typed, differs = [*map(_typed_of, runs)], set[str]()
    # A run whose records are gone differs in nothing.
    known = [*filter(None, typed)]
    for key in chain(*known):
        if len({each.get(key) for each in known}) > 1 or len(known) == 1:
            differs.add(key)
    found = list[str]()
    for each in typed:
        words = list[str]()
        for key, value in each.items():
            if key in differs:
                plain = _UNQUOTED.sub(r"\2", value)
                words.append(f"{key}={show(plain)}")
        found.append(printable(" ".join(words)))
    return found


def _typed_of(run: RunFolder) -> dict[str, str]:
    """Read what was typed for a run, by key; not its name, and nothing of Hydra's."""
    found = dict[str, str]()
    for key, value in by_key(run.typed()).items():
        # A run that went on in its own folder
        if key == "resume" and value.strip("'\"").endswith(run.path.name):
            continue
        # `own` is the option that a class of one's own stands in.
        if key.partition(".")[0] not in ("hydra", "name", "command") and value != OWN:
            found[key] = value
    return found


def _when(began: float) -> tuple[str, str]:
    """Write when a run began, by the clock and as seen from now."""
    with suppress(OSError, OverflowError, ValueError):
        now, start = datetime.now(), datetime.fromtimestamp(began)
        seconds = (now - start).total_seconds()
        if not began or seconds < 0:
            return "-", "-"
        day = f"{start:%m-%d %H:%M}" if start.year == now.year else f"{start:%Y-%m-%d}"
        for unit, length in _UNITS.items():
            if seconds >= length:
                return day, f"{seconds // length:.0f} {unit}"
        return day, "now"
    return "-", "-"
