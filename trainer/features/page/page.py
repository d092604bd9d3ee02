"""Write the page of a run, or of several: one HTML file without any other."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.core.durable import write_file_atomic
from trainer.core.format import number, plural, shown_path
from trainer.features.page import bars, sections
from trainer.features.page.curves import AXES, MARKS, charts_of, series_of
from trainer.features.page.saved_run import SavedRun

if TYPE_CHECKING:
    from jinja2 import Template

_HERE = Path(__file__).parent
_MOST_LETTERS = 100  # of a run's name
_AT_ONCE = 24  # charts that are open; more are a click away
_MOST_FOLDED = 50  # runs whose parts are on a page of several


def write_page(folders: Sequence[Path], file: Path) -> None:
    """Write one page for all runs of these folders."""
    runs = [SavedRun(folder) for folder in folders]
    write_file_atomic(file, page(runs).encode(errors="backslashreplace"))


def page(runs: Sequence[SavedRun]) -> str:
    """Write the page."""
    names, charts = _names(runs), charts_of(runs)
    drawn, marks = list[dict[str, Any]](), list[str]()
    has_tokens = False
    for name, run in zip(names, runs, strict=True):
        series = series_of(run, charts, len(runs))
        drawn.append({"name": name, **series})
        marks += [kind for _, kind in series["marks"]]
        has_tokens |= series["x"]["tokens"] != series["x"]["samples"]
    axes = [*AXES]
    # Where every sample is one token, both axes would be the same.
    if not has_tokens:
        axes.remove("tokens")
    title = f"{number(len(runs))} runs"
    if len({run.name for run in runs}) == 1:
        title = runs[0].name
    script = (_HERE / "page.js").read_text()
    return _template().render(
        runs=runs,
        names=names,
        one=runs[0] if len(runs) == 1 else None,
        title=title,
        metric=sections.ranked_by(runs)[0],
        charts=charts,
        mark_kinds=MARKS,
        marks=marks,
        axes=axes,
        at_once=_AT_ONCE,
        most_folded=_MOST_FOLDED,
        data={"runs": drawn, "charts": charts},
        style=(_HERE / "page.css").read_text(),
        script=script,
        digest=b64encode(sha256(script.encode()).digest()).decode(),
    )


@cache
def _template() -> Template:
    """Read page.html, in which every text of a run is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415 - 80 ms

    html = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    for write in (number, plural, shown_path, sections.cell_text):
        html.filters[write.__name__] = write
    html.globals |= {"sections": sections, "bars": bars}
    html.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return html.get_template("page.html")


def _names(runs: Sequence[SavedRun]) -> list[str]:
    """Name runs so that they differ; jobs of a sweep by what they were given."""
    names = [str(run.config.get("name") or "") for run in runs]
    if all(names) and len(set(names)) == len(names):
        return names
    # The first word is `train`; of words that stand twice, one is enough.
    typed = [dict.fromkeys(run.typed.split()[1:]) for run in runs]
    common = set.intersection(*map(set, typed))
    labels = []
    for run, words in zip(runs, typed, strict=True):
        own = list[str]()
        for word in words:
            if word not in common:
                own.append(word)
        label = f"{run.folder.name}: {' '.join(own)}"[:_MOST_LETTERS]
        # Of a run that was given nothing of its own, the folder's name is left.
        labels.append(label.removesuffix(": "))
    if len(set(labels)) == len(labels):
        return labels
    return [shown_path(run.folder) for run in runs]
