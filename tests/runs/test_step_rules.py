"""The step is a contract: what is typed about the cut changes nothing that a step is made of."""

import os
from itertools import pairwise

import pytest
import torch

from tests.lib.nightly import slow
from tests.lib.run_support import TOYS, curve, entries, go, only_run, read_json, state, steps
from trainer.cli.python_api import FinishedRun
from trainer.core.errors import ConfigError, DataError

LINE = "steps=8 eval.every=3 checkpoint.every=5 scheduler.warmup=3 checkpoint.keep=9"

SPLITS = (
    "accum=auto",
    *map(slow, ("accum=fixed accum.micro=3", "accum=budget accum.max_tokens=50 accum.micro=2")),
)

SAME = 1e-6
"""Largest relative difference of a loss or norm in float32 that is only cut differently."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The whole batch in one piece."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("reference"))
        return go(f"{LINE} accum=fixed accum.steps=1")


def assert_same_steps(found: FinishedRun, expected: FinishedRun) -> None:
    """The same samples, losses, norms, rates and cadences, to rounding."""
    assert entries(found, "samples.jsonl") == entries(expected, "samples.jsonl")
    for name in ("step", "epoch", "samples", "tokens", "lr"):
        assert curve(found, name) == curve(expected, name)
    for name in ("loss", "grad_norm"):
        assert curve(found, name) == pytest.approx(curve(expected, name), rel=SAME), name
    evaluated = [
        {e["step"]: e["eval_loss"] for e in entries(run) if "eval_loss" in e}
        for run in (found, expected)
    ]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=SAME)
    saved = [
        sorted(p.name for p in (run.folder / "checkpoints").iterdir()) for run in (found, expected)
    ]
    assert saved[0] == saved[1]


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_takes_the_same_steps(split, reference):
    assert_same_steps(go(f"{LINE} {split}"), reference)


def test_a_normalizer_is_the_one_that_is_typed_and_a_mean_of_means_depends_on_the_cut(reference):
    def loss(kind: str, micro: int) -> float:
        return curve(go(f"batch.normalizer={kind} accum.micro={micro} steps=1"), "loss")[0]

    tokens, means = curve(reference, "loss")[0], loss("micro_batches", 3)
    samples, whole = loss("samples", 3), loss("micro_batches", 8)
    assert samples > 2 * tokens, "a sample holds several tokens"
    assert tokens == pytest.approx(whole, rel=SAME)
    assert means != pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize(
    ("line", "sizes"),
    [
        ("steps=null epochs=1", [8, 8, 8, 8, 8, 2]),
        ("steps=9 batch.tail=drop", [8] * 9),
        ("steps=2 batch.global=509", [42, 42]),
    ],
)
def test_steps_and_epochs_give_exactly_what_they_say(line, sizes):
    run = go(line)
    assert [len(entry["ids"]) for entry in entries(run, "samples.jsonl")] == sizes
    assert read_json(run.folder / "plan.json")["steps"] == len(sizes)
    if "epochs=1" in line:
        assert curve(run, "epoch")[-1] == 1.0


def test_a_batch_of_tokens_closes_with_the_sample_that_reaches_it_for_every_split():
    line = "batch.unit=tokens batch.global=60 steps=7 eval.every=3 checkpoint.every=5"
    run, other = go(f"{line} accum.micro=2"), go(f"{line} accum=budget accum.max_tokens=30")
    tokens = [0, *curve(run, "tokens")]
    lengths = [after - before for before, after in pairwise(tokens)]
    ends = [epoch == int(epoch) for epoch in curve(run, "epoch")]
    for size, ends_epoch in zip(lengths, ends, strict=True):
        assert size >= 60 or ends_epoch
        assert size < 60 + 12
    assert len({len(entry["ids"]) for entry in entries(run, "samples.jsonl")}) > 1
    plan = read_json(run.folder / "plan.json")
    assert plan["unit"] == "tokens"
    assert plan["steps_per_epoch"] == ends.index(True) + 1
    assert_same_steps(other, run)


def test_one_step_without_a_loss_term_leaves_the_others_as_they_are(capsys):
    """The ids of the ledger are the ones that the data set's own argument takes."""
    line = "steps=4 batch.global=4 data.holdout=0.3 checkpoint.every=1 checkpoint.keep=9"
    plain = go(line)
    third = entries(plain, "samples.jsonl")[2]["ids"]
    run = go(f"'data.unlabelled={third}' {line}")
    assert [entry.get("skipped") for entry in steps(run)] == [None, None, "no loss terms", None]
    assert curve(run, "loss")[:2] == curve(plain, "loss")[:2]
    assert curve(run, "lr") == curve(plain, "lr")
    assert run.result["skipped_steps"] == 1
    assert [curve(run, name)[2] for name in ("loss", "grad_norm")] == [None, None]
    assert "step 3/4  loss        -  " in capsys.readouterr().out
    found, expected = state(run, 3), state(plain, 2)
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("line", ["steps=3 batch.global=4", "steps=9"])
def test_a_run_or_a_first_epoch_without_any_loss_term_is_a_fault_of_the_data(line):
    labelled = f"data.unlabelled={[*range(44)]}".replace(" ", "")
    match = "data: no sample of the first [36] steps has a loss term"
    with pytest.raises(DataError, match=match):
        go(f"{line} {labelled}")
    status = read_json(only_run() / "status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 3)


def test_bf16_keeps_fp32_weights_and_learns():
    line = "steps=8 batch.global=42 optimizer.lr=0.03"
    run, plain = go(f"{line} precision=bf16"), go(line)
    assert all(t.dtype == torch.float32 for n, t in state(run).items() if n.startswith("model."))
    assert curve(run, "loss")[-1] < curve(run, "loss")[0] - 0.1
    assert curve(run, "loss") == pytest.approx(curve(plain, "loss"), rel=2e-2)
    assert curve(run, "loss") != curve(plain, "loss")


def test_clipping_changes_the_update_and_not_the_norm():
    free, tight = (go(f"steps=1 clip_norm={norm} optimizer=sgd") for norm in ("null", "0.01"))
    assert curve(free, "grad_norm") == curve(tight, "grad_norm")
    moved = [state(run)["model.head.bias"] for run in (free, tight)]
    assert not moved[0].equal(moved[1])


def test_an_operator_without_a_deterministic_kernel_is_named(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        with pytest.raises(ConfigError) as raised:
            go(f"model._target_={TOYS}.Put deterministic=true steps=1")
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(mode=False)
    expected = (
        "deterministic=true: put_ has no deterministic kernel here; use another operator, or "
        "deterministic=false"
    )
    assert raised.value.faults == (expected,)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8", "cuBLAS refuses else"
    go(f"model._target_={TOYS}.Put steps=1")
