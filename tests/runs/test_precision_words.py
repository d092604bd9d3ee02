"""`precision=auto` as a run shows, records and resumes it."""

import pytest
import torch

from tests.lib.run_support import TOYS, curve, go, on, read_json, saved, state, steps
from trainer.core.errors import ConfigError
from trainer.core.gpu import has_fast_bf16

HERE = "bf16" if has_fast_bf16(torch.device("cpu")) else "fp32"


def test_auto_is_shown_and_recorded_as_what_it_became_and_computes_that(capsys):
    run, typed = go("precision=auto steps=2"), go(f"precision={HERE} steps=2")
    assert curve(run, "loss") == curve(typed, "loss")
    assert read_json(run.folder / "plan.json")["precision"] == HERE
    assert saved(run, "terms")["contract"]["precision"] == HERE
    assert f"cpu, {HERE}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=f"precision=fp16: the run has {HERE}; to change it"):
        on(run, "precision=fp16 steps=4")


def test_a_resumed_run_takes_auto_for_what_it_was_begun_with():
    line = "precision=bf16 scheduler=constant"
    whole, run = go(f"{line} steps=4"), on(go(f"{line} steps=2"), "precision=auto steps=4")
    assert curve(run, "loss") == curve(whole, "loss")
    assert saved(run, "terms")["contract"]["precision"] == "bf16"


def test_fp16_searches_its_loss_scale_without_failing_and_resumes_bit_for_bit():
    line = "precision=fp16 scheduler=constant nonfinite.limit=2 objective._target_="
    line += "tests.lib.objective_toys.Loud"
    whole, part = go(f"{line} steps=6"), go(f"{line} steps=3")
    assert saved(part, "loss_scale") == {"value": 8192.0, "good_steps": 0}
    run = on(part, "steps=6")
    assert saved(run, "loss_scale") == saved(whole, "loss_scale")
    skipped = [entry.get("skipped") for entry in steps(run)]
    assert skipped[:4] == ["loss scale"] * 4, "more than nonfinite.limit"
    assert None in skipped
    found, expected = state(run), state(whole)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert curve(run, "loss") == curve(whole, "loss")


@pytest.mark.parametrize(("micro", "count"), [(2, 1), (8, 0)])
def test_low_precision_weights_whose_gradients_add_up_are_warned_of_once(micro, count, capsys):
    run = go(f"command=plan model._target_={TOYS}.LowNet accum.micro={micro}")
    text = "model: bfloat16 weights: their gradients lose bits as 4 micro-batches are added up"
    warnings = read_json(run.folder / "plan.json")["warnings"]
    assert [each[: len(text)] for each in warnings] == [text] * count
    assert " ".join(capsys.readouterr().out.split()).count(text) == count
