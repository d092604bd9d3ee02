"""Thin out the curves of runs so that spikes stay; page.js draws them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from trainer.config.metric_mode import title_of
from trainer.core.run_folder import RunFolder
from trainer.features.page.saved_run import SavedRun, is_number

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
    trained = _names([*chain.from_iterable(run.steps for run in runs)])
    evaluated = _names([*chain.from_iterable(run.evaluations for run in runs)])
    held_out = dict.fromkeys(trained, "")  # name of the curve beside each
    for name in evaluated:
        beside = name.removeprefix("eval_")
        if beside not in held_out:
            held_out[name] = ""
        elif beside != name:
            held_out[beside] = name

    def place(name: str) -> float:  # metrics first, figures of single blocks last
        if name in _FIRST:
            return _FIRST.index(name)
        is_metric = held_out[name] or name.startswith("eval_")
        return 0.5 if is_metric else len(_FIRST) + ("/" in name)

    titles = dict(TITLES)
    if all(run.noun == "sample" for run in runs):
        titles["tokens_per_second"] = "samples per second"
    charts = []
    for name in sorted(held_out, key=place):
        kind = "share" if name == "padding" else "bytes" * name.endswith("_bytes")
        title = titles.get(name) or title_of(name)
        charts.append({"key": name, "held_out": held_out[name], "title": title, "kind": kind})
    return charts


def _names(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Name the metrics that change, or that are of a single step, in the order they come in."""
    first: dict[str, float] = {}
    changing = set[str]()
    for entry in entries:
        for name in entry.keys() - changing - _NOT_DRAWN:
            value = entry[name]
            if is_number(value) and first.setdefault(name, value) != value:
                changing.add(name)
    is_one = len({entry["step"] for entry in entries}) <= 1
    order = dict.fromkeys(name for entry in (*entries[:1], *entries[-1:]) for name in entry)
    names = [*order, *sorted(first.keys() - order.keys())]
    return [n for n in names if n in changing or (n in first and (is_one or n == _FIRST[0]))]


def series_of(run: SavedRun, charts: Sequence[dict[str, Any]], num_runs: int) -> dict[str, Any]:
    """Give a run's curves, thinned out: steps and values of each, and the axes at some steps.

    A third and fourth list of a curve are the steps and means of what was thinned out, by which it
    is smoothed.
    """
    limit = max(LEAST_POINTS, min(MOST_POINTS, POINTS_OF_ALL // num_runs))
    places, seconds = [(0, 0.0, 0.0, 0.0)], 0.0
    for entry in run.steps:
        samples, tokens, more = (_or_zero(entry.get(n)) for n in ("samples", "tokens", "seconds"))
        seconds += more
        places.append((entry["step"], samples, tokens, round(seconds, 2)))
    curves = {}
    for chart in charts:
        held_out = chart["held_out"] or chart["key"]
        for name, entries in ((chart["key"], run.steps), (held_out, run.evaluations)):
            if own := [(entry["step"], entry[name]) for entry in entries if name in entry]:
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
    # Five digits are more than a screen shows.
    values = [float(f"{value:.5g}") if is_number(value) else None for _, value in own]
    if len(own) <= limit:
        return [step for step, _ in own], values, [], []
    width = 2 * len(own) / limit
    bounds = [round(k * width) for k in range(limit // 2 + 1)]
    chosen, middles, means = {0, len(own) - 1}, list[float](), list[float]()
    for begin, end in zip(bounds, [*bounds[1:-1], len(own)], strict=False):
        if None in values[begin:end]:
            chosen.add(values.index(None, begin))
        there = [(v, i) for i, v in enumerate(values[begin:end], begin) if v is not None]
        if there:
            chosen |= {min(there)[1], max(there)[1]}
            middles.append(own[(begin + end) // 2][0])
            means.append(float(f"{fmean(value for value, _ in there):.5g}"))
    at = sorted(chosen)
    return [own[i][0] for i in at], [values[i] for i in at], middles, means


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
