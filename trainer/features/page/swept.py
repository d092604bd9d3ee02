"""Set the metric of runs against each setting that differs, for page.js to draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from trainer.config.metric_mode import title_of
from trainer.features.page.comparison import Comparison

_LEAST_POINTS = 3
_MOST_CHARTS = 6

Point = tuple[int, str, float]
"""A run, its value of the setting, and its metric."""


def swept(compared: Comparison) -> list[dict[str, Any]]:
    """Give a chart for each setting that a sweep goes over, or that changes the step."""
    charts, title = list[dict[str, Any]](), title_of(compared.metric)
    for key in compared.keys:
        points, words = _points(compared, key)
        # A sweep types it for every run.
        is_swept = all(key in run.typed_keys for run in compared.runs)
        is_asked = is_swept or (key in compared.typed and compared.changes_step(key))
        if is_asked and len(words) > 1 and len(points) >= _LEAST_POINTS:
            charts.append({"key": key, "title": title, **_placed(points, words)})
    return charts[:_MOST_CHARTS]


def _points(compared: Comparison, key: str) -> tuple[list[Point], list[str]]:
    """Give the runs that have a setting and the metric, and the values of the setting."""
    points, words = list[Point](), set[str]()
    for n in compared.groups[0].runs:
        value, word = compared.runs[n].last(compared.metric), compared.word(n, key)
        if value is not None and word:
            points.append((n, word, float(f"{value:.5g}")))
            words.add(word)
    return points, sorted(words)


def _placed(points: Sequence[Point], words: Sequence[str]) -> dict[str, Any]:
    """Give points as run, place along the axis and metric, and the words of an axis of words."""
    places, named = dict[str, float](), list[str]()
    with suppress(ValueError):
        places = dict(zip(words, map(float, words), strict=True))
    if not places or not all(map(math.isfinite, places.values())):
        named, places = [*words], dict(zip(words, count(), strict=False))
    return {"points": [(n, places[word], y) for n, word, y in points], "words": named}
