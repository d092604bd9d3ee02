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
