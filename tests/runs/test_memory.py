"""Memory that runs out is an event: the same step in smaller pieces, or one line that says why."""

import re
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.lib.run_support import (
    TOYS,
    curve,
    go,
    only_run,
    overrides,
    read_json,
    saved,
    shell,
    steps,
)
from tests.lib.run_toys import Greedy, Rows
from trainer.tune.peak_bytes import PeakBytes

CRAMPED = f"accum.gradient._target_={TOYS}.Cramped"


class RealBytes(PeakBytes):
    """Leaves out the fakes of predictions, which are there until Python collects its cycles."""

    def _count(self, tensor):
        is_fake = tensor.is_meta or isinstance(tensor, FakeTensor)
        return None if is_fake else super()._count(tensor)


def test_a_device_of_a_stated_size_is_filled_and_never_overrun():
    """The tuner plans for so many bytes; the run then lives within them, counted byte by byte."""
    limit = 64 * 1024
    line = f"accum=auto accum.memory={limit} batch.global=40 steps=3"
    plan = read_json(go(f"command=plan {line}").folder / "plan.json")  # what it times is cached
    assert plan["accum_steps"] > 1
    assert plan["predicted_peak_bytes"] <= plan["memory_limit_bytes"] < limit
    assert plan["step_seconds"] > 0
    with RealBytes() as counted:
        run = go(line)
    assert sum(entry.get("replays", 0) for entry in steps(run)) == 0
    assert counted.estimate.peak_bytes <= limit
    assert curve(run, "micro_batches")[0] > 1


def test_one_sample_that_cannot_fit_ends_with_5_and_is_named(capsys):
    line = f"{CRAMPED} accum.gradient.limit=500 data.holdout=0.3"
    assert shell(" ".join(overrides(line))) == 5
    error = capsys.readouterr().err
    pattern = r"sample (\d+) of (\d+) tokens does not fit into memory, even alone"
    (named,) = re.findall(pattern, error)
    assert Rows().lengths[int(named[0])] == int(named[1]), "the id of the data set"
    assert len(error.splitlines()) == 1
    assert not [*Path().glob("outputs/*")], "no step was taken"


def test_an_update_that_runs_out_of_memory_is_never_tried_again(capsys, monkeypatch):
    update, tried = Greedy.step, []

    def counted(optimizer: Greedy) -> None:
        tried.append(optimizer.left)
        update(optimizer)

    monkeypatch.setattr(Greedy, "step", counted)
    line = f"optimizer._target_={TOYS}.Greedy optimizer.after=2 checkpoint.every=2"
    assert shell(" ".join(overrides(line))) == 5
    error, ended, page, end = capsys.readouterr().err.splitlines()
    assert "in the update of Greedy, which may be half done" in error
    assert ended == "train: ended after step 2; step 2 is saved"
    assert Path(page.removeprefix("train: see ")).name == "report.html"
    assert end.startswith("train: go on with: train resume=")
    assert tried[-3:] == [2, 1, 0], "predicting memory steps copies, before"
    assert tried.count(0) == 1
    assert len(steps(only_run())) == 2
    assert read_json(only_run() / "status.json")["exit_code"] == 5


def test_memory_that_runs_out_elsewhere_ends_with_5_too(capsys, monkeypatch):
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room\nfor the model")

    monkeypatch.setattr(f"{TOYS}.Net.__init__", fail)
    assert shell(" ".join(overrides(""))) == 5
    (error,) = capsys.readouterr().err.splitlines()
    assert "out of memory outside of micro-batches: no room for the model" in error


def test_a_device_smaller_than_the_tuner_knew_costs_a_replay_and_lowers_the_cap(capsys):
    """Tuned for more than there is left after two steps."""
    line = f"accum=auto steps=4 batch.global=40 {CRAMPED} accum.gradient.after=2"
    short = go(f"{line} accum.gradient.limit=12000")
    assert capsys.readouterr().out.count("out of memory: computed again") == 1
    replays = [entry.get("replays", 0) for entry in steps(short)]
    assert [bool(count) for count in replays] == [False, False, True, False]
    assert sum(replays) == short.result["replays"]
    (written,) = (short.folder / "errors").iterdir()  # the first time alone
    assert written.name == "out-of-memory-step3-rank0.txt"
    first, predicted, limit, _, *shapes = written.read_text().splitlines()
    assert "rank 0, micro-batch 1, on cpu: tensors exceed the limit of 12000" in first
    assert predicted.startswith("predicted peak: ")
    assert limit.startswith("limit of tensors: ")
    assert [shape[0] for shape in shapes] == [">", *" " * (len(shapes) - 1)]
    assert sum(int(shape[2:].split()[1]) for shape in shapes) == 40
    cap = read_json(short.folder / "plan.json")["max_tokens"]
    assert saved(short, "cut")["settings"]["cap_after_failure"] < cap
