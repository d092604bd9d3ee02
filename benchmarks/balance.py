"""How well ranks are kept busy: simulated time of planned steps on 8, 64 and 512 ranks.

    python benchmarks/balance.py [ranks=8,64,512] [per_rank=32] [cap=8192] [batches=12]
                                 [data=lognormal|stdlib] [median=470] [sigma=1.0] [max_length=2048]
                                 [json=outputs/benchmarks/balance.json]
    python benchmarks/balance.py planning=8192 [ranks=1,8,64,512] ...

Nothing is trained: the time of a micro-batch follows from its shape by the cost model, the lengths
are real (`data=stdlib`) or drawn from a lognormal mix whose tenth part is eight times as long.
`busy` is the time the ranks need for the tokens alone, evenly shared, over the time of the slowest
rank; in lockstep, where every micro-batch contains a collective, each slot waits for its slowest
rank. Medians over the batches.

With `planning` nothing is compared: it tells the time that planning so many lengths takes, padded,
packed and in lockstep. That is the time of the calling thread, which other programs move little.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from common import FOLDER, write_results

from trainer.plan.cut import Cost, IntArray, Layout, Plan
from trainer.plan.cuts import Budget, Fixed
from trainer.plan.partition import cut_sorted, deal_by_cost, deal_in_snake, even_starts, split_at

COST = Cost(fixed=33.0, quadratic=0.00094)
"""Measured on two CPU cores for a model of width 256."""

Planner = Callable[[IntArray, Layout, "Settings"], Plan]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is simulated; each field is a `key=value` of the command line."""

    ranks: str = "8,64,512"
    per_rank: int = 32
    cap: int = 8192
    batches: int = 12
    data: str = "lognormal"
    median: float = 470.0
    sigma: float = 1.0
    max_length: int = 2048
    planning: int = 0
    json: str = str(FOLDER / "balance.json")

    @property
    def fixed_micro(self) -> int:
        """Largest fixed micro-batch that is sure to stay under the cap."""
        return max(1, self.cap // self.max_length)


def contiguous_fixed(lengths: IntArray, layout: Layout, settings: Settings) -> Plan:
    """Consecutive samples to each rank, equal counts in each micro-batch."""
    return Fixed(micro=settings.fixed_micro).cut(lengths, layout)


def strided_fixed(lengths: IntArray, layout: Layout, settings: Settings) -> Plan:
    """Every W-th sample to a rank (DistributedSampler), equal counts in each micro-batch."""
    world_size = layout.world_size
    strided = np.concatenate([np.arange(r, len(lengths), world_size) for r in range(world_size)])
    plan = contiguous_fixed(lengths[strided], layout, settings)
    ranks = tuple(tuple(strided[ids] for ids in slots) for slots in plan.ranks)
    return replace(plan, ranks=ranks, lengths=lengths)


def sorted_groups(lengths: IntArray, layout: Layout, settings: Settings) -> Plan:
    """Sorted, W times k groups of equal tokens, as many groups as fixed micro-batches have.

    After Hugging Face's `batch_rebalance`: the number of groups is given, their size is not
    bounded.
    """
    order = np.argsort(-lengths, kind="stable")
    per_rank = -(-settings.per_rank // settings.fixed_micro)
    groups = per_rank * layout.world_size
    reached = np.cumsum(lengths[order]) - lengths[order]
    wanted = np.arange(groups) * lengths.sum() / groups
    starts = np.searchsorted(reached, wanted)
    # No group may be empty.
    starts = np.maximum.accumulate(starts - np.arange(groups)) + np.arange(groups)
    starts = np.minimum(starts, len(order) - groups + np.arange(groups))
    pieces = split_at(order, starts)
    return _plan(
        lengths, [[pieces[i] for i in share] for share in deal_in_snake(groups, layout.world_size)]
    )


def contiguous_planned(lengths: IntArray, layout: Layout, settings: Settings) -> Plan:
    """Consecutive samples to each rank, which cuts its own at the least cost."""
    shares = split_at(np.arange(len(lengths)), even_starts(len(lengths), layout.world_size))
    return _cut_alone(lengths, list(shares), layout, settings)


def dealt_by_cost(lengths: IntArray, layout: Layout, settings: Settings) -> Plan:
    """Our plan for ranks that meet at the end; in lockstep, counts filled with empty slots."""
    order = np.argsort(-lengths, kind="stable")
    shares = deal_by_cost(layout.cost.per_sample(lengths[order]), layout.world_size)
    return _cut_alone(lengths, [order[share] for share in shares], layout, settings)


def ours(lengths: IntArray, layout: Layout, settings: Settings) -> Plan:
    """What `accum=budget` does."""
    return Budget(max_tokens=settings.cap).cut(lengths, layout)


PLANNERS: dict[str, Planner] = {
    "contiguous ranks, fixed micro-batches": contiguous_fixed,
    "strided ranks, fixed micro-batches": strided_fixed,
    "sorted, a given number of groups (HF-like)": sorted_groups,
    "contiguous ranks, each planned alone": contiguous_planned,
    "dealt by cost, each planned alone": dealt_by_cost,
    "ours": ours,
}


def _cut_alone(
    lengths: IntArray, shares: list[IntArray], layout: Layout, settings: Settings
) -> Plan:
    ranks = []
    for share in shares:
        mine = share[np.argsort(-lengths[share], kind="stable")]
        starts = cut_sorted(lengths[mine], settings.cap, layout.cost, len(mine))
        ranks.append(list(split_at(mine, starts)))
    return _plan(lengths, ranks, fill=layout.lockstep)


def _plan(lengths: IntArray, ranks: list[list[IntArray]], *, fill: bool = False) -> Plan:
    busiest = max(map(len, ranks)) if fill else 0
    empty = np.zeros(0, dtype=np.int64)
    filled = [slots + [empty] * (busiest - len(slots)) for slots in ranks]
    return Plan(
        ranks=tuple(map(tuple, filled)),
        lengths=lengths,
        padded_lengths=tuple(
            tuple(int(lengths[ids].max()) if len(ids) else 0 for ids in slots) for slots in filled
        ),
    )


def draw_lengths(settings: Settings) -> IntArray:
    """Give the lengths of a data set, `(num_samples,)`."""
    if settings.data == "stdlib":
        from trainer.features.stdlib.stdlib import StdlibText  # noqa: PLC0415 - torch, only where it is asked for

        return np.asarray(
            StdlibText(max_length=settings.max_length, overlong="cut").facts().lengths
        )
    random = np.random.default_rng(0)
    scale = np.where(random.random(50_000) < 0.1, 8.0, 1.0) * settings.median
    lengths = np.ceil(scale * random.lognormal(0.0, settings.sigma, len(scale)))
    return np.clip(lengths, 1, settings.max_length).astype(np.int64)


def measure(
    planner: Planner, batches: list[IntArray], layout: Layout, settings: Settings
) -> dict[str, float]:
    """Plan every batch; give the median of each number."""
    rows = []
    for lengths in batches:
        started = time.perf_counter()
        plan = planner(lengths, layout, settings)
        elapsed = time.perf_counter() - started
        plan.check(layout)
        costs = [
            [layout.cost.fixed + len(ids) * price for ids, price in zip(slots, prices, strict=True)]
            for slots, prices in zip(
                plan.ranks,
                (layout.cost.per_sample(np.array(sizes)).tolist() for sizes in plan.padded_lengths),
                strict=True,
            )
        ]
        step = sum(map(max, zip(*costs, strict=True))) if layout.lockstep else max(map(sum, costs))
        per_sample, totals = layout.cost.per_sample(lengths), [sum(slots) for slots in costs]
        work = float(per_sample.sum()) / layout.world_size
        rows.append(
            {
                "busy": work / step,
                "of_bound": (layout.cost.fixed + max(work, float(per_sample.max()))) / step,
                "imbalance": max(totals) * len(totals) / sum(totals),
                "padding": plan.padding,
                "accum_steps": float(plan.accum_steps),
                "max_positions": float(plan.max_positions),
                "plan_ms": 1e3 * elapsed,
            }
        )
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def simulate(settings: Settings) -> list[dict[str, object]]:
    """Run every planner on every number of ranks, both ways of meeting; print as it goes."""
    lengths = draw_lengths(settings)
    results: list[dict[str, object]] = []
    for world_size in map(int, settings.ranks.split(",")):
        random = np.random.default_rng(world_size)
        batches = [
            lengths[random.choice(len(lengths), world_size * settings.per_rank)]
            for _ in range(settings.batches)
        ]
        for lockstep in (False, True):
            layout = Layout(world_size=world_size, lockstep=lockstep, cost=COST)
            when = "in every micro-batch" if lockstep else "at the end of the step"
            print(f"\n{world_size} ranks that meet {when}, {settings.per_rank} samples each")
            print(f"{'':44}  busy  imbalance  padding  steps  largest  plan ms")
            for name, planner in PLANNERS.items():
                row = measure(planner, batches, layout, settings)
                results.append({"plan": name, "ranks": world_size, "lockstep": lockstep, **row})
                print(
                    f"{name:44} {row['busy']:5.2f} {row['imbalance']:10.2f} {row['padding']:8.1%}"
                    f" {row['accum_steps']:6.0f} {row['max_positions']:8.0f} {row['plan_ms']:8.1f}"
                )
    return results


def time_planning(settings: Settings) -> list[dict[str, object]]:
    """Time the planning of `settings.planning` lengths; print as it goes."""
    drawn = draw_lengths(settings)
    results: list[dict[str, object]] = []
    for world_size in map(int, settings.ranks.split(",")):
        for packed, lockstep in product((False, True), repeat=2):
            layout = Layout(world_size=world_size, lockstep=lockstep, packed=packed, cost=COST)
            random = np.random.default_rng(world_size)
            spent = []
            for _ in range(settings.batches):
                lengths = drawn[random.choice(len(drawn), settings.planning)]
                started = time.thread_time()
                ours(lengths, layout, settings)
                spent.append(1e3 * (time.thread_time() - started))
            row = {"median_ms": statistics.median(spent), "most_ms": max(spent)}
            results.append({"ranks": world_size, "packed": packed, "lockstep": lockstep, **row})
            print(
                f"{world_size:4} ranks  {'packed' if packed else 'padded'}  "
                f"{'lockstep' if lockstep else 'deferred'}  "
                f"median {row['median_ms']:5.1f} ms  most {row['most_ms']:5.1f} ms"
            )
    return results


def main(arguments: list[str]) -> None:
    """Read `key=value` pairs, simulate, write the JSON."""
    typed = dict(argument.split("=", 1) for argument in arguments)
    defaults = asdict(Settings())
    unknown = typed.keys() - defaults.keys()
    if unknown:
        sys.exit(f"balance: unknown {', '.join(sorted(unknown))}; known: {', '.join(defaults)}")
    settings = Settings(**{key: type(defaults[key])(value) for key, value in typed.items()})
    results = time_planning(settings) if settings.planning else simulate(settings)
    write_results(Path(settings.json), asdict(settings) | {"cost": asdict(COST)}, results)


if __name__ == "__main__":
    main(sys.argv[1:])
