"""`ema.evaluate`: the average is evaluated during a run, which it leaves as it is, bit for bit."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.lib.nightly import nightly, slow
from tests.lib.run_support import TOYS, entries, go, on, overrides, read_json, shell, state
from tests.reliability.rank_work import on_ranks
from trainer import train
from trainer.checkpoint.average import WeightAverage
from trainer.features.average.evaluate import in_place

DOUBLE = f"model._target_={TOYS}.DoubleNet scheduler=constant optimizer.lr=0.1 ema.decay=0.75"
OFTEN = "eval.every=1 checkpoint.every=1 checkpoint.keep=9"
EVALUATED = "ema.evaluate=true checkpoint.best=ema_eval_loss"


def figures(run, name: str) -> dict[int, float]:
    return {each["step"]: each[name] for each in entries(run) if name in each}


def same_bits(one, other) -> bool:
    left, right = state(one), state(other)
    return {name for name, tensor in left.items() if tensor.equal(right[name])} == right.keys()


def test_the_average_is_evaluated_beside_the_weights_which_stay_as_they_are(capsys):
    run = go(f"{DOUBLE} {OFTEN} {EVALUATED} 'eval.sets={{web: {{}}}}'")
    assert "web, averaged weights: loss" in capsys.readouterr().out
    averaged, own = figures(run, "ema_eval_loss"), figures(run, "eval_loss")
    assert averaged.keys() == own.keys() == figures(run, "ema_eval_web_loss").keys()
    assert min(averaged, key=averaged.get) != min(own, key=own.get), "a control"
    assert run.result["best"]["metric"] == "ema_eval_loss"
    assert run.result["metrics"]["ema_eval_loss"] == averaged[6]
    # What the best is chosen by is what its readers take.
    for step in ("best", "ema"):
        read = train(["evaluate", f"run={run.folder}", f"step={step}", "trust=[tests]"]).result
        assert read["weights"] == "ema"
        assert read["eval_loss"] == pytest.approx(averaged[read["step"]], rel=1e-12)
    assert read_json(run.folder / "checkpoints" / "best.json") == {
        "step": min(averaged, key=averaged.get),
        "metric": "ema_eval_loss",
    }
    assert same_bits(run, go(f"{DOUBLE} {OFTEN}"))


@pytest.mark.parametrize(
    "layout",
    [
        slow("parallel=fsdp parallel.ranks=2"),
        nightly("parallel=hsdp parallel.ranks=4 parallel.shard=2"),
    ],
)
def test_shards_are_exchanged_and_put_back_without_their_neighbours(layout, ranks):
    alone = go(f"{DOUBLE} {OFTEN} ema.evaluate=true")
    run = on_ranks(ranks, overrides(f"{DOUBLE} {OFTEN} ema.evaluate=true {layout}"))
    plain = on_ranks(ranks, overrides(f"{DOUBLE} {OFTEN} {layout}"), "plain")
    for name in ("eval_loss", "ema_eval_loss"):
        assert figures(run, name) == pytest.approx(figures(alone, name), rel=1e-10)
    assert same_bits(run, plain)


@pytest.mark.parametrize(
    "line",
    [
        # fp32 copies that count writes to their weights in bf16
        f"model._target_={TOYS}.LowNet accum.buffer=fp32",
        slow(f"model._target_={TOYS}.LowNet"),
        slow("precision=bf16"),
    ],
)
def test_no_precision_loses_a_bit(line):
    line = f"{line} ema.decay=0.9 eval.every=1"
    run = go(f"{line} ema.evaluate=true")
    assert figures(run, "ema_eval_loss") != figures(run, "eval_loss")
    assert same_bits(run, go(line))


@pytest.mark.slow
def test_a_run_that_goes_on_evaluates_as_an_uninterrupted_one():
    line = f"{DOUBLE} eval.every=1 {EVALUATED}"
    whole, cut = go(line), go(f"{line} steps=3")
    assert figures(on(cut, "steps=6"), "ema_eval_loss") == figures(whole, "ema_eval_loss")


def test_a_failure_meanwhile_leaves_every_weight_as_it_was():
    module, average = nn.Linear(3, 2), WeightAverage(0.9)
    module.bias = nn.Parameter(module.bias.detach().bfloat16())
    average.begin(module)
    with torch.no_grad():
        for each in module.parameters():
            each.add_(1)
    before, versions = [p.clone() for p in module.parameters()], [module.weight._version]
    averages = [each.clone() for each in average.state()["weights"].values()]

    def interrupted() -> None:
        with in_place(average):
            for weight, own in zip(module.parameters(), averages, strict=True):
                assert weight.equal(own.to(weight.dtype))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(map(torch.equal, module.parameters(), before))
    assert all(map(torch.equal, average.state()["weights"].values(), averages))
    assert versions == [module.weight._version]


def test_an_export_of_the_best_is_the_average_and_its_card_has_its_figures():
    run = go(f"{DOUBLE} {OFTEN} {EVALUATED}")
    assert shell(f"export run={run.folder} step=best export.to=out trust=[tests]") == 0
    step = read_json(run.folder / "checkpoints" / "best.json")["step"]
    card = Path("out/README.md").read_text()
    assert "Averaged weights" in card
    assert f"{figures(run, 'ema_eval_loss')[step]:.4f}" in card
    assert "not of their average" not in card
