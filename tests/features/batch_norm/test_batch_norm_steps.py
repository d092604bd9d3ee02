"""A step under each mode of BatchNorm, in float64: what it depends on, and what it does not."""

import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.lib import batch_norm_toys
from tests.lib.cli_support import CHECKOUT, prepared
from tests.lib.docs_support import write_files_of
from tests.lib.nightly import slow
from tests.lib.run_support import curve, entries, go, on, overrides, read_json, state, steps
from tests.reliability.rank_work import run_as_rank
from trainer import train

OWN = batch_norm_toys.__name__
NET = f"model._target_={OWN}.Convolved data._target_={OWN}.Pictures optimizer=sgd optimizer.lr=0.05"
GHOST = f"{NET} batchnorm=ghost batchnorm.group=4"
EXACT, WRONG = 1e-12, 1e-3


def distance(found, expected) -> float:
    """The largest difference of a tensor of the model, buffers included, by its largest value."""
    pairs = [(t, state(found)[n]) for n, t in state(expected).items() if n.startswith("model.")]
    assert pairs
    return max(
        float((other - tensor).abs().max()) / max(1e-30, float(tensor.abs().max()))
        for tensor, other in pairs
        if tensor.is_floating_point()
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six steps of groups of four, each step in one piece."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        return go(f"{GHOST} accum.micro=8")


@pytest.mark.parametrize(
    "line",
    ["accum=budget accum.max_tokens=4", slow("accum.micro=4 model.recomputes=true")],
)
def test_ghost_takes_the_same_steps_however_they_are_cut_or_recomputed(line, whole):
    found = go(f"{GHOST} {line}")
    assert curve(found, "micro_batches")[:5] == [2] * 5
    assert distance(found, whole) < EXACT
    assert found.result["eval_loss"] == pytest.approx(whole.result["eval_loss"], rel=EXACT)


@pytest.mark.slow
def test_micro_takes_other_steps_for_each_cut(whole):
    one, two = (go(f"{NET} batchnorm=micro accum.micro={n} name=n{n}") for n in (4, 8))
    assert distance(one, two) > WRONG
    assert distance(one, whole) > WRONG, "whose statistics move twice a step"


def ran_on_two(ranks, line, tmp_path):
    config = prepared(" ".join(overrides(f"{line} parallel.ranks=2"))).config
    folder = tmp_path / "run"
    assert ranks.run(2, run_as_rank, config, folder, {}) == [{"code": 0}] * 2
    return folder


@pytest.mark.slow
def test_ghost_takes_the_same_steps_on_two_ranks(whole, ranks, tmp_path):
    found = ran_on_two(ranks, f"{GHOST} accum.micro=4 parallel=fsdp", tmp_path)
    assert distance(found, whole) < EXACT


def test_sync_on_two_ranks_is_the_whole_batch_on_one_and_a_rank_without_samples_takes_part(
    ranks, tmp_path
):
    """The last step of the epoch has a micro-batch on one rank alone."""
    line = f"{NET} batch.global=7 steps=6 data.size=41"
    found = ran_on_two(ranks, f"{line} batchnorm=sync accum.micro=4", tmp_path)
    assert distance(found, go(f"{line} batchnorm=pooled accum.micro=7")) < EXACT


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_statistics_that_it_had():
    first = go(f"{GHOST} accum.micro=4 steps=3 scheduler=constant")
    expected = go(f"{GHOST} accum.micro=4 scheduler=constant")
    assert distance(on(first, "steps=6"), expected) == 0


@pytest.mark.slow
def test_verify_proves_ghost_and_frozen():
    proven = read_json(go(f"command=verify {GHOST} accum.micro=4").folder / "verify.json")
    assert proven["verdict"] == "exact"
    assert any("groups of 4 samples, whatever the cut: norm" in n for n in proven["notes"])
    frozen = go(f"command=verify {NET} batchnorm=frozen accum.micro=3")
    assert read_json(frozen.folder / "verify.json")["verdict"] == "exact"


def test_a_sample_alone_with_several_values_of_each_channel_is_no_fault():
    line = f"batchnorm=micro accum.micro=4 data.size=47 model._target_={OWN}"
    assert curve(go(f"{NET} {line}.Residual"), "micro_batches")[-1] == 2
    go(f"{NET} command=plan {line}.Convolved batch.tail=drop")


def test_auto_leaves_models_without_batchnorm_alone_and_warns_with_numbers():
    plain = read_json(go(f"{NET} model._target_={OWN}.Plain steps=1").folder / "plan.json")
    assert plain["batchnorm"] is None
    (warning,) = read_json(go(f"{NET} steps=1").folder / "plan.json")["warnings"]
    assert "over 2 to 3 samples" in warning
    assert "not over the 8 of the step" in warning
    assert "move 3 times a step" in warning
    assert "batchnorm=ghost batchnorm.group=3 depends on no cut" in warning
    planned = read_json(go(f"{NET} accum=auto steps=1").folder / "plan.json")
    assert planned["warnings"] == []
    assert planned["batchnorm"] == "over groups of 8 samples, whatever the cut"
    assert planned["batchnorm_mode"] == "ghost"


@pytest.mark.slow
def test_the_mode_of_the_documentation_has_groups_of_four_in_its_two_pairs(whole, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # which gets the current folder
    write_files_of((CHECKOUT / "docs/how-to/own/batchnorm.md").read_text())
    found = go(f"{NET} batchnorm=pairs batchnorm.pairs=2 accum.micro=4", config_dir="own")
    assert distance(found, whole) < EXACT
    assert read_json(found.folder / "plan.json")["batchnorm"] == "over 2 pairs of samples"


@pytest.mark.slow
def test_a_replayed_step_counts_its_statistics_once_and_a_skipped_one_not_at_all():
    line = f"{GHOST} accum.micro=8 batch.global=16 steps=2 scheduler=constant"
    plain, poor = go(line), go(f"{line} accum.gradient._target_={OWN}.Poor")
    assert sum(entry.get("replays", 0) for entry in steps(poor)) == 1
    assert distance(poor, plain) < EXACT
    odd = go(f"{line} accum.gradient._target_={OWN}.Odd steps=1")
    assert steps(odd)[0]["skipped"] == "not finite"
    statistics = {n: t for n, t in state(odd).items() if "running" in n}
    assert all(bool((t == float("var" in n)).all()) for n, t in statistics.items())
    assert len(statistics) == 10


@pytest.mark.slow
def test_precise_statistics_are_those_of_many_samples_and_nothing_of_training_notices():
    """The first 40 samples are those of the first five steps."""
    line = f"{GHOST} scheduler=constant steps=5 eval.every=2 model._target_={OWN}.Looking"
    plain = go(f"{line} accum.micro=4")
    run, other = (go(f"{line} accum.micro={n} batchnorm.precise=40") for n in (4, 8))
    assert distance(run, plain) == 0
    own, last = ([e["eval_loss"] for e in entries(r) if "eval_loss" in e] for r in (plain, run))
    assert not set(own) & set(last)
    assert state(run)["model.looks"] == state(plain)["model.looks"]
    assert other.result["eval_loss"] == pytest.approx(last[-1], rel=EXACT)
    for each, typed in ((run, ""), (plain, "batchnorm.precise=40")):
        train(["evaluate", f"run={each.folder}", "trust=[tests]", *typed.split()])
        assert read_json(each.folder / "evaluate.json")["eval_loss"] == last[-1]
    train(["export", f"run={run.folder}", "export.to=weights", "trust=[tests]"])
    found, before = load_file("weights/model.safetensors"), state(run)
    net, used = batch_norm_toys.Looking(), entries(run, "samples.jsonl")
    net.load_state_dict(found)
    ids = [i for entry in used for i in entry["ids"]]
    with torch.no_grad():
        values = net.first(batch_norm_toys.Pictures().pictures[ids]).transpose(0, 1).flatten(1)
    assert torch.allclose(found["norm.running_mean"], values.mean(1), rtol=1e-10)
    assert torch.allclose(found["norm.running_var"], values.var(1, correction=0), rtol=1e-10)
    assert not torch.allclose(before["model.norm.running_mean"], values.mean(1), rtol=1e-2)
