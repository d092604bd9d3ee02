"""`precision=auto` as a run shows, records and resumes it."""

from __future__ import annotations

import pytest
import torch

from tests.lib.run_support import curve, go, meta, on, read_json, state, steps
from trainer.build.precision import has_fast_bf16
from trainer.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("own_folder")

HERE = "bf16" if has_fast_bf16(torch.device("cpu")) else "fp32"


def test_auto_is_shown_and_recorded_as_what_it_became_and_computes_that(capsys):
    run, typed = go("precision=auto steps=2"), go(f"precision={HERE} steps=2")
    assert curve(run, "loss") == curve(typed, "loss")
    assert read_json(run.folder / "plan.json")["precision"] == HERE
    assert meta(run)["extra"]["contract"]["precision"] == HERE
    assert f"cpu, {HERE}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=f"precision=fp16: the run has {HERE}; to change it"):
        on(run, "precision=fp16 steps=4")


def test_a_resumed_run_takes_auto_for_what_it_was_begun_with():
    for word in ("fp32", "bf16"):
        line = f"precision={word} scheduler=constant"
        whole, run = go(f"{line} steps=4"), on(go(f"{line} steps=2"), "precision=auto steps=4")
        assert curve(run, "loss") == curve(whole, "loss")
        assert meta(run)["extra"]["contract"]["precision"] == word


def test_a_step_in_double_precision_is_the_same_under_auto():
    model = "model._target_=tests.lib.run_toys.DoubleNet steps=2"
    assert curve(go(f"{model} precision=auto"), "loss") == curve(go(model), "loss")


def test_fp16_searches_its_loss_scale_without_failing_and_resumes_bit_for_bit():
    line = "precision=fp16 scheduler=constant nonfinite.limit=2 objective._target_="
    line += "tests.lib.objective_toys.Loud"
    whole, part = go(f"{line} steps=6"), go(f"{line} steps=3")
    assert meta(part)["extra"]["loss_scale"] == {"value": 8192.0, "good_steps": 0}
    run = on(part, "steps=6")
    assert meta(run)["extra"]["loss_scale"] == meta(whole)["extra"]["loss_scale"]
    skipped = [entry.get("skipped") for entry in steps(run)]
    assert skipped[:4] == ["loss scale"] * 4, "more than nonfinite.limit"
    assert None in skipped
    found, expected = state(run), state(whole)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert curve(run, "loss") == curve(whole, "loss")
    assert curve(whole, "loss")[0] == pytest.approx(
        curve(go(f"{line} precision=fp32 steps=1"), "loss")[0], rel=1e-2
    )
