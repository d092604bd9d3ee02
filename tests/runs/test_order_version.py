"""The version of the data order is a term of a run: none may change it."""

from __future__ import annotations

import pytest

from tests.lib.run_support import TOYS, entries, go, meta, on, read_json
from tests.lib.run_toys import Many
from trainer.cli.main import FinishedRun
from trainer.core.errors import ConfigError
from trainer.data.view import DataView, split_by_seed
from trainer.plan.order import Order

pytestmark = pytest.mark.usefixtures("own_folder")

MANY = f"data._target_={TOYS}.Many data.holdout=0.001 checkpoint.every=1"


def ids_of(run: FinishedRun) -> list[list[int]]:
    return [entry["ids"] for entry in entries(run, "samples.jsonl")]


def ids_by(version: int, steps: int) -> list[list[int]]:
    """The ids of the first steps by a version, in the user's data set."""
    view = split_by_seed(DataView(Many(), version=version), "train", 0.001, 0)
    order = Order(len(view), 0, 8, version=version)
    cursor, found = order.start, []
    for _ in range(steps):
        batch = order.next(cursor)
        cursor = batch.after
        found.append(view.original_ids(batch.ids).tolist())
    return found


def test_a_new_run_has_version_3_and_keeps_it() -> None:
    run = go(f"{MANY} steps=2")
    assert meta(run)["extra"]["contract"]["order"] == 3
    with pytest.raises(ConfigError) as raised:
        on(run, "order=1 steps=4")
    assert str(raised.value) == "order=1: the run has 3; to change it, resume_allow=[order]"
    on(run, "steps=4")
    assert ids_of(run) == ids_by(3, 4) == ids_by(2, 4)


@pytest.mark.parametrize("order", [2, 3])
def test_what_is_held_out_follows_the_seed_up_to_version_2_and_then_a_key_of_its_own(
    order: int,
) -> None:
    typed = f"order={order} steps=1 checkpoint.every=1 data.holdout=0.2"
    runs = [go(f"{typed} seed={seed}") for seed in (0, 1)]
    runs.append(go(f"{typed} data.split_seed=1"))
    first, second, third = (read_json(run.folder / "splits.json")["held_out"] for run in runs)
    assert (first == second) is (order == 3)
    assert (first == third) is (order == 2)
    assert ids_of(runs[0]) != ids_of(runs[1])
    if order == 3:
        with pytest.raises(ConfigError, match=r"data\.split_seed=2: the run has 1; to change it"):
            on(runs[2], "data.split_seed=2 steps=2")
