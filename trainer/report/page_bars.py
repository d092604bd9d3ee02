"""Draw what a run planned and spent as bars: micro-batches, memory, time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from trainer.core.format import duration, number, percent, plural, size
from trainer.report.page_html import Html, card, el, table
from trainer.report.page_runs import SavedRun, as_mapping, numbers_of

MOST_RANKS, MOST_BLOCKS = 8, 160  # of the plan that are drawn
_TIMES = {
    "data": "waiting for samples",
    "compute": "forward and backward",
    "sync": "traffic between ranks",
    "optimizer": "update of the weights",
    "waiting": "waiting for other ranks",
    "rest": "records and the rest",
}


def plan(run: SavedRun) -> Html:
    """Draw the micro-batches of step 1 as blocks, rank by rank, as wide as they are computed."""
    found = run.plan.get("shapes")
    shapes = [s for s in found if _is_shape(s)] if isinstance(found, list) else []
    ranks: dict[int, list[Mapping[str, Any]]] = {}
    for shape in shapes:
        ranks.setdefault(shape["rank"], []).append(shape)
    if not ranks:
        return Html("")
    widest = max(sum(map(_positions, own)) for own in ranks.values()) or 1
    rows = [
        el(
            "div",
            el("span", f"rank {rank}"),
            el("div", _blocks(own, widest, run.noun), class_="blocks"),
            class_="rank",
        )
        for rank, own in islice(ranks.items(), MOST_RANKS)
    ]
    left = len(ranks) - MOST_RANKS
    record, longest = numbers_of(run.plan), max(map(len, ranks.values()))
    padding, cap, batch = (record.get(n) for n in ("padding", "max_tokens", "global_batch"))
    facts = [
        f"{number(batch)} {run.plan.get('unit')} a step" if batch else "",
        plural(len(shapes), "micro-batch"),
        plural(longest, "accumulation step"),
        "" if padding is None else f"{percent(padding)} padding",
        "" if cap is None else f"cap {number(cap)} {run.noun}s",
    ]
    meanings = (("real", f"{run.noun}s"), ("pad", "padding"), ("idle", "nothing to compute"))
    is_even = all(sum(map(_positions, own)) == widest for own in ranks.values())
    key = el(
        "p",
        (
            el("span", el("i", class_=f"key {kind}"), text)
            for kind, text in meanings[: 2 if is_even else 3]
        ),
        class_="legend",
    )
    more = el("p", f"and {plural(left, 'rank')} more", class_="note") if left > 0 else None
    return card(
        "The plan: micro-batches of step 1", rows, more, key, note=" · ".join(filter(None, facts))
    )


def _blocks(own: Sequence[Mapping[str, Any]], widest: int, noun: str) -> Iterator[Html]:
    used = 0
    for shape in own[:MOST_BLOCKS]:
        positions = _positions(shape)
        used += positions
        tokens = numbers_of(shape).get("num_tokens", positions)
        share = tokens / positions if positions else 0.0
        label = (
            "packed" if shape.get("packed") else f"{shape['num_samples']} \u00d7 {shape['length']}"
        )
        samples, length = plural(shape["num_samples"], "sample"), plural(shape["length"], noun)
        room = f"{number(tokens)} {noun}s in {number(positions)} positions"
        text = f"{samples} of up to {length}: {room}"
        real = el("i", style=f"width:{100 * share:.1f}%")
        yield el("div", real, el("em", label), title=text, style=f"flex:{positions} 0 0")
    if used < widest:
        yield el("div", class_="idle", style=f"flex:{widest - used} 0 0")


def _positions(shape: Mapping[str, Any]) -> int:
    return int(shape["length"] * (1 if shape.get("packed") else shape["num_samples"]))


def _is_shape(shape: object) -> bool:
    names = "rank", "num_samples", "length"
    return isinstance(shape, dict) and all(type(shape.get(name)) is int for name in names)


def memory(run: SavedRun) -> Html:
    """Set predicted, measured and allowed memory side by side."""
    record, measured = numbers_of(run.plan), run.peak_bytes
    predicted, limit = (record.get(n) for n in ("predicted_peak_bytes", "memory_limit_bytes"))
    whole = max(predicted or 0.0, measured or 0.0)
    if not whole:
        return Html("")
    # Else the other bars would be slivers.
    shown_limit = limit if limit is not None and limit <= 4 * whole else None
    whole = max(whole, shown_limit or 0.0)
    parts = {n: v for n, v in numbers_of(run.plan.get("memory_parts")).items() if v}
    bars = [
        _bar("predicted", predicted, whole, parts),
        _bar("measured", measured, whole),
        _bar("limit", shown_limit, whole),
    ]
    share = f", of which {percent(predicted / limit)} is predicted" if predicted and limit else ""
    colors = [f"p{n % 8}" for n in range(len(parts))]
    key = [
        el("span", el("i", class_=f"key {color}"), f"{part} {size(each)}")
        for color, (part, each) in zip(colors, parts.items(), strict=True)
    ]
    why = "On a CPU, measured is the whole process: Python and PyTorch too."
    note = el("p", why, class_="note") if measured and run.plan.get("device") == "cpu" else None
    legend = el("p", key, class_="legend")
    return card("Memory", bars, legend, note, note=f"limit {size(limit)}{share}" if limit else None)


def _bar(
    name: str, value: float | None, whole: float, parts: Mapping[str, float] | None = None
) -> Html | None:
    if not value:
        return None
    pieces = (
        el(
            "i",
            class_=f"p{n % 8}" if parts else None,
            title=f"{part}: {size(each)}",
            style=_width(each / whole),
        )
        for n, (part, each) in enumerate((parts or {name: value}).items())
    )
    bar = el("div", pieces, class_="bar")
    return el("div", el("span", name), bar, el("b", size(value)), class_="row")


def _width(share: float) -> str:
    return f"width:{100 * share:.2f}%"


def times(run: SavedRun) -> Html:
    """Show where the time of a step went."""
    record = as_mapping(run.result.get("time"))
    seconds, whole = numbers_of(record.get("seconds")), numbers_of(record)
    shares = {name: share for name, share in numbers_of(record.get("share")).items() if share}
    if not shares:
        return Html("")
    colors = dict(zip(shares, (f"p{n % 8}" for n in range(len(shares))), strict=True))
    pieces = (
        el("i", class_=colors[name], title=f"{name}: {percent(share)}", style=_width(share))
        for name, share in shares.items()
    )
    rows = [
        (
            el("i", class_=f"key {colors[name]}"),
            name,
            _TIMES.get(name, ""),
            duration(seconds.get(name)),
            percent(share),
        )
        for name, share in shares.items()
    ]
    cells = table(("", "part", "", "a step", "share"), rows, "numbers times")
    steps = plural(whole.get("steps", 0), "step")
    note = f"{duration(whole.get('step_seconds'))} a step, mean of {steps}"
    return card("Where time went", el("div", pieces, class_="bar tall"), cells, note=note)
