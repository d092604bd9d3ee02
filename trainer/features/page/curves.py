"""Thin out the curves of runs so that spikes stay; page.js draws them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
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
    trained = _names([entry for run in runs for entry in run.steps])
    evaluated = _names([entry for run in runs for entry in run.evaluations])
    pairs = [(n, f"eval_{n}" if f"eval_{n}" in evaluated else "") for n in trained]
    pairs += [(n, "") for n in evaluated if n.removeprefix("eval_") not in trained]
    rank = {name: place for place, name in enumerate(_FIRST)}

    def place(pair: tuple[str, str]) -> float:  # metrics first, figures of single blocks last
        is_metric = pair[1] or pair[0].startswith("eval_")
        return rank.get(pair[0], 0.5 if is_metric else len(rank) + ("/" in pair[0]))

    is_samples = all(run.noun == "sample" for run in runs)
    own_titles = {"tokens_per_second": "samples per second"} if is_samples else {}
    return [
        {
            "key": name,
            "held_out": held_out,
            "title": own_titles.get(name) or TITLES.get(name) or title_of(name),
            "kind": "bytes" if name.endswith("_bytes") else "share" if name == "padding" else "",
        }
        for name, held_out in sorted(pairs, key=place)
    ]


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
    times = accumulate(_or_zero(entry.get("seconds")) for entry in run.steps)
    places = [(0, 0.0, 0.0, 0.0)]
    places += [
        (e["step"], _or_zero(e.get("samples")), _or_zero(e.get("tokens")), round(time, 2))
        for e, time in zip(run.steps, times, strict=True)
    ]
    stride = 1 + len(places) // limit
    curves = {}
    for chart in charts:
        held_out = chart["held_out"] or chart["key"]
        for name, entries in ((chart["key"], run.steps), (held_out, run.evaluations)):
            if own := [(e["step"], e[name]) for e in entries if name in e]:
                curves[name] = _thinned(own, limit)
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
        there = [(v, i) for i in range(begin, end) if (v := values[i]) is not None]
        chosen.update(next(([i] for i in range(begin, end) if values[i] is None), ()))
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
