"""Policies of pairs take the step of a plain loop over the whole batch, and go on as they began."""

import math
import shlex
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.lib.cli_support import prepared
from tests.lib.nightly import nightly, slow
from tests.lib.preference_toys import (
    EXACT,
    NUM_PAIRS,
    ONE_STEP,
    PAIRS,
    WRONG,
    error,
    pair_losses,
    save_pair_files,
)
from tests.lib.run_support import curve, entries, go, overrides, shell, state
from tests.reliability.rank_work import on_ranks, run_as_rank
from trainer import train

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

LINE = f"{ONE_STEP} model.path=llama objective=dpo"
DOUBLE = f"{LINE} model.dtype=float64"


@pytest.fixture(autouse=True)
def _files() -> None:
    save_pair_files()


def plain(name: str, steps: int, size: int = NUM_PAIRS) -> tuple[list[float], dict]:
    """Losses and last weights of a plain loop; below the whole batch a mean over parts."""
    model, before = (
        transformers.AutoModelForCausalLM.from_pretrained("llama", dtype=torch.float64)
        for _ in range(2)
    )
    losses = []
    for _ in range(steps):
        parts = [PAIRS[i : i + size] for i in range(0, NUM_PAIRS, size)]
        loss = sum(pair_losses(name, model, before, part) for part in parts) / len(parts)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad)
                parameter.grad = None
    return losses, {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("sigmoid", "accum=fixed accum.micro=3"),
        ("orpo", "accum=fixed accum.micro=3 objective=orpo"),
        slow("smooth", "accum=fixed accum.micro=3 objective.label_smoothing=0.2"),
        slow("ipo", "accum.micro=3 objective.loss=ipo"),
        slow("hinge", "accum.micro=3 objective.loss=hinge"),
        nightly("sigmoid", "accum.micro=2 parallel.ranks=2"),
    ],
)
def test_two_steps_are_those_of_a_plain_loop_however_the_batch_is_cut(name, typed):
    run = go(f"{DOUBLE} steps=2 {typed}")
    losses, weights = plain(name, 2)
    assert curve(run, "loss") == pytest.approx(losses, rel=EXACT)
    assert error(run, weights) < EXACT
    assert error(run, plain(name, 2, 4)[1]) > WRONG


def test_a_run_goes_on_bit_for_bit_with_the_weights_that_it_began_with():
    early, whole = go(f"{LINE} steps=1"), go(f"{LINE} steps=2")
    train([f"resume={early.folder}", "steps=2"])
    assert all(torch.equal(state(early)[name], each) for name, each in state(whole).items())
    # What is frozen is named by its digest alone, and no part of an export.
    assert not any("frozen_model" in name for name in state(early))
    # A run that begins with its weights compares with those, and has to keep them.
    second = go(f"{LINE} steps=1 init={early.folder}")
    assert curve(second, "loss") == pytest.approx([math.log(2)])
    assert any("frozen_model" in name for name in state(second))
    again = go(f"{LINE} steps=2 init={early.folder}")
    train([f"resume={second.folder}", "steps=2"])
    assert all(torch.equal(state(second)[name], each) for name, each in state(again).items())
    assert shell(f"export run={second.folder} export.to=out") == 0
    assert not any("frozen_model" in name for name in load_file("out/model.safetensors"))


@pytest.mark.parametrize("how", ["", nightly("sync=immediate")])
@pytest.mark.slow
def test_shards_take_the_same_steps_and_go_on_bit_for_bit(how, ranks):
    two = f"{LINE} parallel=fsdp parallel.ranks=2 {how}"
    one, whole = go(f"{LINE} steps=3"), on_ranks(ranks, overrides(f"{two} steps=3"))
    assert curve(whole, "loss") == pytest.approx(curve(one, "loss"), rel=1e-5)
    config = prepared(shlex.join(overrides(f"{two} steps=3"))).config
    early = Path("early").absolute()
    ranks.run(2, run_as_rank, config, early, {"stop_after": 1})
    assert ranks.run(2, run_as_rank, config, early, {"resume": True}) == [{"code": 0}] * 2
    assert all(torch.equal(state(early)[name], each) for name, each in state(whole).items())


@pytest.mark.slow
def test_below_an_adapter_is_the_model_before_training_and_the_step_is_exact():
    line = f"{LINE} adapter=lora adapter.lora_dropout=0.0 accum.micro=3"
    run, copied = go(f"{line} steps=2"), go(f"{line} steps=2 adapter.init_lora_weights=pissa")
    for each in (run, copied):  # pissa takes its matrices out of the base, which is then a copy
        first, second = curve(each, "loss")
        assert first == pytest.approx(math.log(2))
        assert second < first
    assert train(["verify", *overrides(line)]).result["verdict"] == "exact"


@pytest.mark.slow
def test_verify_proves_the_step_and_evaluations_have_the_rewards():
    assert train(["verify", *overrides(f"{LINE} accum.micro=3")]).result["verdict"] == "exact"
    best = "checkpoint.best=eval_rewards_accuracy"
    run = go(f"{LINE} steps=2 objective=auto eval.every=1 data.holdout=0.3 {best}")
    last = [each for each in entries(run) if "eval_loss" in each][-1]
    margin = last["eval_rewards_chosen"] - last["eval_rewards_rejected"]
    assert last["eval_rewards_margin"] == pytest.approx(margin)
    assert shell(f"evaluate run={run.folder} eval.predictions=true") == 0
    assert shell(f"predict run={run.folder} data.path=pairs.jsonl log.generate_tokens=2") == 0


def test_a_model_that_computes_a_loss_of_any_rows_learns_pairs_by_itself():
    transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=300).save_pretrained("gpt2")
    config = "model.config=gpt2/config.json model.task=causal_lm tokenizer=hf tokenizer.path=llama"
    go(f"{ONE_STEP} {config} steps=1")
