"""Measure what a run planned and spent for its page's bars: micro-batches, memory, time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from trainer.core.format import duration, number, percent, plural, size
from trainer.features.page.saved_run import SavedRun, as_mapping, numbers_of

MOST_RANKS, MOST_BLOCKS = 8, 160  # of the plan that are drawn
_TIMES = {
    "data": "waiting for samples",
    "compute": "forward and backward",
    "sync": "traffic between ranks",
    "optimizer": "update of the weights",
    "waiting": "waiting for other ranks",
    "rest": "records and the rest",
}

PlanShape = Mapping[str, Any]


def plan(run: SavedRun) -> dict[str, Any]:
    """Measure the micro-batches of step 1, rank by rank, as wide as they are computed."""
    found = run.plan.get("shapes")
    ranks: dict[int, list[PlanShape]] = {}
    for shape in found if isinstance(found, list) else []:
        names = "rank", "num_samples", "length"
        if isinstance(shape, dict) and all(type(shape.get(name)) is int for name in names):
            ranks.setdefault(shape["rank"], []).append(shape)
    if not ranks:
        return {}
    widest = max(sum(map(_positions, own)) for own in ranks.values()) or 1
    record, longest = numbers_of(run.plan), max(map(len, ranks.values()))
    padding, cap, batch = (record.get(n) for n in ("padding", "max_tokens", "global_batch"))
    facts = [
        f"{number(batch)} {run.plan.get('unit')} a step" if batch else "",
        plural(sum(map(len, ranks.values())), "micro-batch"),
        plural(longest, "accumulation step"),
        "" if padding is None else f"{percent(padding)} padding",
        "" if cap is None else f"cap {number(cap)} {run.noun}s",
    ]
    return {
        "note": " · ".join(filter(None, facts)),
        "left": len(ranks) - MOST_RANKS,
        "ranks": [
            (f"rank {rank}", _blocks(own, run.noun), widest - sum(map(_positions, own)))
            for rank, own in islice(ranks.items(), MOST_RANKS)
        ],
    }


def _blocks(own: Sequence[PlanShape], noun: str) -> list[dict[str, object]]:
    blocks = list[dict[str, object]]()
    for shape in own[:MOST_BLOCKS]:
        positions, count, length = _positions(shape), shape["num_samples"], shape["length"]
        tokens = numbers_of(shape).get("num_tokens", positions)
        room = f"{number(tokens)} {noun}s in {number(positions)} positions"
        blocks.append(
            {
                "positions": positions,
                "share": 100 * tokens / positions if positions else 0,
                "label": "packed" if shape.get("packed") else f"{count} \u00d7 {length}",
                "text": f"{plural(count, 'sample')} of up to {plural(length, noun)}: {room}",
            }
        )
    return blocks


def _positions(shape: PlanShape) -> int:
    return int(shape["length"] * (1 if shape.get("packed") else shape["num_samples"]))


def memory(run: SavedRun) -> dict[str, Any]:
    """Set predicted, measured and allowed memory side by side."""
    record, measured = numbers_of(run.plan), run.peak_bytes
    predicted, limit = (record.get(n) for n in ("predicted_peak_bytes", "memory_limit_bytes"))
    whole = max(predicted or 0.0, measured or 0.0)
    if not whole:
        return {}
    # Else the other bars would be slivers.
    shown_limit = limit if limit is not None and limit <= 4 * whole else None
    whole = max(whole, shown_limit or 0.0)
    parts = {n: v for n, v in numbers_of(run.plan.get("memory_parts")).items() if v}
    pieces = [(name, size(each), each / whole) for name, each in parts.items()]
    bars = {"predicted": predicted, "measured": measured, "limit": shown_limit}
    share = f", of which {percent(predicted / limit)} is predicted" if predicted and limit else ""
    return {
        "note": f"limit {size(limit)}{share}" if limit else "",
        "parts": pieces,
        "bars": [
            (
                name,
                (name == "predicted" and pieces) or [(name, size(value), value / whole)],
                size(value),
            )
            for name, value in bars.items()
            if value
        ],
    }


def times(run: SavedRun) -> dict[str, Any]:
    """Say where the time of a step went."""
    record = as_mapping(run.result.get("time"))
    seconds, whole = numbers_of(record.get("seconds")), numbers_of(record)
    shares = {name: share for name, share in numbers_of(record.get("share")).items() if share}
    if not shares:
        return {}
    steps = plural(whole.get("steps", 0), "step")
    return {
        "note": f"{duration(whole.get('step_seconds'))} a step, mean of {steps}",
        "shares": [(name, percent(share), share) for name, share in shares.items()],
        "rows": [
            (name, _TIMES.get(name, ""), duration(seconds.get(name)), percent(share))
            for name, share in shares.items()
        ],
    }
