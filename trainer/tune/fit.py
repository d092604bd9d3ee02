"""Fit sums of known terms with coefficients that cannot be negative: times and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import numpy as np

from trainer.plan.cut import FloatArray
from trainer.plan.memory import Shape


def terms(shape: Shape) -> tuple[float, float, float]:
    """Give what time and memory of a micro-batch grow with: its positions, 1, attention's pairs.

    Positions come first: one shape alone cannot tell terms apart, and no position comes for free.
    """
    positions = float(shape.num_samples * shape.length)
    return positions, 1.0, positions * shape.length


def fit_shapes(measured: Mapping[Shape, float]) -> FloatArray:
    """Fit a coefficient of each term to what was measured at a few shapes."""
    rows = np.array([terms(shape) for shape in measured])
    return non_negative_fit(rows, np.array([*measured.values()], dtype=np.float64))


def non_negative_fit(rows: FloatArray, values: FloatArray) -> FloatArray:
    """Find the coefficients, none negative, with the least squared relative error.

    Solved exactly: the best of the least-squares solutions over every subset of the columns
    whose coefficients come out non-negative (Lawson and Hanson 1974, ch. 23, has the condition).
    Of equally good ones that with fewer columns counts, then that with earlier ones. Meant for a
    handful of columns.

    Args:
        rows: `(observations, columns)`, not negative.
        values: `(observations,)`, positive.
    """
    relative, ones = rows / values[:, None], np.ones(len(values))
    # Columns differ by many orders of magnitude; at scale one no small one drowns.
    scale = np.maximum(np.abs(relative).max(axis=0), np.finfo(np.float64).tiny)
    scaled = relative / scale
    best, least = np.zeros(rows.shape[1]), float(len(values))
    for size in range(1, rows.shape[1] + 1):
        for subset in combinations(range(rows.shape[1]), size):
            found = np.linalg.lstsq(scaled[:, subset], ones, rcond=None)[0]
            error = float(np.square(scaled[:, subset] @ found - ones).sum())
            # An equally good fit with fewer terms stays: two lengths cannot tell three apart.
            if (found >= 0).all() and error < least - 1e-12:
                least = error
                best = np.zeros(rows.shape[1])
                best[list(subset)] = found
    coefficients: FloatArray = best / scale
    return coefficients
