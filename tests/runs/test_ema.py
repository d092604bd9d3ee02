"""`ema.decay` and `step=ema`: the same average on any layout, saved, evaluated, exported."""

import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.lib.cli_support import prepared
from tests.lib.nightly import nightly
from tests.lib.run_support import TOYS, entries, go, on, overrides, read_json, saved, shell, state
from tests.reliability import lab
from tests.reliability.rank_work import on_ranks
from trainer.core.errors import ConfigError

DOUBLE = f"model._target_={TOYS}.DoubleNet scheduler=constant ema.decay=0.75"
EVERY = "checkpoint.every=1 checkpoint.keep=9"
PLACE = "ema.weights."


def averages(run: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    found = state(run, step).items()
    return {name.removeprefix(PLACE): value for name, value in found if name.startswith(PLACE)}


@pytest.mark.parametrize(
    "layout",
    [
        "parallel=fsdp parallel.ranks=2",
        nightly("parallel=ddp parallel.ranks=2"),
        nightly("parallel=hsdp parallel.ranks=4 parallel.shard=2"),
    ],
)
def test_ranks_keep_the_average_of_one_process_and_one_goes_on_bit_for_bit(layout, ranks):
    alone = go(f"{DOUBLE} {EVERY}").folder
    run = on_ranks(ranks, overrides(f"{DOUBLE} {EVERY} {layout} steps=3"))
    config = prepared(shlex.join(overrides(f"{DOUBLE} {EVERY}"))).config
    assert lab.run(config, run, resume=True).code == 0
    before = averages(run, 1)
    for step in range(1, 7):
        weights, found = state(run, step), averages(run, step)
        for name, value in found.items():
            weight = weights[f"model.{name}"]
            # From three on the shards of two ranks are one: no bit of the formula is lost there.
            assert value.equal(before[name].lerp(weight, 0.25) if step > 1 else weight), name
            expected = averages(alone, step)[name]
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
        before = found
    assert not before["head.weight"].allclose(state(run)["model.head.weight"])


def test_the_average_is_evaluated_exported_and_begun_with_and_frozen_weights_are_the_models():
    line = "ema.decay=0.75 scheduler=constant 'optimizer.groups={embed*: {frozen: true}}'"
    run = go(f"{line} nonfinite.limit=3").folder
    average, weights = averages(run), state(run)
    assert "head.weight" in average
    assert "embed.weight" not in average
    found = {}
    for step in ("last", "ema"):
        assert shell(f"evaluate run={run} step={step}") == 0
        found[step] = read_json(run / "evaluate.json")
    assert found["ema"]["weights"] == "ema"
    assert "weights" not in found["last"]
    assert found["ema"]["eval_loss"] != found["last"]["eval_loss"]
    assert shell(f"export run={run} step=ema export.to=out") == 0
    exported = load_file("out/model.safetensors")
    for name, tensor in exported.items():
        assert tensor.equal(average.get(name, weights.get(f"model.{name}", tensor))), name
    assert exported.keys() >= {"embed.weight", *average}
    for init in (f"init={run} step=ema", "init=out"):
        begun = go(f"{init} steps=1 eval.at_start=true")
        first = next(entry for entry in entries(begun) if entry["step"] == 0)
        assert first["eval_loss"] == pytest.approx(found["ema"]["eval_loss"], rel=1e-6)


def test_an_average_that_is_not_there_and_another_decay_are_refused_unless_allowed():
    run = go("steps=2")
    with pytest.raises(ConfigError, match="step-00000002 has no average of its weights; leave it"):
        go(f"init={run.folder} step=ema")
    with pytest.raises(ConfigError, match=r"ema\.decay=0\.5: the run has null; to change it, resu"):
        on(run, "steps=4 ema.decay=0.5")
    on(run, "steps=4 ema.decay=0.5 resume_allow=[ema.decay]")
    assert saved(run, "ema")["updates"] == 2
    with pytest.raises(ConfigError, match=r"ema\.decay=0\.9: the run has 0\.5; to change it"):
        on(run, "steps=5 ema.decay=0.9")
    on(run, "steps=5")
    assert saved(run, "ema")["updates"] == 3
