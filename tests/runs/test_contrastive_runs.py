"""A contrastive run from the command line: figures, resume, verify, and what is refused."""

import pytest

from tests.lib import pair_toys
from tests.lib.run_support import curve, entries, go, on, read_json, shell, state

PAIRS = pair_toys.__name__
LINE = (
    f"model._target_={PAIRS}.DoubleTowers data._target_={PAIRS}.Pairs objective=contrastive "
    "batch.global=16 accum=fixed accum.micro=3 optimizer.lr=1e-2 data.holdout=0.3"
)


def test_a_run_learns_its_scale_and_goes_on_as_if_it_had_not_stopped(capsys):
    whole = go(f"{LINE} steps=6 ema.decay=0.9 scheduler=constant model.dropout=0.2 eval.every=3")
    shown = " ".join(capsys.readouterr().out.split())
    assert "two passes: the rows of all samples" in shown
    assert "depend on the cut" not in shown
    part = go(f"{LINE} steps=3 ema.decay=0.9 scheduler=constant model.dropout=0.2 eval.every=3")
    again = on(part, "steps=6")
    for name, tensor in state(whole).items():
        assert (state(again)[name] == tensor).all(), name
    assert curve(again, "loss") == curve(whole, "loss")
    scales = curve(whole, "scale")
    assert scales[0] == pytest.approx(2.718281828**1.5)
    assert len({*scales}) == 6
    last = [each for each in entries(whole) if "eval_loss" in each][-1]
    recalls = [name for name in last if "recall" in name]
    assert recalls == [f"eval_recall_at_{k}" for k in (1, 5, 10)]
    assert 0 <= last["eval_recall_at_1"] <= last["eval_recall_at_10"] <= 1
    assert shell(f"evaluate run={whole.folder} trust=[tests]") == 0
    found = read_json(whole.folder / "evaluate.json")
    assert found["eval_loss"] == pytest.approx(last["eval_loss"])
