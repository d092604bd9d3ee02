"""`train verify` as it is typed: exit code, verify.json, and what stands on the screen."""

from __future__ import annotations

import pytest
import torch

from tests.lib.run_support import go, only_run, overrides, read_json, state
from trainer.cli.main import run as run_line
from trainer.verify.proof import verify

FIELDS = {
    "verdict", "exact", "max_relative_error", "reference", "dtype", "culprits", "worst", "limit",
    "notes",
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.mark.parametrize(
    ("line", "code", "culprits"),
    [
        ("", 0, set()),
        ("accum=auto accum.micro=null", 0, set()),
        ("model.norm=batch", 9, {"norm"}),
        ("model.norm=batch accum.micro=8", 0, set()),
        ("model._target_=tests.lib.run_toys.LowNet", 9, {"parameters"}),
        ("batch.normalizer=micro_batches", 9, {"batch.normalizer=micro_batches"}),
        ("batch.normalizer=samples", 0, set()),
        ("batch.unit=tokens batch.global=60 accum=budget accum.max_tokens=30", 0, set()),
        ("optimizer.groups='{\"embed*\": {frozen: true}}'", 0, set()),
    ],
)
def test_the_exit_code_the_file_and_the_screen_say_the_same(line, code, culprits, capsys):
    assert run_line(["verify", *overrides(line)]) == code
    report = read_json(only_run() / "verify.json")
    assert report.keys() >= FIELDS
    assert report["exact"] == (code == 0) == (report["max_relative_error"] <= 1e-10)
    assert report["verdict"] == ("not_exact" if code else "exact")
    assert {culprit["module"] for culprit in report["culprits"]} == culprits
    assert all(culprit["reason"] for culprit in report["culprits"])
    screen, error = capsys.readouterr()
    assert ("not exact" in screen) == bool(culprits)
    last = error.splitlines()[-1] if code else f"by {' and '.join(culprits)}; see verify.json"
    assert all(name in last.partition("; see ")[0] for name in culprits)
    assert last.endswith("verify.json")
    assert all(name in screen for name in culprits)
    assert not list(only_run().glob("checkpoints/*"))
    assert not (only_run() / "metrics.jsonl").exists()
    status = read_json(only_run() / "status.json")
    assert (status["state"], status["exit_code"]) == ("failed" if code else "completed", code)


def test_a_step_that_dropout_alone_makes_another_is_exact_without_it(capsys):
    assert run_line(["verify", *overrides("model.dropout=0.2")]) == 0
    report = read_json(only_run() / "verify.json")
    assert (report["verdict"], report["exact"]) == ("exact_without_dropout", False)
    assert [culprit["module"] for culprit in report["culprits"]] == ["dropout"]
    screen = " ".join(capsys.readouterr().out.split())
    assert "verdict exact without dropout, whose masks follow the micro-batches" in screen
    assert "culprits" not in screen


def test_a_module_that_cannot_be_compared_is_named_in_one_line(capsys):
    assert run_line(["verify", *overrides("model._target_=tests.lib.run_toys.NoisyNet")]) == 9
    report = read_json(only_run() / "verify.json")
    assert (report["verdict"], report["exact"]) == ("not_proven", False)
    assert [culprit["module"] for culprit in report["culprits"]] == ["dropout"]
    last = capsys.readouterr().err.splitlines()[-1]
    assert "not proven that the planned step is the whole-batch step: dropout cannot be" in last


PACKED = (
    "model=gpt_tiny model.width=12 model.num_layers=1 model.num_heads=2 model.vocab_size=16 "
    "model.max_length=12 batch.global=8 accum=budget accum.max_tokens=24 accum.packed=true "
)


@pytest.mark.parametrize(
    ("line", "notes"),
    [
        ("", []),
        ("parallel.ranks=2", ["the micro-batches of all 2 ranks were computed one after another"]),
        ("precision=bf16", ["precision=bf16 rounds the run's own step"]),
        ("accum.micro=8", ["the plan is the whole batch in one piece"]),
        (PACKED, []),
    ],
)
def test_what_a_reader_must_know_stands_beside_the_verdict(line, notes, capsys):
    assert run_line(["verify", *overrides(line)]) == 0
    report = read_json(only_run() / "verify.json")
    assert len(report["notes"]) == len(notes)
    assert all(each.startswith(note) for each, note in zip(report["notes"], notes, strict=True))
    screen = " ".join(capsys.readouterr().out.split())
    assert "exact: the planned step is the whole-batch step" in screen
    assert all(note in screen for note in notes)
    assert "up to 1e-10 is rounding" in screen


@pytest.mark.parametrize("key", ["init", "run", "resume"])
def test_the_weights_that_are_named_are_the_ones_verified(key, monkeypatch):
    trained = go("steps=2")
    seen = {}

    def spied(kit, batch, feed, *, whole_fits):
        seen.update((n, p.detach().clone()) for n, p in kit.model.module.named_parameters())
        return verify(kit, batch, feed, whole_fits=whole_fits)

    monkeypatch.setattr("trainer.commands.reading.verify", spied)
    lines = overrides("") if key == "init" else ["trust=[tests]"]
    assert run_line(["verify", f"{key}={trained.folder}", *lines]) == 0
    saved = state(trained)
    assert all(torch.equal(weight, saved[f"model.{name}"]) for name, weight in seen.items())
    assert seen


def test_weights_of_another_model_are_refused(capsys):
    trained = go("steps=2")
    line = overrides(f"init={trained.folder} model._target_=tests.lib.run_toys.LowNet")
    assert run_line(["verify", *line]) not in {0, 9}
    assert "init= needs weights of this very model" in capsys.readouterr().err
