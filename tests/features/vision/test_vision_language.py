"""Images with a text: a vision-language model takes the same step on two ranks as on one."""

import shlex
from pathlib import Path

import pytest

from tests.lib.cli_support import prepared
from tests.lib.run_support import curve, entries
from tests.reliability.rank_work import run_as_rank
from trainer.cli.main import run as run_line

LINE = (
    "recipe=image_text data.holdout=0.99 model.dtype=float64 batch.global=7 epochs=1 "
    "optimizer=sgd optimizer.lr=0.1 scheduler=constant precision=fp32 device=cpu "
    "wandb.mode=disabled eval.every=null eval.samples=2 log.samples=true accum=fixed"
)


@pytest.mark.slow
def test_two_ranks_take_the_samples_of_one_in_its_order_with_the_tail_of_the_epoch(ranks):
    assert run_line(shlex.split(f"{LINE} accum.micro=7 name=one")) == 0
    whole = next(Path("outputs").glob("*/*-one"))
    typed = shlex.split(f"{LINE} accum.micro=2 parallel=ddp parallel.ranks=2")
    run = Path("run").absolute()
    assert ranks.run(2, run_as_rank, prepared(shlex.join(typed)).config, run, {}) == [
        {"code": 0},
        {"code": 0},
    ]
    for name, key in (("samples.jsonl", "ids"), ("metrics.jsonl", "samples")):
        assert [e.get(key) for e in entries(whole, name)] == [
            e.get(key) for e in entries(run, name)
        ]
    assert curve(run, "loss") == pytest.approx(curve(whole, "loss"), rel=1e-12)
    assert len(entries(run, "samples.jsonl")[-1]["ids"]) == 4, "the tail of 18 samples"


def test_another_number_of_image_tokens_than_the_model_takes_is_one_line_before_the_first_step(
    capsys,
):
    assert run_line(shlex.split(f"{LINE} accum.micro=7 data.image_tokens=5")) == 3
    (fault,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "data: LlavaForConditionalGeneration does not take the longest sample: " in fault
    assert "Image features and image tokens do not match, tokens: 5" in fault
    assert not list(Path().glob("outputs/*/*/metrics.jsonl"))
