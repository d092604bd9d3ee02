"""`train verify` as it is typed: exit code, verify.json, and what stands on the screen."""

import pytest
import torch

from tests.lib.nightly import nightly, slow
from tests.lib.run_support import go, only_run, overrides, read_json, state
from trainer.cli.main import run as run_line
from trainer.verify.proof import verify

FIELDS = {
    "verdict", "exact", "max_relative_error", "reference", "dtype", "culprits", "worst", "limit",
    "notes",
}  # fmt: skip
PACKED = (
    "model=gpt_tiny model.width=12 model.num_layers=1 model.num_heads=2 model.vocab_size=16 "
    "model.max_length=12 batch.global=8 accum=budget accum.max_tokens=24 accum.packed=true"
)
BY_TOKENS = "batch.unit=tokens batch.global=60 accum=budget accum.max_tokens=30 "
FROZEN = "optimizer.groups='{\"embed*\": {frozen: true}}'"
NOISY = "model._target_=tests.lib.run_toys.NoisyNet"
OF_RANKS = "the micro-batches of all 2 ranks were computed one after another; sync=deferred was "
COMPILED = "compile=true compiles the run's own step"
ROUNDED = "precision=bf16 adds rounding to the run's own step"
NOT_PROVEN = "not proven that the planned step is the whole-batch step: dropout cannot be compared"


@pytest.mark.parametrize(
    ("line", "notes"),
    [
        (f"{BY_TOKENS} {FROZEN} batch.normalizer=samples", []),
        slow(f"{PACKED} compile=true", [COMPILED]),
        ("accum.micro=8", ["the plan is one micro-batch"]),
        ("precision=bf16", [ROUNDED]),
        nightly("parallel.ranks=2 precision=bf16", [OF_RANKS, ROUNDED]),
    ],
)
def test_an_exact_step_is_said_in_the_file_and_on_the_screen_with_what_a_reader_must_know(
    line, notes, capsys
):
    assert run_line(["verify", *overrides(line)]) == 0
    report = read_json(only_run() / "verify.json")
    assert report.keys() >= FIELDS
    assert (report["verdict"], report["exact"], report["culprits"]) == ("exact", True, [])
    assert report["max_relative_error"] <= 1e-10
    assert len(report["notes"]) == len(notes)
    assert all(each.startswith(note) for each, note in zip(report["notes"], notes, strict=True))
    screen = " ".join(capsys.readouterr().out.split())
    assert "verdict exact: the planned step is the whole-batch step" in screen
    assert all(note in screen for note in notes)
    assert "up to 1e-10 is rounding" in screen
    assert not (only_run() / "metrics.jsonl").exists()
    assert read_json(only_run() / "status.json")["state"] == "completed"


@pytest.mark.parametrize(
    ("line", "verdict", "culprit", "last"),
    [
        ("model.norm=batch", "not_exact", "norm", "not the whole-batch step: relative error"),
        ("model.dropout=0.2", "exact_without_dropout", "dropout", None),
        (NOISY, "not_proven", "dropout", NOT_PROVEN),
    ],
)
def test_a_culprit_stands_in_the_file_on_the_screen_and_in_the_last_line(
    line, verdict, culprit, last, capsys
):
    code = 0 if last is None else 9
    assert run_line(["verify", *overrides(line)]) == code
    report = read_json(only_run() / "verify.json")
    assert (report["verdict"], report["exact"]) == (verdict, False)
    assert report["max_relative_error"] > 1e-10
    [found] = report["culprits"]
    assert (found["module"], bool(found["reason"])) == (culprit, True)
    screen, error = capsys.readouterr()
    words = " ".join(screen.split())
    assert f"verdict {verdict.replace('_', ' ')}" in words
    off = report["error_without_draws"]
    assert (off is not None and off <= 1e-10) == (verdict == "exact_without_dropout")
    assert off is None or f"error {off:.2e} without random draws" in words
    assert ("culprits" in screen) == (last is not None)
    if last is not None:
        text, _, file = error.splitlines()[-1].partition("; see ")
        assert last in text
        assert culprit in text
        assert file.endswith("verify.json")
    assert read_json(only_run() / "status.json")["exit_code"] == code


def test_the_weights_that_are_named_are_the_ones_verified(monkeypatch, capsys):
    trained, seen = go("steps=2"), {}
    saved = state(trained)

    def spied(context, batch, feed, *, whole_fits):
        seen.update((n, p.detach().clone()) for n, p in context.model.module.named_parameters())
        return verify(context, batch, feed, whole_fits=whole_fits)

    monkeypatch.setattr("trainer.commands.verify.verify", spied)
    for key in ("init", "run", "resume"):
        lines = overrides("") if key == "init" else ["trust=[tests]"]
        assert run_line(["verify", f"{key}={trained.folder}", *lines]) == 0
        assert seen
        assert all(torch.equal(weight, saved[f"model.{name}"]) for name, weight in seen.items())
        seen.clear()
    line = overrides(f"init={trained.folder} model._target_=tests.lib.run_toys.DoubleNet")
    assert run_line(["verify", *line]) == 4
    assert "init= needs weights of this very model" in capsys.readouterr().err
