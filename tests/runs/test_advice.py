"""What a plan warns of: one line each, what happens and what to type, on the screen and in JSON."""

from typing import Any

import pytest

from tests.lib.run_support import TOYS, go, read_json
from tests.lib.run_toys import Net

OWN = "tests.lib.objective_toys"
AWAY = "device=cuda precision=bf16"


def planned(line: str) -> dict[str, Any]:
    return read_json(go(f"command=plan {line}").folder / "plan.json")


@pytest.mark.parametrize(
    ("line", "words"),
    {
        "batch.normalizer=micro_batches": "is a mean of means",
        "model.norm=batch": "over 2 to 3 samples, the micro-batches of one rank, and not over the",
        "model.norm=batch parallel.ranks=2": "move 2 times a step, by those of rank 0 alone: so",
        f"objective._target_={OWN}.Mean": "the loss of Mean is not a sum over samples",
        f"objective._target_={OWN}.MeanOfTokens": "the loss of MeanOfTokens is not a sum over",
        "batch.global=3 parallel.ranks=4": "no sample in a step for 1 of 4 ranks",
        "batch.global=512": "batch.global=512 is more than the 42 samples of an epoch",
    }.items(),
)
def test_what_a_user_should_know_is_a_warning_of_one_line(line, words, capsys):
    plan = planned(line)
    (shown,) = [warning for warning in plan["warnings"] if words in warning]
    assert "\n" not in shown
    assert shown in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "line",
    [
        f"model.norm=batch batchnorm=micro objective._target_={TOYS}.Squared",
        f"objective._target_={OWN}.Pairs accum.micro=2 optimizer._target_={TOYS}.Descent",
    ],
)
def test_what_is_in_order_is_not_warned_of(line):
    assert planned(line)["warnings"] == []


def test_a_plan_for_eight_gpus_that_are_not_here_is_that_of_the_machine_it_is_for(capsys):
    model = f"model._target_={OWN}.Bounded"
    plan = planned(f"{model} {AWAY} accum=auto accum.memory=80GiB parallel.ranks=8 parallel=fsdp")
    assert plan["world_size"] == 8
    assert {shape["rank"] for shape in plan["shapes"]} == set(range(8))
    assert all(shape["packed"] for shape in plan["shapes"]), "as bf16 on a GPU is"
    assert plan["num_workers"] > 0, "as on a GPU"
    assert plan["device"] == "cuda (not here)"
    assert plan["memory_limit_bytes"] == int(80 * 2**30 * 0.92)
    assert plan["step_seconds"] is None
    assert all(row["predicted_seconds"] is None for row in plan["candidates"])
    screen = " ".join(capsys.readouterr().out.split())
    assert "estimate" in screen
    assert "unknown: nothing can be timed" in screen
    whole = planned(f"{model} {AWAY} accum=auto accum.memory=80GiB parallel.ranks=8 parallel=ddp")
    policies = [row["policy"] for row in whole["sync_table"]]
    assert policies == ["deferred", "overlapped", "immediate"]
    assert whole["sync_why"].startswith("sync=auto takes overlapped: ")
    # Parameters in shards of fp32, and gathered whole in bf16.
    for part, share in (("optimizer state", 1 / 8), ("parameters", 5 / 8)):
        mine, of = plan["memory_parts"][part], whole["memory_parts"][part]
        assert mine == pytest.approx(share * of, abs=32), "counters are whole"
    assert not any(shape["packed"] for shape in planned(f"{model} precision=bf16")["shapes"])


class Half(Net):
    """Has weights in bf16 alone, in which it computes without autocast."""

    def __init__(self):
        super().__init__()
        self.bfloat16()


CARD = "device=h100 precision=bf16 batch.global=40"


def test_a_card_stands_for_memory_peak_and_launches_and_gives_a_time(capsys):
    """A launch is dearer than any micro-batch of a toy, so that one holds the whole step."""
    plan = planned(f"{CARD} accum=auto")
    assert plan["micro_batches"] == 1
    assert 70 * 2**30 < plan["memory_limit_bytes"] < 80 * 2**30
    assert 0 < plan["step_seconds"] < 1
    assert "estimated at 40% of the 990 TFLOP/s of h100" in " ".join(
        capsys.readouterr().out.split()
    )
    half = f"precision=fp32 model._target_={__name__}.Half"
    other = planned(f"{CARD} accum=auto device=l4 {half}")
    assert "of the 121 TFLOP/s of l4" in " ".join(capsys.readouterr().out.split())
    assert other["step_seconds"] > plan["step_seconds"] / 2
    assert other["memory_limit_bytes"] < 24 * 2**30


class Valued(Net):
    """Looks at a value, so that it can be built on the meta device, and not run there."""

    def forward(self, input_ids):
        assert int(input_ids.max()) >= 0
        return super().forward(input_ids)


def test_a_model_that_cannot_be_planned_without_its_values_gets_them():
    plan = planned(f"{CARD} accum=auto model._target_={__name__}.Valued")
    assert plan["micro_batches"] == 1
    assert plan["predicted_peak_bytes"] > 0
