"""Write the page of a run, or of several: one HTML file without any other. Imports no torch."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config.secrets import without_secrets
from trainer.core.durable import write_file_atomic
from trainer.core.format import duration, number, shown_path
from trainer.report import page_bars as bars
from trainer.report import page_parts as parts
from trainer.report.journal import METRICS_FILE
from trainer.report.page_curves import AXES, charts_of, series_of
from trainer.report.page_html import Html, card, el, join
from trainer.report.page_runs import SavedRun, runs_in

PAGE = "report.html"
_HERE = Path(__file__).parent
MOST_LETTERS = 100  # of a run's name
_BESIDE = 24  # charts that are open; more are a click away
_PREDICT = "train evaluate run={} eval.predictions=true"

_log = logging.getLogger(__name__)


def write_own_page(folder: Path) -> None:
    """Write the page of a run, or of a sweep, that ended; what goes wrong is one warning."""
    try:
        if (folder / METRICS_FILE).is_file() or not (folder / "config.yaml").is_file():
            write_page([folder], folder / PAGE)
    except Exception as error:  # a picture of a run never makes it fail
        _log.warning("%s could not be written: %s: %s", PAGE, type(error).__name__, error)


def write_page(folders: Sequence[Path], file: Path) -> int:
    """Write one page for all runs of some folders, sweeps' among them; give their number.

    Raises:
        OSError: the disk refuses.
    """
    runs = [SavedRun(path) for folder in folders for path in runs_in(folder)]
    if runs:
        write_file_atomic(file, page(runs).encode())
    return len(runs)


def page(runs: Sequence[SavedRun]) -> str:
    """Write the page."""
    names = _names(runs)
    of_all = {run.name for run in runs}
    title = runs[0].name if len(of_all) == 1 else f"{number(len(runs))} runs"
    charts = charts_of(runs)
    series = [series_of(run, charts, len(runs)) for run in runs]
    data = {
        "runs": [{"name": name, **each} for name, each in zip(names, series, strict=True)],
        "charts": charts,
    }
    body = join(
        _head(runs, title),
        parts.figures(runs[0]) if len(runs) == 1 else parts.comparison(runs, names),
        parts.notes(runs[0]) if len(runs) == 1 else None,
        bars.plan(runs[0]) if len(runs) == 1 else None,
        _curves(charts, series, names),
        _about(runs[0]) if len(runs) == 1 else _each(runs, names),
    )
    style, script = ((_HERE / f"page.{kind}").read_text() for kind in ("css", "js"))
    # In a script nothing is escaped but what could end it.
    numbers = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    head = join(
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{title} · train"),
        el("style", Html(style)),
    )
    scripts = el("script", Html(numbers), type="application/json", id="data")
    scripts = join(scripts, el("script", Html(script)))
    whole = el("html", el("head", head), el("body", el("main", body), scripts), lang="en")
    return f"<!doctype html>\n{whole}\n"


def _head(runs: Sequence[SavedRun], title: str) -> Html:
    run = runs[0]
    is_one = len(runs) == 1
    facts = [
        run.started,
        duration(run.seconds) + " of steps and evaluations" if run.seconds else None,
        str(run.config.get("model._target_") or "").rpartition(".")[2] or None,
        *run.continuation,
    ]
    reason = (run.status.get("reason") or run.result.get("stopped")) if is_one else None
    code = run.status.get("exit_code") if is_one else None
    ending = f"exit {code}: {reason}" if code else reason
    pill = el("span", run.state, class_=f"pill {run.state}") if is_one else None
    metric, _ = parts.ranked_by(runs)
    about = f"{number(len(runs))} runs, compared by {metric}; dashed lines are held out"
    line = " · ".join(filter(None, facts)) if is_one else about
    theme = el(
        "button", "◐", id="theme", type="button", title="light or dark", aria_label="light or dark"
    )
    return el(
        "header",
        el("div", el("h1", title, " ", pill), theme, class_="top"),
        el("p", line, class_="facts"),
        el("pre", run.typed, class_="command") if is_one and run.config else None,
        el("p", without_secrets(str(ending), os.environ), class_=f"reason {run.state}")
        if ending
        else None,
    )


def _curves(
    charts: list[dict[str, Any]], series: Sequence[dict[str, Any]], names: Sequence[str]
) -> Html:
    if not any(each["curves"] for each in series):
        return el("section", el("h2", "Curves"), el("p", "No step was taken yet."), class_="card")
    axes = (
        el("button", label, type="button", data_x=axis, aria_pressed=str(axis == "step").lower())
        for axis, label in AXES.items()
        if axis != "tokens" or any(run["x"]["tokens"] != run["x"]["samples"] for run in series)
    )
    toggles = (
        el(
            "button",
            el("i", class_=f"key s{n % 8}"),
            name,
            type="button",
            data_run=n,
            aria_pressed="true",
        )
        for n, name in enumerate(names)
    )
    tools = el(
        "div",
        el("div", axes, class_="choice", role="group", aria_label="horizontal axis"),
        el("label", el("input", type="checkbox", id="log"), " log scale"),
        el(
            "label",
            "smooth ",
            el("input", type="range", id="smooth", min=0, max=0.98, step=0.02, value=0),
        ),
        class_="tools",
    )
    figures = [
        el(
            "figure",
            el("figcaption", el("b", chart["title"]), el("span")),
            el("svg", role="img", aria_label=f"curve of {chart['title']}"),
            data_chart=n,
        )
        for n, chart in enumerate(charts)
    ]
    more = figures[_BESIDE:]
    return el(
        "section",
        el("h2", "Curves"),
        tools,
        el("div", toggles, class_="legend runs") if len(names) > 1 else None,
        el("noscript", f"Curves need JavaScript; their numbers are in {METRICS_FILE}."),
        el("div", figures[:_BESIDE], class_="charts"),
        el("p", id="marks", class_="legend"),
        el("details", el("summary", f"{len(more)} more"), el("div", more, class_="charts"))
        if more
        else None,
        class_="card curves",
    )


def _about(run: SavedRun) -> Html:
    """Lay out all that is of one run."""
    shown = parts.samples(run)
    if not shown and run.evaluations:
        remedy = _PREDICT.format(shown_path(run.folder))
        text = "Not computed yet: an evaluation adds up whole micro-batches. To have them:"
        shown = card(
            "Samples with the largest loss", el("p", text), el("pre", remedy, class_="command")
        )
    pair = join(bars.memory(run), bars.times(run), parts.baselines(run), parts.machine(run))
    return join(
        el("div", pair, class_="pair"),
        shown,
        parts.generated(run),
        parts.settings(run),
    )


def _each(runs: Sequence[SavedRun], names: Sequence[str]) -> Html:
    """Fold what is of each run."""
    return join(
        parts.details(name, parts.figures(run), parts.notes(run), bars.plan(run), _about(run))
        for run, name in zip(runs[: parts.MOST_FOLDED], names, strict=False)
    )


def _names(runs: Sequence[SavedRun]) -> list[str]:
    """Name runs so that they differ; jobs of a sweep by what they were given."""
    names = [str(run.config.get("name") or "") for run in runs]
    if all(names) and len(set(names)) == len(names):
        return names
    typed = [dict.fromkeys(run.typed.split()[1:]) for run in runs]
    common = set.intersection(*map(set, typed))
    own = [" ".join(word for word in words if word not in common) for words in typed]
    labels = [
        f"{run.folder.name}: {words}"[:MOST_LETTERS].removesuffix(": ")
        for run, words in zip(runs, own, strict=True)
    ]
    return labels if len(set(labels)) == len(labels) else [shown_path(run.folder) for run in runs]
