"""`log.noise_scale`: measured as the run goes on, saved with it; the steps stay what they are."""

import pytest
import torch

from tests.lib.run_support import TOYS, curve, go, on, read_json, state, steps
from trainer import train
from trainer.core.errors import ConfigError

PAIRS = "tests.lib.pair_toys"
LINE = f"model._target_={TOYS}.DoubleNet scheduler=constant accum=budget accum.max_tokens=40"


def figures(run) -> list[object]:
    return [entry.get("noise_scale", "none") for entry in steps(run)]


def test_it_is_measured_every_so_often_and_a_resumed_run_measures_the_same():
    whole = go(f"{LINE} log.noise_scale=2")
    found = figures(whole)
    assert found[::2] == ["none"] * 3
    assert all(each is None or each >= 0 for each in found[1::2])
    run = go(f"{LINE} log.noise_scale=2 steps=3")
    assert figures(on(run, "steps=6")) == found
    for name, tensor in state(whole).items():
        assert torch.equal(state(run)[name], tensor), name


@pytest.mark.slow
def test_a_measurement_cuts_the_step_anew_and_changes_it_by_rounding_alone():
    off, each = (go(f"{LINE} log.noise_scale={every}") for every in ("null", "1"))
    assert figures(off) == ["none"] * 6
    assert curve(off, "micro_batches") != curve(each, "micro_batches")
    assert curve(each, "loss") == pytest.approx(curve(off, "loss"), rel=1e-12)
    on(off, "steps=7 log.noise_scale=1")  # from a checkpoint without it
    assert figures(off)[6] != "none"


def test_the_end_and_plan_run_say_what_another_batch_would_need_or_what_to_type(capsys):
    run = go(f"{LINE} log.noise_scale=1 steps=24")
    text = run.result["batch_advice"]
    assert text.startswith("the gradient noise scale was ")
    assert "the global batch is 8" in text
    assert text in " ".join(capsys.readouterr().out.split())
    assert text in " ".join((run.folder / "train.log").read_text().split())
    plan = train(["plan", f"run={run.folder}", "trust=[tests]"])
    assert read_json(plan.folder / "plan.json")["batch_advice"] == text
    assert text in " ".join(capsys.readouterr().out.split())
    run = go(f"{LINE} log.noise_scale=null steps=2")
    assert run.result["batch_advice"] is None
    train(["plan", f"run={run.folder}", "trust=[tests]"])
    assert "train with log.noise_scale=auto" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_number_is_refused_where_nothing_can_be_measured_and_auto_is_silent():
    words = "^log.noise_scale=2: the noise scale needs two micro-batches .* type log.noise_scale=a"
    pairs = f"model._target_={PAIRS}.Towers data._target_={PAIRS}.Pairs objective=contrastive"
    for line in ("accum.micro=8", pairs):
        with pytest.raises(ConfigError, match=words):
            go(f"{line} log.noise_scale=2")
        assert figures(go(f"{line} steps=1")) == ["none"]
