"""`ema.decay` and `step=ema`: the same average on any layout, saved, evaluated, exported."""

import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.lib.cli_support import prepared
from tests.lib.nightly import nightly, slow
from tests.lib.run_support import TOYS, entries, go, on, overrides, read_json, saved, shell, state
from tests.reliability import lab
from tests.reliability.rank_work import on_ranks
from trainer.core.errors import ConfigError

DOUBLE = f"model._target_={TOYS}.DoubleNet scheduler=constant ema.decay=0.75"
PLACE = "ema.weights."


def averages(run: Path) -> dict[str, torch.Tensor]:
    found = state(run).items()
    return {name.removeprefix(PLACE): value for name, value in found if name.startswith(PLACE)}


@pytest.mark.parametrize(
    "layout",
    [
        slow("parallel=fsdp parallel.ranks=2"),
        nightly("parallel=hsdp parallel.ranks=4 parallel.shard=2"),
    ],
)
def test_ranks_keep_the_average_of_one_process_and_one_goes_on_with_it(layout, ranks):
    alone = go(f"{DOUBLE} checkpoint.every=1 checkpoint.keep=9").folder
    run = on_ranks(ranks, overrides(f"{DOUBLE} {layout} steps=3"))
    assert lab.run(prepared(shlex.join(overrides(DOUBLE))).config, run, resume=True).code == 0
    for name, value in averages(run).items():
        expected = state(alone, 1)[f"model.{name}"]
        for step in range(2, 7):
            expected = expected.lerp(state(alone, step)[f"model.{name}"], 0.25)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
        assert not value.allclose(state(run)[f"model.{name}"])


def test_the_average_is_evaluated_exported_and_begun_with_and_frozen_weights_are_the_models():
    line = "ema.decay=0.75 scheduler=constant 'optimizer.groups={embed*: {frozen: true}}'"
    run = go(line).folder
    average, weights = averages(run), state(run)
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
