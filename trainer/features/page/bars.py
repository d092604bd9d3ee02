"""Measure what a run planned and spent for its page's bars: micro-batches, memory, time."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from trainer.core.format import duration, number, percent, plural, size
from trainer.core.rows import join_parts
from trainer.features.page.saved_run import SavedRun, as_list, as_mapping, numbers_of
from trainer.report.journal import is_number

Piece = tuple[str, str, float]
"""A part of a bar: its name, how much it is in words, and its share of the bar."""
_LEAST_RUNS = 2  # that are compared
MOST_RANKS, MOST_BLOCKS = 8, 160  # of the plan that are drawn
_TIMES = {
    "data": "waiting for samples",
    "compute": "forward and backward",
    "sync": "traffic between ranks",
    "optimizer": "update of the weights",
    "waiting": "waiting for other ranks",
    "rest": "records and the rest",
}

PlanBlock = dict[str, Any]
"""A micro-batch as page.html draws it: its `positions`, what `share` is real, `label`, `text`."""


def plan(run: SavedRun) -> dict[str, Any]:
    """Measure the micro-batches of step 1, rank by rank, as wide as they are computed."""
    ranks: dict[int, list[PlanBlock]] = {}
    for shape in map(as_mapping, as_list(run.plan.get("shapes"))):
        if all(type(shape.get(name)) is int for name in ("rank", "num_samples", "length")):
            ranks.setdefault(shape["rank"], []).append(_block(shape, run.noun))
    if not ranks:
        return {}
    widths, counts = dict[int, int](), list[int]()
    for rank, own in ranks.items():
        widths[rank] = sum(block["positions"] for block in own)
        counts.append(len(own))
    facts = [plural(sum(counts), "micro-batch"), plural(max(counts), "accumulation step")]
    record = numbers_of(run.plan)
    if batch := record.get("global_batch"):
        facts.insert(0, f"{number(batch)} {run.plan.get('unit')} a step")
    if (padding := record.get("padding")) is not None:
        facts.append(f"{percent(padding)} padding")
    if (most := record.get("max_tokens")) is not None:
        noun = "padded token" if run.noun == "token" else run.noun
        facts.append(f"at most {number(most)} {noun}s in each")
    drawn = list[tuple[str, list[PlanBlock], int]]()
    for rank, own in islice(ranks.items(), MOST_RANKS):
        # Positions for which it waits until the widest is done
        idle = (max(widths.values()) or 1) - widths[rank]
        drawn.append((f"rank {rank}", own[:MOST_BLOCKS], idle))
    return {"note": " · ".join(facts), "left": len(ranks) - MOST_RANKS, "ranks": drawn}


def _block(shape: Mapping[str, Any], noun: str) -> PlanBlock:
    """Measure a micro-batch, and say what is in it."""
    count, length = shape["num_samples"], shape["length"]
    positions, label = count * length, f"{count} \u00d7 {length}"
    # Packed samples lie one behind the other in a single row.
    if shape.get("packed"):
        positions, label = length, "packed"
    tokens = numbers_of(shape).get("num_tokens", positions)
    room = f"{number(tokens)} {noun}s in {number(positions)} positions"
    text = f"{plural(count, 'sample')} of up to {plural(length, noun)}: {room}"
    share = 100 * tokens / max(1, positions)
    return {"positions": positions, "share": share, "label": label, "text": text}


def memory(run: SavedRun) -> dict[str, Any]:
    """Set predicted, measured and allowed memory side by side."""
    record, measured = numbers_of(run.plan), run.peak_bytes()
    # On a CPU the peak is of the whole process, libraries and data included.
    figures = numbers_of(as_mapping(run.result.get("predicted")).get("this_run"))
    measured = figures.get("measured_bytes") or measured
    predicted, limit = record.get("predicted_peak_bytes"), record.get("memory_limit_bytes")
    whole = max(predicted or 0.0, measured or 0.0)
    if not whole:
        return {}
    bars, note = {"predicted": predicted, "measured": measured}, ""
    if limit:
        note = f"limit {size(limit)}"
        if predicted:
            note += f", of which {percent(predicted / limit)} is predicted"
        # Beside a longer one the other bars would be slivers.
        if limit <= 4 * whole:
            bars["limit"], whole = limit, max(whole, limit)
    note = join_parts(note, _here(run, "bytes")) or ""
    pieces, drawn = list[Piece](), list[tuple[str, list[Piece], str]]()
    for name, value in numbers_of(run.plan.get("memory_parts")).items():
        if value:
            pieces.append((name, size(value), value / whole))
    for name, total in bars.items():
        if total:
            own = [(name, size(total), total / whole)]
            if pieces and name == "predicted":
                own = pieces
            drawn.append((name, own, size(total)))
    return {"note": note, "parts": pieces, "bars": drawn}


def times(run: SavedRun) -> dict[str, Any]:
    """Say where the time of a step went."""
    record = as_mapping(run.result.get("time"))
    seconds, whole = numbers_of(record.get("seconds")), numbers_of(record)
    shares, rows = list[Piece](), list[tuple[str, ...]]()
    for name, share in numbers_of(record.get("share")).items():
        if share:
            shares.append((name, percent(share), share))
            what = _TIMES.get(name, "")
            rows.append((name, what, duration(seconds.get(name)), percent(share)))
    if not shares:
        return {}
    steps = plural(whole.get("steps", 0), "step")
    note = f"{duration(whole.get('step_seconds'))} a step, mean of {steps}"
    own = numbers_of(as_mapping(run.result.get("predicted")).get("this_run"))
    if predicted := own.get("predicted_seconds"):
        note += f", predicted {duration(predicted)}"
    note = join_parts(note, _here(run, "seconds")) or ""
    return {"note": note, "shares": shares, "rows": rows}


def _here(run: SavedRun, name: str) -> str:
    """Say what runs on its machine took of what was predicted, of `bytes` or `seconds`."""
    predicted = as_mapping(run.result.get("predicted"))
    shares = [*filter(is_number, as_list(predicted.get(f"{name}_over_predicted")))]
    if len(shares) < _LEAST_RUNS:
        return ""
    least, most = percent(min(shares)), percent(max(shares))
    return f"{len(shares)} runs on this machine took {least} to {most} of what was predicted"
