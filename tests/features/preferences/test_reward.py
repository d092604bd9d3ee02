"""A reward model takes the step of a plain loop, and scores texts and pairs."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from tests.lib.nightly import slow
from tests.lib.preference_toys import (
    EXACT,
    NUM_PAIRS,
    ONE_STEP,
    PAIRS,
    WRONG,
    batch_of,
    error,
    save_pair_files,
)
from tests.lib.run_support import curve, entries, go, read_json, shell

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

LINE = (
    f"{ONE_STEP} model.path=llama model.task=sequence_classification accum.micro=3 "
    "model.dtype=float64"
)


@pytest.fixture(autouse=True)
def _files() -> None:
    save_pair_files()
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained("llama", num_labels=1, pad_token_id=2)
    kind = transformers.AutoModelForSequenceClassification
    kind.from_config(config).save_pretrained("llama")


def plain(*, has_margin: bool = True) -> tuple[float, dict]:
    """The loss of the whole batch, and the weights after one step."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        "llama", dtype=torch.float64
    )
    ids, mask, _ = batch_of(PAIRS)
    numbers = model(input_ids=ids, attention_mask=mask.long()).logits[:, 0]
    gap = numbers[:NUM_PAIRS] - numbers[NUM_PAIRS:]
    if has_margin:
        gap = gap - torch.tensor([pair["margin"] for pair in PAIRS])
    loss = -F.logsigmoid(gap).mean()
    loss.backward()
    named = [(n, p) for n, p in model.named_parameters() if p.grad is not None]
    return loss.item(), {name: (p - p.grad).detach() for name, p in named}


@pytest.mark.parametrize("reads", [True, slow(False)])
def test_a_step_is_that_of_a_plain_loop_with_the_margins_of_the_records(reads):
    run = go(f"{LINE} steps=1 {'' if reads else 'data.columns={margin:null}'}")
    loss, weights = plain(has_margin=reads)
    _, others = plain(has_margin=not reads)
    assert curve(run, "loss") == pytest.approx([loss], rel=EXACT)
    assert error(run, weights) < EXACT
    assert error(run, others) > WRONG


def predictions(folder: Path, name: str = "") -> list:
    (file,) = (file for file in folder.glob("predict*.jsonl") if name in file.name)
    found = [json.loads(line)["prediction"] for line in file.read_text().splitlines()]
    file.unlink()
    return found


def test_texts_and_pairs_are_scored_and_an_export_has_one_number():
    best = "checkpoint.best=eval_accuracy"
    run = go(f"{LINE} steps=2 data.holdout=0.3 eval.every=1 {best}")
    assert 0 <= [each for each in entries(run) if "eval_loss" in each][-1]["eval_accuracy"] <= 1
    assert shell(f"evaluate run={run.folder} eval.predictions=true") == 0
    assert all(len(pair) == 2 for pair in predictions(run.folder))
    Path("texts.jsonl").write_text('{"prompt": "the", "chosen": " step"}\n{"chosen": "a batch"}\n')
    for name, kind in (("texts", float), ("pairs", list)):
        assert shell(f"predict run={run.folder} data.path={name}.jsonl") == 0
        assert all(isinstance(number, kind) for number in predictions(run.folder, name))
    assert shell(f"export run={run.folder} export.to=out") == 0
    assert len(read_json(Path("out/config.json"))["id2label"]) == 1
