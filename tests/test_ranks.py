"""Every layout over real ranks takes the very step that one rank would take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks_support import Ranks
from tests.ranks_work import Case, run_steps
from tests.support import EXACT, WRONG
from trainer.plan.cuts import Budget, Fixed
from trainer.step import NOT_FINITE
from trainer.world import World

LAYOUTS = [("ddp", 2), ("ddp", 3), ("ddp", 4), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4)]
DTYPES = [torch.float64, torch.float32]
ALONE: dict[Any, dict[str, Any]] = {}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    group = Ranks()
    yield group
    group.close()


def alone(case: Case) -> dict[str, Any]:
    """The same run on one rank, with the whole batch in one micro-batch."""
    case = replace(case, cut=Fixed(steps=1), failing=None, poisoned=None)
    key = repr(replace(case, mode="ddp"))
    if key not in ALONE:
        ALONE[key] = run_steps(World(), case)
    return ALONE[key]


def error(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Largest relative error over tensors; None must meet None."""
    assert found.keys() == expected.keys()
    assert [n for n in found if found[n] is None] == [n for n in found if expected[n] is None]
    return max(
        float(np.linalg.norm(found[n].astype(np.float64) - expected[n]))
        / max(float(np.linalg.norm(expected[n])), 1e-30)
        for n in expected
        if expected[n] is not None
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("mode", "size"), LAYOUTS)
def test_gradients_are_those_of_the_whole_batch_on_one_rank(ranks, mode, size, dtype):
    for cut in (Fixed(micro=3), Budget(max_tokens=40)):
        case = Case(cut, mode, dtype=dtype)
        expected = alone(case)
        for told in ranks.run(size, run_steps, case):
            assert error(told["gradient"], expected["gradient"]) <= EXACT[dtype]
            assert told["ids"] == expected["ids"]
            assert told["loss"] == pytest.approx(expected["loss"], rel=EXACT[dtype])
            assert told["norm"] == pytest.approx(expected["norm"], rel=EXACT[dtype])
