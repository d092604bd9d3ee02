"""Memory that runs out is an event: the same step in smaller pieces, or one line that says why."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tests.lib.run_support import (
    TOYS,
    assert_same_bits,
    curve,
    entries,
    go,
    meta,
    only_run,
    overrides,
    read_json,
    shell,
    state,
    steps,
)
from tests.lib.run_toys import Greedy, Rows
from trainer.plan.cuts import Auto
from trainer.tune.tensors import PeakBytes

CRAMPED = f"accum.gradient._target_={TOYS}.Cramped"


pytestmark = pytest.mark.usefixtures("own_folder")


def test_a_device_of_a_stated_size_is_filled_and_never_overrun() -> None:
    """The tuner plans for so many bytes; the run then lives within them, counted byte by byte."""
    limit = 64 * 1024
    plan = read_json(
        go(f"command=plan accum=auto accum.memory={limit} batch.global=40").folder / "plan.json"
    )
    assert plan["accum_steps"] > 1
    assert plan["predicted_peak_bytes"] <= plan["memory_limit_bytes"] < limit
    with PeakBytes(limit=limit) as counted:
        run = go(f"accum=auto accum.memory={limit} batch.global=40 steps=3")
    assert sum(entry.get("replays", 0) for entry in steps(run)) == 0
    assert counted.estimate.peak_bytes <= limit
    assert curve(run, "micro_batches")[0] > 1
    whole = go("accum.micro=40 batch.global=40 steps=3")
    assert curve(run, "loss") == pytest.approx(curve(whole, "loss"), rel=1e-6)


@pytest.mark.parametrize(
    "line", ["accum.micro=8", "accum=budget accum.max_tokens=96", "accum=auto"]
)
def test_a_step_that_does_not_fit_is_computed_again_in_smaller_pieces(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"{line} model.dropout=0.4 steps=5"
    run = go(f"{line} {CRAMPED} accum.gradient.limit=9000")
    replays = [entry.get("replays", 0) for entry in steps(run)]
    assert replays[0] > 0
    assert sum(replays) == run.result["replays"]
    assert replays[-1] == 0, "the cap stays lowered"
    said = capsys.readouterr().out
    assert said.count("out of memory: computed again") == sum(map(bool, replays))
    assert curve(run, "samples") == [8, 16, 24, 32, 40]
    assert entries(run, "samples.jsonl") == entries(go(line), "samples.jsonl")


def test_a_replay_has_the_bits_of_a_run_that_began_with_smaller_pieces() -> None:
    late = go(f"accum.micro=8 model.dropout=0.4 steps=4 {CRAMPED} accum.gradient.limit=11000")
    first, *later = [entry.get("replays", 0) for entry in steps(late)]
    assert first > 0
    assert not any(later)
    fine = f"accum.micro={8 >> first} model.dropout=0.4 steps=4"
    early = go(f"{fine} {CRAMPED} accum.gradient.limit={2**30}")
    assert_same_bits(state(late), state(early))
    assert curve(late, "loss") == curve(early, "loss")


def test_memory_that_shrinks_in_the_middle_of_a_run_is_met_there() -> None:
    line = f"accum.micro=8 steps=6 {CRAMPED} accum.gradient.limit=11000"
    run = go(f"{line} accum.gradient.after=3")
    replays = [entry.get("replays", 0) for entry in steps(run)]
    assert [bool(count) for count in replays] == [False, False, False, True, False, False]
    assert curve(run, "micro_batches")[:3] == [1, 1, 1]
    assert curve(run, "micro_batches")[4] == 2 ** replays[3]
    assert meta(run)["extra"]["cut"]["state"]["micro"] == 8 >> replays[3]


def test_one_sample_that_cannot_fit_ends_with_5_and_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = f"{CRAMPED} accum.gradient.limit=500 data.holdout=0.3"
    assert shell(" ".join(overrides(line))) == 5
    said = capsys.readouterr().err
    pattern = r"sample (\d+) of (\d+) tokens does not fit into memory, even alone"
    (named,) = re.findall(pattern, said)
    assert Rows().lengths[int(named[0])] == int(named[1]), "the id of the data set"
    assert len(said.splitlines()) == 1
    status = read_json(only_run() / "status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 5)


def test_a_memory_too_small_for_the_longest_sample_is_told_before_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shell(" ".join(overrides("accum=auto accum.memory=6000 data.holdout=0.3"))) == 5
    said = capsys.readouterr().err
    (named,) = re.findall(r"sample (\d+) of 12 tokens does not fit, even alone", said)
    assert Rows().lengths[int(named)] == 12, "the id of the data set"
    assert "6000" in said or "accum.memory" in said
    assert not (only_run() / "metrics.jsonl").exists()


def test_an_update_that_runs_out_of_memory_is_never_tried_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    update, tried = Greedy.step, []

    def counted(optimizer: Greedy) -> None:
        tried.append(optimizer.left)
        update(optimizer)

    monkeypatch.setattr(Greedy, "step", counted)
    line = f"optimizer._target_={TOYS}.Greedy optimizer.after=2 checkpoint.every=2"
    assert shell(" ".join(overrides(line))) == 5
    (said,) = capsys.readouterr().err.splitlines()
    assert "in the update of Greedy, which is never tried again" in said
    assert tried[-3:] == [2, 1, 0], "predicting memory steps copies, before"
    assert tried.count(0) == 1
    run = only_run()
    assert len(steps(run)) == 2
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    assert read_json(run / "status.json")["exit_code"] == 5


def test_memory_that_runs_out_elsewhere_ends_with_5_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room\nfor the model")

    monkeypatch.setattr(f"{TOYS}.Net.__init__", fail)
    assert shell(" ".join(overrides(""))) == 5
    (said,) = capsys.readouterr().err.splitlines()
    assert "out of memory outside of micro-batches: no room for the model" in said


@pytest.mark.parametrize("after", [pytest.param(0, marks=pytest.mark.nightly), 2])
def test_a_device_smaller_than_the_tuner_was_told_costs_replays_and_no_bit(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tuned for more than there is, or more than there is left after two steps."""
    line = f"accum=auto steps=4 batch.global=40 model.dropout=0.4 {CRAMPED}"
    line = f"{line} accum.gradient.after={after}"
    plain = go(f"{line} accum.gradient.limit={2**40}")
    lied_to = go(f"{line} accum.gradient.limit=12000")
    replays = [entry.get("replays", 0) for entry in steps(lied_to)]
    assert [bool(count) for count in replays] == [step == after for step in range(4)]
    lowered = meta(lied_to)["extra"]["cut"]["state"]["lowered"]
    assert lowered < meta(plain)["extra"]["cut"]["state"]["max_tokens"]
    if after:
        assert curve(lied_to, "loss")[:after] == curve(plain, "loss")[:after]
        return
    tuned = Auto.tuned
    monkeypatch.setattr(
        Auto, "tuned", lambda *found: replace(tuned(*found), lowered=lowered), raising=True
    )
    told = go(f"{line} accum.gradient.limit={2**40}")
    assert curve(told, "loss") == curve(lied_to, "loss")
    assert curve(told, "micro_batches") == curve(lied_to, "micro_batches")
    assert_same_bits(state(told), state(lied_to))
