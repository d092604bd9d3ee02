"""Thin out the curves of runs so that spikes stay; page.js draws them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

from trainer.config.metric_mode import title_of
from trainer.report.page_runs import SavedRun, is_number

Numbers = Sequence[float | None]

MOST_POINTS, LEAST_POINTS, POINTS_OF_ALL = 360, 40, 6000  # of one curve, and over all runs
AXES = {"step": "steps", "samples": "samples", "tokens": "tokens", "seconds": "seconds"}
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
    """Give a run's curves, thinned out: places in `x`, and the values there.

    A third and fourth list of a curve are the places and means of what was thinned out, by which
    it is smoothed.
    """
    limit = max(LEAST_POINTS, min(MOST_POINTS, POINTS_OF_ALL // num_runs))
    # Along each axis: the steps, then the evaluations, which stand beside the last step before.
    x = {axis: [_or_zero(entry.get(axis)) for entry in run.steps] for axis in AXES}
    x["seconds"] = [round(time, 2) for time in accumulate(x["seconds"])]
    numbers = [entry["step"] for entry in run.steps]
    for entry in run.evaluations:
        at = bisect_right(numbers, entry["step"])
        for places in x.values():
            places.append(places[at - 1] if at else 0)
        x["step"][-1] = entry["step"]
    behind, curves = len(numbers), {}
    for chart in charts:
        for name, entries, first in (
            (chart["key"], run.steps, 0),
            (chart["held_out"] or chart["key"], run.evaluations, behind),
        ):
            own = [(first + i, e[name]) for i, e in enumerate(entries) if name in e]
            if own:
                curves[name] = _thinned(own, limit)
    marks = [(i, kind) for i, kind in _marks(run, numbers) if i < behind]
    used = sorted(
        {i for curve in curves.values() for i in (*curve[0], *curve[2])} | {i for i, _ in marks}
    )
    place = {i: n for n, i in enumerate(used)}
    return {
        "x": {axis: [places[i] for i in used] for axis, places in x.items()},
        "curves": {
            name: [
                [place[i] for i in at],
                _short(values),
                [place[i] for i in middles],
                _short(means),
            ]
            for name, (at, values, middles, means) in curves.items()
        },
        "marks": [[place[i], kind] for i, kind in marks],
    }


def _thinned(
    own: Sequence[tuple[int, Any]], limit: int
) -> tuple[list[int], Numbers, list[int], list[float]]:
    """Keep the least, the greatest and the first missing value of every stretch of a curve."""
    values = [value if is_number(value) else None for _, value in own]
    if len(own) <= limit:
        return [i for i, _ in own], values, [], []
    width = 2 * len(own) / limit
    bounds = [round(k * width) for k in range(limit // 2 + 1)]
    chosen, middles, means = {0, len(own) - 1}, list[int](), list[float]()
    for begin, end in zip(bounds, [*bounds[1:-1], len(own)], strict=False):
        there = [(v, i) for i in range(begin, end) if (v := values[i]) is not None]
        chosen.update(next(([i] for i in range(begin, end) if values[i] is None), ()))
        if there:
            chosen |= {min(there)[1], max(there)[1]}
            middles.append(own[(begin + end) // 2][0])
            means.append(fmean(value for value, _ in there))
    at = sorted(chosen)
    return [own[i][0] for i in at], [values[i] for i in at], middles, means


def _marks(run: SavedRun, numbers: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Mark skipped steps, replays, changes of the batch, and checkpoints that are there."""
    before = None
    for i, entry in enumerate(run.steps):
        if "skipped" in entry:
            yield i, "skipped"
        if "replays" in entry:
            yield i, "replayed"
        if (size := entry.get("batch_size")) != before and i and before is not None:
            yield i, "batch"
        before = size
    for step in run.checkpoints:
        yield max(0, bisect_right(numbers, step) - 1), "checkpoint"


def _short(values: Numbers) -> list[float | None]:
    """Round to five digits, which is more than a screen shows."""
    return [None if value is None else float(f"{value:.5g}") for value in values]


def _or_zero(value: object) -> float:
    return round(value, 2) if is_number(value) else 0
