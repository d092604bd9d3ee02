"""A contrastive run from the command line: figures, resume, verify, and what is refused."""

from __future__ import annotations

import shlex

import pytest
import torch

from tests.lib import pair_toys
from tests.lib.run_support import curve, entries, go, on, overrides, read_json, shell, state
from trainer.core.errors import ConfigError

PAIRS = pair_toys.__name__
LINE = (
    f"model._target_={PAIRS}.DoubleTowers data._target_={PAIRS}.Pairs objective=contrastive "
    "batch.global=16 accum=fixed accum.micro=3 optimizer.lr=1e-2 data.holdout=0.3"
)


class Scales(pair_toys.DoubleTowers):
    """Two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))


class FixedScale(pair_toys.DoubleTowers):
    """A scale that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        del self.logit_scale
        self.logit_scale = 4.6


pytestmark = pytest.mark.usefixtures("own_folder")


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


@pytest.mark.nightly
def test_verify_says_exact_and_what_cannot_be_is_refused():
    assert shell(shlex.join(["verify", *overrides(LINE)])) == 0
    refused = {
        "batch.global=1": r"batch.global=1: a step of 1 sample, .* compares at least 2",
        "batch.global=9 steps=9": r"batch.tail=keep: step 4 has 1 sample, .* type batch.tail=drop",
        "batch=ramp batch.stages={0:4,8:1} steps=6 batch.global=null": r"a stage of 1 samples is "
        "below the 2 samples that Contrastive compares",
        "batch=ramp batch.stages={0:4,8:19} steps=6 batch.global=null": r"step 4 has 1 sample",
        "batch.unit=tokens batch.global=9 steps=20": r"batch.tail=keep: step \d+ has 1 sample",
        f"model._target_={__name__}.Scales": r"model.logit_scale: has shape \(2,\), and",
        f"model._target_={__name__}.FixedScale": r"model.logit_scale: has float, and",
        "accum.gradient=sum": r"Sum is wrong for Contrastive, .*: type accum.gradient=auto",
        "objective.loss=siglip": r"objective.loss=siglip: needs logit_scale and logit_bias",
        "model._target_=tests.lib.run_toys.DoubleNet": r"gives no embeddings in a Tensor",
        "sync=overlapped parallel=ddp parallel.ranks=2": r"TwoPass has several passes",
        "objective=next_token accum.gradient=two_pass": r"TwoPass is wrong for NextToken",
    }
    for typed, text in refused.items():
        names = {each.partition("=")[0] for each in typed.split()}
        kept = [each for each in LINE.split() if each.partition("=")[0] not in names]
        with pytest.raises(ConfigError, match=text):
            go(" ".join(["command=plan", *kept, typed]))
