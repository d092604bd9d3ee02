"""`accum.buffer=fp32`: saved, resumed on any layout, evaluated, exported, refused, explained."""

import shlex

import pytest
import torch
from safetensors.torch import load_file

from tests.lib.cli_support import prepared
from tests.lib.nightly import nightly, slow
from tests.lib.run_support import TOYS, curve, go, on, overrides, read_json, shell, state
from tests.reliability import lab
from tests.reliability.rank_work import on_ranks

LOW = f"model._target_={TOYS}.LowNet scheduler=constant optimizer.lr=1e-3 accum.micro=1"
WIDE = f"{LOW} accum.buffer=fp32"
PLACE = "optimizer.masters."


def masters(run) -> dict[str, torch.Tensor]:
    return {n.removeprefix(PLACE): t for n, t in state(run).items() if n.startswith(PLACE)}


def test_copies_are_saved_and_resumed_bit_for_bit_and_weights_are_those_rounded(capsys):
    whole, run, _ = go(WIDE), go(f"{WIDE} steps=3"), go(f"command=plan {WIDE}")
    screen = " ".join(capsys.readouterr().out.split())
    copies = "the optimizer steps fp32 master copies of the bf16 weights"
    assert f"gradients added up in fp32, {copies}" in screen
    assert "lose bits" not in screen
    run = on(run, "steps=6")
    found, expected = state(run), state(whole)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    assert curve(run, "loss") == curve(whole, "loss")
    copies = masters(whole)
    assert copies.keys() == {n.removeprefix("model.") for n in expected if n.startswith("model.")}
    for name, copy in copies.items():
        assert copy.dtype == torch.float32
        assert expected[f"model.{name}"].equal(copy.bfloat16())
    assert any(not copy.equal(copy.bfloat16().float()) for copy in copies.values())


@pytest.mark.parametrize("mode", [slow("fsdp"), nightly("ddp")])
def test_ranks_train_as_one_process_does_and_one_goes_on_with_what_they_saved(mode, ranks):
    alone = go(WIDE)
    run = on_ranks(ranks, overrides(f"{WIDE} parallel={mode} parallel.ranks=2 steps=3"))
    plan = read_json(run / "plan.json")
    assert (plan["gradient_dtypes"], plan["has_master_weights"]) == ("fp32", True)
    assert lab.run(prepared(shlex.join(overrides(WIDE))).config, run, resume=True).code == 0
    assert curve(run, "loss") == pytest.approx(curve(alone, "loss"), rel=1e-4)
    for name, copy in masters(run).items():
        torch.testing.assert_close(copy, masters(alone)[name], rtol=1e-3, atol=1e-4)


def test_such_a_run_is_evaluated_averaged_exported_begun_with_and_verified():
    run = go(f"{WIDE} ema.decay=0.5").folder
    assert shell(f"evaluate run={run}") == 0
    found, expected = (read_json(run / name) for name in ("evaluate.json", "result.json"))
    assert found["eval_loss"] == expected["eval_loss"]
    assert shell(f"evaluate run={run} step=ema") == 0
    assert shell(f"export run={run} export.to=weights") == 0
    exported = load_file("weights/model.safetensors")
    for name, copy in masters(run).items():
        assert exported[name].equal(copy.bfloat16())
    begun = go(f"{WIDE} init={run} steps=1 optimizer.lr=0 optimizer.weight_decay=0").folder
    for name, copy in masters(begun).items():  # of the weights, since those are what is read
        assert copy.equal(exported[name].float())
    assert shell(shlex.join(["verify", *overrides(WIDE)])) == 0


def test_the_plan_counts_copies_and_wide_gradients():
    runs = (go(f"command=plan {line}") for line in (LOW, WIDE))
    low, wide = (read_json(run.folder / "plan.json")["memory_parts"] for run in runs)
    count = low["parameters"] / 2
    assert wide["parameters"] == low["parameters"]
    assert (low["gradients"], wide["gradients"]) == (2 * count, 4 * count)
    steps = low["optimizer state"] - 4 * count
    assert wide["optimizer state"] == 12 * count + steps
