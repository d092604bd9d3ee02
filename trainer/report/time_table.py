"""Split the time of a run's steps into a table, and name the setting that shortens a long part.

Ranks meet twice a step in a small collective: before gradients are computed (`normalizer`), and
after (`agree`). Whoever comes last pays nothing but the collective; whatever the others spend there
beyond the shortest time ever seen is waiting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from trainer.core.format import duration, percent, size
from trainer.core.rank_progress import Phase

MEETINGS: tuple[Phase, ...] = ("normalizer", "agree")
TRANSFERS: tuple[Phase, ...] = ("gather", "reduce")
PARTS = ("data", "compute", "sync", "optimizer", "waiting", "rest")

TOO_MUCH = 0.1  # share of a step beyond which a part is worth a line
LEAST_S = 0.5  # of a whole run; nobody changes a setting for less

NEVER = {"seconds": 0.0, "times": 0, "least": 0.0}  # of a phase that was never entered

Split = dict[str, float]
"""Seconds of one rank's mean step: by `PARTS`, and `late` (waiting for the data of others),
`in_flight` (a collective of parameters or gradients travelled), `unhidden` (and nothing else was
done meanwhile)."""

Line = tuple[float, str, str, str]  # seconds of a step, the part, what it is, the setting


def split(spendings: Sequence[Mapping[str, Any]]) -> list[Split]:
    """Split the mean step of every rank; `PhaseTimes` of all ranks counted the same steps."""

    def seconds(spending: Mapping[str, Any], *phases: Phase) -> float:
        return math.fsum(spending["phases"].get(phase, NEVER)["seconds"] for phase in phases)

    def met(spending: Mapping[str, Any], phase: Phase) -> float:
        shortest = min(float(s["phases"].get(phase, NEVER)["least"]) for s in spendings)
        return shortest * float(spending["phases"].get(phase, NEVER)["times"])

    travelled = min(seconds(spending, *TRANSFERS) for spending in spendings)
    splits = []
    for spending in spendings:
        met_before, met_after = (met(spending, phase) for phase in MEETINGS)
        late = seconds(spending, "normalizer") - met_before
        behind = seconds(spending, *TRANSFERS) - travelled
        parts = {
            "data": seconds(spending, "data"),
            "compute": seconds(spending, "compute"),
            "sync": travelled + met_before + met_after,
            "optimizer": seconds(spending, "update"),
            "waiting": late + seconds(spending, "agree") - met_after + behind,
            "rest": seconds(spending, "report"),
            "late": late,
            "in_flight": spending["in_flight"],
            "unhidden": spending["waited"],
        }
        if len(spendings) == 1:  # nobody to meet, nowhere to send to
            parts["rest"] += seconds(spending, *MEETINGS, *TRANSFERS)
            parts |= dict.fromkeys(("sync", "waiting", "late", "in_flight", "unhidden"), 0.0)
        splits.append({name: total / spending["steps"] for name, total in parts.items()})
    return splits


def time_table(spendings: Sequence[Mapping[str, Any]], overlap: str | None) -> dict[str, Any]:
    """Say where the time of a run's steps went: `time` of result.json, the mean over all ranks.

    `overlap` says why as much as was measured of the communication is hidden; None on one rank.
    """
    splits = split(spendings)
    parts = {name: fmean(each[name] for each in splits) for name in PARTS}
    whole, in_flight = sum(parts.values()), fmean(each["in_flight"] for each in splits)
    hidden = 1 - fmean(each["unhidden"] for each in splits) / in_flight if in_flight else None
    return {
        "steps": spendings[0]["steps"],
        "step_seconds": round(whole, 6),
        "seconds": {name: round(seconds, 6) for name, seconds in parts.items()},
        "share": {n: round(seconds / (whole or 1.0), 4) for n, seconds in parts.items()},
        "in_flight_seconds": round(in_flight, 6),
        "hidden_share": None if hidden is None else round(max(0.0, hidden), 4),
        "overlap": overlap,
        "waiting_by_rank": [round(each["waiting"], 6) for each in splits],
    }


def advice(
    splits: Sequence[Split], time: Mapping[str, Any], plan: Mapping[str, Any], cut: str
) -> list[str]:
    """Name what took more than a tenth of a step, with its figure and a setting, the largest first.

    `time` is of result.json, `plan` of plan.json, `cut` the option of `accum`.
    """
    lines = [_data(splits, plan), _sync(time, plan)]
    lines += [_waiting(splits, plan, cut)] if len(splits) > 1 else []
    found = []
    for seconds, part, what, remedy in sorted(lines, reverse=True):
        share = seconds / (time["step_seconds"] or 1.0)
        if share > TOO_MUCH and seconds * time["steps"] > LEAST_S:
            took = f"{percent(share)} of a step ({duration(seconds)})"
            found.append(f"{part}: {took} {what}: {remedy}")
    return found


def _data(splits: Sequence[Split], plan: Mapping[str, Any]) -> Line:
    workers, whose = plan["num_workers"], ""
    if len(splits) > 1:
        longest, rank = max((each["data"], rank) for rank, each in enumerate(splits))
        whose = f", {duration(longest)} of them on rank {rank}"
    return (
        fmean(each["data"] + each["late"] for each in splits),
        "data",
        f"is waiting for samples{whose}",
        f"num_workers={2 * workers or 2} loads them beside the training (now {workers})",
    )


def _waiting(splits: Sequence[Split], plan: Mapping[str, Any], cut: str) -> Line:
    waits = [each["waiting"] - each["late"] for each in splits]
    slowest = waits.index(min(waits))
    others = fmean(each["compute"] for rank, each in enumerate(splits) if rank != slowest)
    remedy = "look what else runs on its machine, or raise batch.global to even the work out"
    if plan["sync"] != "deferred":
        remedy = "sync=deferred lets ranks take different numbers of micro-batches"
    elif cut != "auto":
        remedy = "accum=auto deals samples out by what they cost"
    return (
        fmean(waits),
        "waiting",
        f"ranks wait, mostly for rank {slowest}, which computes "
        f"{duration(splits[slowest]['compute'])} where others take {duration(others)}",
        remedy,
    )


def _sync(time: Mapping[str, Any], plan: Mapping[str, Any]) -> Line:
    rows = {row["policy"]: row for row in plan["sync_table"]}
    row, deferred = rows.get(plan["sync"]), rows.get("deferred")
    what, remedy = "is traffic", "a larger batch.global sends gradients less often"
    if row is not None:
        what += f", {size(round(row['within'] + row['across']))} sent"
        what += f", predicted {duration(row['seconds'])}" if row["seconds"] else ""
    if time["hidden_share"] is not None:
        what += f", {percent(time['hidden_share'])} of its time hidden"
    if deferred is not None and row is not deferred and deferred["fits"]:
        sent = size(round(deferred["within"] + deferred["across"]))
        remedy = f"sync=deferred sends {sent}, in one reduction a step"
    return time["seconds"]["sync"], "sync", what, remedy
