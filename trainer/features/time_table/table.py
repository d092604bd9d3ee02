"""Split the time of a run's steps into a table, and name the setting that shortens a long part.

Ranks meet twice a step in a small collective: before gradients are computed (`normalizer`), and
after (`agree`). Whoever comes last pays nothing but the collective; whatever the others spend there
beyond the shortest time ever seen is waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, final, get_args

from trainer.assemble.features import EndOfRun, Feature
from trainer.core.format import duration, percent, size
from trainer.core.rank_progress import InStep
from trainer.core.rows import Row, join_parts, row

MEETINGS: tuple[InStep, ...] = ("normalizer", "agree")
PARTS = ("data", "compute", "sync", "optimizer", "waiting", "rest")

# Share of a step beyond which a part is worth a line
TOO_MUCH = 0.1
# Of a whole run; nobody changes a setting for less
LEAST_S = 0.5

# What stands for a phase that was never entered
NEVER = {"seconds": 0.0, "times": 0, "least": 0.0}

TimeSplit = dict[str, float]
"""Seconds of one rank's mean step: by `PARTS`, and `late` (waiting for the data of others)."""

# Seconds of a step, the part, what it is, the setting
TimeLine = tuple[float, str, str, str]


@final
class TimeTable(Feature):
    """Says at the end where the time of steps went, and what shortens a part that is long."""

    def end_rows(self, end: EndOfRun) -> Sequence[Row]:
        """See the base class."""
        # Without a step there is no time to divide.
        if not end.opened.progress.taken:
            return [row(time=None, advice=[])]
        table = time_table(end.phases)
        texts = list[str]()
        for name, share in table["share"].items():
            if share:
                texts.append(f"{name} {percent(share)}")
        hints = advice(split_times(end.phases), table, end.plan)
        return [
            row("time", join_parts(*texts), group="computed", time=table),
            row("bottlenecks", "\n".join(hints) or None, group="below", advice=hints),
        ]


def split_times(spendings: Sequence[Mapping[str, Any]]) -> list[TimeSplit]:
    """Split the mean step of every rank, by what its `PhaseTimes` counted over the same steps."""
    tables = [{p: s["phases"].get(p, NEVER) for p in get_args(InStep)} for s in spendings]
    least = {phase: min(table[phase]["least"] for table in tables) for phase in MEETINGS}
    # What is beyond the shortest time of any rank is waiting for the last.
    travelled = min(table["gather"]["seconds"] + table["reduce"]["seconds"] for table in tables)
    splits = []
    for spending, table in zip(spendings, tables, strict=True):
        spent = {phase: entry["seconds"] for phase, entry in table.items()}
        met_before, met_after = (least[phase] * table[phase]["times"] for phase in MEETINGS)
        late, sent = spent["normalizer"] - met_before, spent["gather"] + spent["reduce"]
        parts = {
            "data": spent["data"],
            "compute": spent["compute"],
            "sync": travelled + met_before + met_after,
            "optimizer": spent["update"],
            "waiting": late + spent["agree"] - met_after + sent - travelled,
            "rest": spent["report"],
            "late": late,
        }
        # One rank has nobody to meet and nowhere to send to.
        if len(spendings) == 1:
            parts["rest"] += spent["normalizer"] + spent["agree"] + sent
            parts |= dict.fromkeys(("sync", "waiting", "late"), 0.0)
        splits.append({name: total / spending["steps"] for name, total in parts.items()})
    return splits


def time_table(spendings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Say where the time of a run's steps went: `time` of result.json, the mean over all ranks."""
    splits = split_times(spendings)
    parts = {name: fmean(each[name] for each in splits) for name in PARTS}
    whole = sum(parts.values())
    return {
        "steps": spendings[0]["steps"],
        "step_seconds": round(whole, 6),
        "seconds": {name: round(seconds, 6) for name, seconds in parts.items()},
        "share": {n: round(seconds / (whole or 1.0), 4) for n, seconds in parts.items()},
        "waiting_by_rank": [round(each["waiting"], 6) for each in splits],
    }


def advice(
    splits: Sequence[TimeSplit], time: Mapping[str, Any], plan: Mapping[str, Any]
) -> list[str]:
    """Name what took more than a tenth of a step, with its figure and a setting, largest first."""
    lines = [_data(splits, plan), _sync(time, plan)]
    # One rank waits for nobody.
    if len(splits) > 1:
        lines.append(_waiting(splits, plan))
    found = []
    for seconds, part, what, remedy in sorted(lines, reverse=True):
        share = seconds / (time["step_seconds"] or 1.0)
        if share > TOO_MUCH and seconds * time["steps"] > LEAST_S:
            took = f"{percent(share)} of a step ({duration(seconds)})"
            found.append(f"{part}: {took} {what}: {remedy}")
    return found


def _data(splits: Sequence[TimeSplit], plan: Mapping[str, Any]) -> TimeLine:
    workers, what = plan["num_workers"], "is waiting for samples"
    if len(splits) > 1:
        longest, rank = max((each["data"], rank) for rank, each in enumerate(splits))
        what += f", {duration(longest)} of them on rank {rank}"
    remedy = f"num_workers={2 * workers or 2} loads them during training (now {workers})"
    return fmean(each["data"] + each["late"] for each in splits), "data", what, remedy


def _waiting(splits: Sequence[TimeSplit], plan: Mapping[str, Any]) -> TimeLine:
    waits = [each["waiting"] - each["late"] for each in splits]
    # Whoever waits least comes last to every meeting.
    slowest = waits.index(min(waits))
    computed = [each["compute"] for each in splits]
    slow = computed.pop(slowest)
    what = f"ranks wait, mostly for rank {slowest}, which computes "
    what += f"{duration(slow)} where others take {duration(fmean(computed))}"
    remedy = "check what else runs on its machine, or raise batch.global to balance the work"
    if plan["lockstep"]:
        remedy = "sync=deferred lets ranks take different numbers of micro-batches"
    elif not plan["candidates"]:  # no cap was tuned
        remedy = "accum=auto balances the work of the ranks"
    return fmean(waits), "waiting", what, remedy


def _sync(time: Mapping[str, Any], plan: Mapping[str, Any]) -> TimeLine:
    sent = dict[str, str]()
    for each in plan["sync_table"]:
        if each["fits"] or each["policy"] == plan["sync"]:
            sent[each["policy"]] = size(round(each["within"] + each["across"]))
    what, remedy = "is traffic", "a larger batch.global sends gradients less often"
    if plan["sync"] in sent:
        what += f", {sent[plan['sync']]} sent"
    if plan["lockstep"] and "deferred" in sent:
        remedy = f"sync=deferred sends {sent['deferred']}, in one reduction a step"
    return time["seconds"]["sync"], "sync", what, remedy
