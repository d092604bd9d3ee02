"""A run on many ranks is estimated on paper, and what ranks agree on does not grow with them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.lib.run_support import shell
from trainer.core.world import groups_of
from trainer.features.large import costs

GIB = 2.0**30


def estimate(**changed):
    given = {"ranks": 8, "compute_s": 2.0, "sent": 8e9, "network": 1e9, "overlaps": False}
    return costs.estimate(**{**given, "state_bytes": 6e9, "storage": 2e9, "writers": 8, **changed})


def test_a_step_is_bound_by_what_takes_longest():
    found = estimate()
    assert found.network_s == 8.0
    assert found.checkpoint_s == pytest.approx(3.0 + 2 * costs.gather_seconds(8))
    assert estimate(writers=1).checkpoint_s > 6e9 / costs.HASHED_PER_S, "one rank digests it all"
    assert found.step_s == pytest.approx(10.0 + found.agree_s)
    assert found.bound == "the network"
    assert estimate(overlaps=True).step_s == pytest.approx(8.0 + found.agree_s)
    assert estimate(network=1e12).bound == "computing"
    assert estimate(network=1e15, compute_s=1e-6).bound == "agreement"
    assert estimate(network=None).step_s is None
    assert estimate(storage=None).checkpoint_s is None


def test_agreement_grows_with_the_logarithm_of_the_ranks_and_matters_little_at_4096():
    assert costs.agree_seconds(1) == costs.gather_seconds(1) == 0
    assert costs.agree_seconds(4096) == pytest.approx(3 * 6 * (6 + 2) * costs.MESSAGE_S)
    assert costs.gather_seconds(4096) == pytest.approx(6 * 10 * costs.TEXT_S)
    for ranks in (4072, 4093, 1016):  # hosts of any number, and a prime
        assert costs.agree_seconds(ranks) <= costs.agree_seconds(4096)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "sent", "writers"),  # bytes for each weight, worked out by hand
    [
        ("ddp", 2 * 4, 1),  # an all-reduce of gradients in fp32 sends nearly twice their bytes
        ("fsdp", 2 + 4, 4096),  # weights are gathered in bf16, gradients scattered in fp32
        ("hsdp parallel.shard=8", 2 * 4 / 8, 4096),  # between hosts an all-reduce of a shard
    ],
)
def test_a_plan_of_4096_ranks_says_what_a_step_costs_and_starts_nothing(
    parallel, sent, writers, monkeypatch, capsys
):
    monkeypatch.setenv("COLUMNS", "200")
    line = f"plan parallel={parallel} data=text data.path=c.txt device=h100 hydra.run.dir=run"
    Path("c.txt").write_text("a step is one update, and no more than that\n\n" * 5000)
    line += " ranks=4096 batch.global=4096 network=400Gbps checkpoint.bandwidth=50GB/s"
    assert shell(line) == 0
    shown = " ".join(capsys.readouterr().out.split())
    plan = json.loads(Path("run/plan.json").read_text())
    assert plan["world_size"] == 4096
    found = plan["at_large"]
    assert found["agree_s"] == costs.agree_seconds(4096)
    assert found["step_s"] >= plan["step_seconds"] == found["compute_s"]
    assert found["network_s"] == pytest.approx(sent * plan["num_parameters"] / 50e9, rel=5e-3)
    written_s = plan["checkpoint_bytes"] / min(50e9, writers * costs.HASHED_PER_S)
    assert found["checkpoint_s"] == pytest.approx(written_s + 2 * costs.gather_seconds(4096))
    assert plan["checkpoint_bytes"] > 3 * 4 * plan["num_parameters"] * 0.9
    assert costs.ORIGIN in shown
    assert "4,096 ranks: about" in shown


def numbers_of(world, size):
    """Sums, largest numbers and texts through small groups, beside those over all at once."""
    groups = groups_of(world.rank, size)
    own = torch.rand(50, generator=torch.Generator().manual_seed(world.rank)).double()
    own[:10] = torch.arange(10) * (world.rank + 1) * 2**40
    both = own.clone(), own.clone()
    dist.all_reduce(both[0])
    dist.all_reduce(both[1], dist.ReduceOp.MAX)

    staged = replace(world, groups=groups)
    found = staged.sum_numbers(own.tolist()), staged.max_numbers(own.tolist())
    texts = staged.collect({"ü" * world.rank: world.rank})
    main = world.on_main(lambda: {"text": "ü" * 1000, "rank": world.rank})
    return len(groups), found, [each.tolist() for each in both], texts, main


@pytest.mark.parametrize("size", [6, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 17))])
def test_values_through_small_groups_are_those_over_all(size, ranks):
    answers = ranks.run(size, numbers_of, size)
    assert max(answer[0] for answer in answers) == 2 + (size > 16)
    for _, (sums, largest), (all_sums, all_largest), texts, main in answers:
        assert texts == [{"ü" * rank: rank} for rank in range(size)]
        assert sums == answers[0][1][0], "every rank has the same bits"
        assert sums[:10] == all_sums[:10], "counts are exact"
        assert sums == pytest.approx(all_sums, rel=1e-15)
        assert largest == all_largest
        assert main == {"text": "ü" * 1000, "rank": 0}
