"""Write the page of a run, or of several: one HTML file without any other."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from trainer.core.durable import write_file_atomic
from trainer.core.format import number, plural, shown_path
from trainer.features.page import asked, bars, classes, results, samples
from trainer.features.page.comparison import Comparison
from trainer.features.page.curves import AXES, MARKS, charts_of, series_of
from trainer.features.page.names import names_of
from trainer.features.page.saved_run import SavedRun
from trainer.features.page.swept import swept

if TYPE_CHECKING:
    from jinja2 import Template

_HERE = Path(__file__).parent
_FILE = "report.html"  # in the folder of a run
_AT_ONCE = 24  # charts that are open; more are a click away
_MOST_FOLDED = 50  # runs whose parts are on a page of several


def write_page(folders: Sequence[Path], file: Path) -> None:
    """Write one page for all runs of these folders."""
    runs = [*map(SavedRun, folders)]
    write_file_atomic(file, page(runs, file.parent).encode(errors="backslashreplace"))


def page(runs: Sequence[SavedRun], place: Path) -> str:
    """Write the page that stands in the folder `place`."""
    names, charts = names_of(runs), charts_of(runs)
    drawn, marks = list[dict[str, Any]](), list[str]()
    for name, run in zip(names, runs, strict=True):
        series = series_of(run, charts, len(runs))
        drawn.append({"name": name, **series})
        marks += [kind for _, kind in series["marks"]]
    axes = [*AXES]
    # Where every sample is one token, both axes would be the same.
    if all(run.noun == "sample" for run in runs):
        axes.remove("tokens")
    title, one = f"{number(len(runs))} runs", None
    if len({run.name for run in runs}) == 1:
        title = runs[0].name
    compared, swept_keys = None, list[dict[str, Any]]()
    if len(runs) == 1:
        one = runs[0]
    else:
        compared = Comparison(runs)
        swept_keys = swept(compared)
    script = (_HERE / "page.js").read_text()
    return _template().render(
        runs=runs,
        names=names,
        one=one,
        title=title,
        compared=compared,
        links=[_link(run.folder, place) for run in runs],
        swept=swept_keys,
        charts=charts,
        mark_kinds=MARKS,
        marks=marks,
        axes=axes,
        at_once=_AT_ONCE,
        most_folded=_MOST_FOLDED,
        data={"runs": drawn, "charts": charts, "swept": swept_keys},
        style=(_HERE / "page.css").read_text(),
        script=script,
        digest=b64encode(sha256(script.encode()).digest()).decode(),
    )


def _link(run: Path, place: Path) -> str:
    """Give the address of a run's own page from the page in a folder; empty where it has none."""
    if not (run / _FILE).is_file():
        return ""
    path = os.path.relpath(run.absolute() / _FILE, place.absolute())
    # Quoted, no colon is left, and so no address of another kind.
    return quote(os.fsencode(path))


@cache
def _template() -> Template:
    """Read page.html, in which every text of a run is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415 - 80 ms

    html = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    for write in (number, plural, shown_path):
        html.filters[write.__name__] = write
    for module in (asked, bars, classes, results, samples):
        html.globals[module.__name__.rpartition(".")[2]] = module
    html.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return html.get_template("page.html")
