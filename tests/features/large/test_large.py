"""A run on many ranks is estimated on paper, and what ranks agree on does not grow with them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.lib.run_support import shell
from trainer.core.world import stage_sizes
from trainer.features.large import costs
from trainer.launch import session
from trainer.launch.membership import Membership

GIB = 2.0**30


def estimate(**changed):
    given = {"ranks": 8, "compute_s": 2.0, "sent": 8e9, "network": 1e9, "overlaps": False}
    return costs.estimate(**{**given, "state_bytes": 6e9, "storage": 2e9, **changed})


def test_a_step_is_bound_by_what_takes_longest():
    found = estimate()
    assert found.network_s == 8.0
    assert found.checkpoint_s == 3.0
    assert found.step_s == pytest.approx(10.0 + found.agree_s)
    assert found.bound == "the network"
    assert estimate(overlaps=True).step_s == pytest.approx(8.0 + found.agree_s)
    assert estimate(network=1e12).bound == "computing"
    assert estimate(network=1e15, compute_s=1e-6).bound == "agreement"
    assert estimate(network=None).step_s is None
    assert estimate(storage=None).checkpoint_s is None


def test_agreement_grows_with_the_logarithm_of_the_ranks_and_matters_little_at_4096():
    assert stage_sizes(4096) == [4] * 6
    assert (stage_sizes(7), stage_sizes(24), stage_sizes(1)) == ([7], [4, 2, 3], [])
    assert costs.agree_seconds(4096) == 2 * costs.agree_seconds(64)
    round_all = costs.VECTORS * costs.MESSAGE_S * 2 * 4095
    assert costs.agree_seconds(4096) < round_all / 200


@pytest.mark.slow
def test_a_plan_of_4096_ranks_says_what_a_step_costs_and_starts_nothing(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    line = "plan data=text data.path=c.txt batch.global=4096 device=h100 steps=3 hydra.run.dir=run"
    Path("c.txt").write_text("a step is one update, and no more than that\n\n" * 5000)
    assert shell(f"{line} ranks=4096 network=400Gbps checkpoint.bandwidth=50GB/s") == 0
    shown = " ".join(capsys.readouterr().out.split())
    plan = json.loads(Path("run/plan.json").read_text())
    assert plan["world_size"] == 4096
    found = plan["at_large"]
    assert found["agree_s"] == costs.agree_seconds(4096)
    assert found["step_s"] >= plan["step_seconds"] == found["compute_s"]
    sent = next(row for row in plan["sync_table"] if row["policy"] == plan["sync"])
    assert found["network_s"] == pytest.approx((sent["within"] + sent["across"]) / 50e9)
    assert found["checkpoint_s"] == pytest.approx(plan["checkpoint_bytes"] / 50e9)
    assert plan["checkpoint_bytes"] > 3 * 4 * plan["num_parameters"] * 0.9
    assert costs.ORIGIN in shown
    assert "4,096 ranks: about" in shown


def numbers_of(world, size):
    """Sums and largest numbers in stages, beside those over all at once."""
    place = {"local_rank": world.rank, "local_size": size, "start_timeout_s": 60}
    member = Membership(rank=world.rank, size=size, **place)
    table = session._stages(member, session.LONG_TIMEOUT)
    own = torch.rand(50, generator=torch.Generator().manual_seed(world.rank)).double()
    own[:10] = torch.arange(10) * (world.rank + 1) * 2**40
    both = own.clone(), own.clone()
    dist.all_reduce(both[0])
    dist.all_reduce(both[1], dist.ReduceOp.MAX)

    staged = replace(world, stages=table)
    found = staged.sum_numbers(own.tolist()), staged.max_numbers(own.tolist())
    main = world.on_main(lambda: {"text": "ü" * 1000, "rank": world.rank})
    return len(table), found, [each.tolist() for each in both], main


@pytest.mark.parametrize("size", [6, pytest.param(8, marks=pytest.mark.slow)])
def test_numbers_in_stages_are_those_over_all(size, ranks):
    answers = ranks.run(size, numbers_of, size)
    for num_stages, (sums, largest), (all_sums, all_largest), main in answers:
        assert num_stages == 2
        assert sums == answers[0][1][0], "every rank has the same bits"
        assert sums[:10] == all_sums[:10], "counts are exact"
        assert sums == pytest.approx(all_sums, rel=1e-15)
        assert largest == all_largest
        assert main == {"text": "ü" * 1000, "rank": 0}
