"""Thin out the curves of runs so that spikes stay; page.js draws them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from statistics import fmean
from typing import Any

from trainer.config.metric_mode import title_of
from trainer.core.format import is_held_out
from trainer.core.run_folder import RunFolder
from trainer.features.page.saved_run import SavedRun
from trainer.report.journal import is_number

CurveValues = Sequence[float | None]

MOST_POINTS, LEAST_POINTS, POINTS_OF_ALL = 360, 40, 6000  # of one curve, and over all runs
AXES = ("step", "samples", "tokens", "seconds")
MARKS = ("skipped step", "replay", "batch change", "checkpoint")  # below the loss
TITLES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
    "memory_bytes": "memory",
    "noise_scale": "gradient noise scale",
    "batch_size": "global batch",
}
_NOT_DRAWN = {
    "epoch",
    "accum_steps",
    "micro_batches",
    "replays",
    "eval_seconds",
    "model_flops_per_second",
    *AXES,
}
_FIRST = ("loss", "lr", "grad_norm", "tokens_per_second", "memory_bytes", "padding")


def charts_of(runs: Sequence[SavedRun]) -> list[dict[str, Any]]:
    """List what is drawn: for each metric its curves in training and over what is held out."""
    steps, evaluations = list[dict[str, Any]](), list[dict[str, Any]]()
    for run in runs:
        steps += run.steps
        evaluations += run.evaluations
    # Each metric of training, with the name of the curve of held-out data in the same chart.
    trained = {*_names(steps)}
    held_out = dict.fromkeys(_names(steps), "")
    for name in _names(evaluations):
        beside = name.removeprefix("eval_")
        if beside not in trained:
            held_out[name] = ""
        elif beside != name:
            held_out[beside] = name

    def place(name: str) -> float:
        if name in _FIRST:
            return _FIRST.index(name)
        # Metrics stand between the loss, which is 0, and the learning rate, which is 1.
        if held_out[name] or is_held_out(name):
            return 0.5
        # Figures of single blocks have a slash and stand last.
        return len(_FIRST) + ("/" in name)

    titles = dict(TITLES)
    if all(run.noun == "sample" for run in runs):
        titles["tokens_per_second"] = "samples per second"
    charts = []
    for name in sorted(held_out, key=place):
        title = titles.get(name) or title_of(name)
        # What page.js writes the numbers as; empty for plain ones
        kind = "share" * (name == "padding") or "bytes" * name.endswith("_bytes")
        chart = {"key": name, "held_out": held_out[name], "title": title, "kind": kind}
        charts.append(chart)
    return charts


def _names(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Name the metrics that change, or that are of a single step, in the order they come in."""
    first: dict[str, float] = {}
    changing, steps = set[str](), set[int]()
    for entry in entries:
        steps.add(entry["step"])
        for name in entry.keys() - changing - _NOT_DRAWN:
            value = entry[name]
            if is_number(value) and first.setdefault(name, value) != value:
                changing.add(name)
    order = dict.fromkeys(chain(*entries[:1], *entries[-1:]))
    drawn = list[str]()
    for name in [*order, *sorted(first.keys() - order.keys())]:
        # A line that never moves says nothing, but the loss is looked for first.
        is_shown = name in changing or name == _FIRST[0] or len(steps) <= 1
        if name in first and is_shown:
            drawn.append(name)
    return drawn


def series_of(run: SavedRun, charts: Sequence[dict[str, Any]], num_runs: int) -> dict[str, Any]:
    """Give a run's curves, thinned out: steps and values of each, and the axes at some steps.

    A third and fourth list of a curve are the steps and means of what was thinned out, by which it
    is smoothed.
    """
    limit = max(LEAST_POINTS, min(MOST_POINTS, POINTS_OF_ALL // num_runs))
    places, seconds = [(0, 0.0, 0.0, 0.0)], 0.0
    for entry in run.steps:
        samples, tokens = _or_zero(entry.get("samples")), _or_zero(entry.get("tokens"))
        seconds += _or_zero(entry.get("seconds"))
        places.append((entry["step"], samples, tokens, round(seconds, 2)))
    curves = {}
    for chart in charts:
        held_out = chart["held_out"] or chart["key"]
        for name, entries in ((chart["key"], run.steps), (held_out, run.evaluations)):
            own = list[tuple[int, Any]]()
            for entry in entries:
                if name in entry:
                    own.append((entry["step"], entry[name]))
            if own:
                curves[name] = _thinned(own, limit)
    stride = 1 + len(places) // limit
    shown = [*places[:-1:stride], places[-1]]
    return {
        "x": dict(zip(AXES, zip(*shown, strict=True), strict=True)),
        "curves": curves,
        "marks": [*_marks(run)],
    }


def _thinned(
    own: Sequence[tuple[int, Any]], limit: int
) -> tuple[list[int], CurveValues, CurveValues, CurveValues]:
    """Keep the least, the greatest and the first missing value of every stretch of a curve."""
    steps, values = list[int](), list[float | None]()
    for step, value in own:
        steps.append(step)
        values.append(_rounded(value))
    if len(own) <= limit:
        return steps, values, [], []
    chosen, middles, means = {0, len(own) - 1}, list[float](), list[float]()
    # A stretch gives two points, its least and its greatest.
    bounds = [*range(0, len(own), math.ceil(2 * len(own) / limit)), len(own)]
    for begin, end in pairwise(bounds):
        there = list[tuple[float, int]]()
        for place in range(begin, end):
            if (number := values[place]) is not None:
                there.append((number, place))
        if len(there) < end - begin:
            chosen.add(values.index(None, begin))
        if there:
            chosen |= {min(there)[1], max(there)[1]}
            middles.append(steps[(begin + end) // 2])
            means.append(float(f"{fmean(number for number, _ in there):.5g}"))
    at = sorted(chosen)
    return [steps[place] for place in at], [values[place] for place in at], middles, means


def _rounded(value: object) -> float | None:
    # Five digits are more than a screen shows.
    return float(f"{value:.5g}") if is_number(value) else None


def _marks(run: SavedRun) -> Iterator[tuple[int, str]]:
    """Mark what `MARKS` names; of checkpoints those that are there."""
    before = None
    for entry in run.steps:
        step, size = entry["step"], entry.get("batch_size")
        if "skipped" in entry:
            yield step, "skipped step"
        if "replays" in entry:
            yield step, "replay"
        if size != before and before is not None:
            yield step, "batch change"
        before = size
    for step in RunFolder(run.folder).steps():
        if step <= run.last_step:
            yield step, "checkpoint"


def _or_zero(value: object) -> float:
    return round(value, 2) if is_number(value) else 0
