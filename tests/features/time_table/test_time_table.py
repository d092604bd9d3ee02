"""Where the time of a step went, and the setting named for a part that is too long."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.core.rank_progress import InStep
from trainer.features.time_table.table import PARTS, advice, split_times, time_table

STEP = get_args(InStep)
ROWS = [
    {"policy": "deferred", "within": 1.5e8, "across": 0.0, "fits": True},
    {"policy": "immediate", "within": 1.8e9, "across": 0.0, "fits": True},
]
IMMEDIATE = {"sync": "immediate", "lockstep": True}
PLAN: dict[str, Any] = {"num_workers": 0, "sync": "deferred", "lockstep": False, "sync_table": ROWS}
PLAN["candidates"] = [{"max_tokens": 8192}]
FIXED: dict[str, Any] = {"candidates": []}
WEIGHED = {"compute": 1.0, "reduce": 0.05, "update": 0.05, "data": 0.01}


def spending(steps: int = 100, **seconds: float) -> dict[str, Any]:
    """What a rank spent in a mean step, phase by phase."""
    phases = {
        name: {"seconds": steps * each, "times": steps, "least": min(each, 0.001)}
        for name, each in (dict.fromkeys(STEP, 0.0) | WEIGHED | seconds).items()
    }
    return {"steps": steps, "phases": phases}


def advised(*ranks: dict[str, float], steps: int = 100, **plan: Any) -> list[str]:
    spendings = [spending(steps, **seconds) for seconds in ranks]
    return advice(split_times(spendings), time_table(spendings), PLAN | plan)


def test_a_healthy_run_and_what_costs_less_than_half_a_second_in_all_are_not_worth_a_line():
    assert advised({}, {}) == []
    assert advised({"data": 0.4, "compute": 0.3}, steps=1) == []


RANKS = {"agree": 0.3}, {"agree": 0.3}, {"compute": 1.3}, {"agree": 0.3}
TRAFFIC = {"reduce": 1.9}, {"reduce": 1.9}


@pytest.mark.parametrize(
    ("ranks", "settings", "words"),
    [
        ([{"data": 0.5}], {}, "data: 31.2% of a step (500 ms) is waiting for samples: num_w"),
        (
            [{"normalizer": 0.6}, {"data": 0.6}, {"normalizer": 0.6}],
            {"num_workers": 3},
            "600 ms of them on rank 1: num_workers=6",
        ),
        (RANKS, {}, "mostly for rank 2, which computes 1.3 s where others take 1.0 s: check what "),
        (RANKS, FIXED, "accum=auto balances the work of the ranks"),
        (RANKS, IMMEDIATE, "sync=deferred lets ranks take different numbers"),
        (TRAFFIC, {}, "a larger batch.global sends gradients less often"),
        (TRAFFIC, IMMEDIATE, "is traffic, 1.68 GiB sent: sync=deferred sends 143 MiB, in one red"),
        (TRAFFIC, IMMEDIATE | {"sync": "own"}, "is traffic: sync=deferred sends 143 MiB"),
    ],
)
def test_what_takes_long_is_named_with_its_figures_and_the_setting_that_shortens_it(
    ranks, settings, words
):
    (line,) = advised(*ranks, **settings)
    assert words in line


SECONDS = st.floats(0, 10)


@given(st.lists(st.tuples(*[SECONDS] * len(STEP)), min_size=1, max_size=5), st.integers(1, 9))
def test_the_parts_of_every_rank_add_up_to_its_step(ranks, steps):
    spendings = [spending(steps, **dict(zip(STEP, each, strict=True))) for each in ranks]
    for parts, seconds in zip(split_times(spendings), ranks, strict=True):
        assert sum(parts[name] for name in PARTS) == pytest.approx(sum(seconds))
        assert min(parts["waiting"], parts["late"], parts["sync"]) >= -1e-9
    table = time_table(spendings)
    whole = sum(map(sum, ranks)) / len(ranks)
    assert table["step_seconds"] == pytest.approx(whole, abs=1e-5)
