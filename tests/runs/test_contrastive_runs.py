"""A contrastive run from the command line: figures, resume and evaluation."""

import pytest

from tests.lib import pair_toys
from tests.lib.run_support import curve, entries, go, on, read_json, shell, state

PAIRS = pair_toys.__name__
LINE = (
    f"model._target_={PAIRS}.DoubleTowers data._target_={PAIRS}.Pairs objective=contrastive "
    "batch.global=16 accum=fixed accum.micro=3 optimizer.lr=1e-2 data.holdout=0.3 ema.decay=0.9 "
    "scheduler=constant model.dropout=0.2 eval.every=3"
)


@pytest.mark.slow
def test_a_run_learns_its_scale_and_goes_on_as_if_it_had_not_stopped(capsys):
    whole = go(f"{LINE} steps=6")
    assert "two passes: the rows of all samples" in " ".join(capsys.readouterr().out.split())
    again = on(go(f"{LINE} steps=3"), "steps=6")
    for name, tensor in state(whole).items():
        assert (state(again)[name] == tensor).all(), name
    assert curve(again, "loss") == curve(whole, "loss")
    scales = curve(whole, "scale")
    assert scales[0] == pytest.approx(2.718281828**1.5)
    assert len({*scales}) == 6
    last = [each for each in entries(whole) if "eval_loss" in each][-1]
    assert 0 <= last["eval_recall_at_1"] <= last["eval_recall_at_5"] <= last["eval_recall_at_10"]
    assert shell(f"evaluate run={whole.folder} trust=[tests]") == 0
    found = read_json(whole.folder / "evaluate.json")
    assert found["eval_loss"] == pytest.approx(last["eval_loss"])
