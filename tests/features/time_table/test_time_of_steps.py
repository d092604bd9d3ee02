"""Where the time of a run went, as result.json and the screen have it."""

import pytest

from tests.lib.run_support import curve, go, overrides, read_json
from tests.reliability.rank_work import on_ranks
from trainer.features.time_table.table import PARTS

TOYS = (
    "model._target_=tests.lib.faulty.SlowNet data._target_=tests.lib.faulty.Rows "
    "objective=classify eval.every=null log.samples=false"
)


def test_a_run_says_where_its_time_went():
    run = go("log.samples=false")
    assert not (run.folder / "samples.jsonl").exists(), "log.samples=false"
    time = run.result["time"]
    assert set(time["seconds"]) == set(PARTS)
    assert sum(time["share"].values()) == pytest.approx(1, abs=1e-3)
    assert time["steps"] == 5
    assert time["seconds"]["waiting"] == time["seconds"]["sync"] == 0


@pytest.mark.slow
def test_a_slow_rank_is_named(ranks):
    line = f"{TOYS} batch.global=16 steps=4"
    whole = go(f"{line} accum.micro=16")
    line += " parallel.ranks=2 accum.micro=4 +model.pause=0.1 +model.behind=2.5"
    run = on_ranks(ranks, overrides(f"{line} sync=immediate"))
    for name in ("loss", "grad_norm"):
        assert curve(run, name) == pytest.approx(curve(whole, name), rel=1e-5)
    result = read_json(run / "result.json")
    (advice,) = result["advice"]
    assert advice.startswith("waiting: ")
    assert "mostly for rank 1, which computes" in advice
    first, second = result["time"]["waiting_by_rank"]
    assert first > 0.1 > second
