"""Write runs as Markdown, to paste: what was asked for, the keys that differ, and results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from trainer.core.format import number
from trainer.features.page.asked import asked, facts
from trainer.features.page.comparison import Comparison
from trainer.features.page.names import names_of
from trainer.features.page.results import TableRows, ending, figures
from trainer.features.page.saved_run import SavedRun


def markdown(folders: Sequence[Path]) -> str:
    """Write one run, or several side by side."""
    runs = [*map(SavedRun, folders)]
    if len(runs) == 1:
        return "\n".join(_one(runs[0]))
    return "\n".join(_several(runs))


def _one(run: SavedRun) -> Iterator[str]:
    yield f"### {_text(run.name)}: {run.state}"
    yield ""
    yield _text(" · ".join(facts(run)))
    yield ""
    if run.config:
        yield f"    {run.typed}"
        yield ""
    if reason := ending(run):
        yield _text(reason)
        yield ""
    results = list[tuple[str, str]]()
    for name, value, note in figures(run):
        text = value
        if note:
            text += f" ({note})"
        results.append((name, text))
    yield from _table(["result", ""], results)
    yield ""
    yield from _table(["asked for", ""], asked(run))


def _several(runs: Sequence[SavedRun]) -> Iterator[str]:
    compared, names = Comparison(runs), names_of(runs)
    yield f"### {number(len(runs))} runs, {compared.order}"
    head = ["run", "state", *compared.head]
    for group in compared.groups:
        yield ""
        if len(compared.groups) > 1:
            yield f"On {_text(group.title)}:"
            yield ""
        rows = list[Sequence[str]]()
        for n in group.runs:
            name = names[n].partition(": ")[0]
            if compared.is_best(n):
                name = f"**{name}**"
            rows.append([name, runs[n].state, *compared.cells(n)])
        yield from _table(head, rows)
    for note in compared.notes:
        yield ""
        yield _text(note)
    if compared.other_keys:
        yield ""
        yield f"These keys differ, too: {_text(', '.join(compared.other_keys))}"


def _table(head: Sequence[str], rows: TableRows) -> Iterator[str]:
    yield from map(_line, chain([head, ["---"] * len(head)], rows))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_text, cells))} |"


def _text(text: str) -> str:
    """Bring a text into one line in which Markdown reads no table and no HTML."""
    return re.sub(r"([|<`\\])", r"\\\1", " ".join(text.split()))
