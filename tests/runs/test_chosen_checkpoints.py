"""Choosing checkpoints and the end of a run: best, early stop, forks, time, epochs as a unit."""

import pytest
import torch

from tests.lib.run_support import curve, entries, go, on, only_run, read_json, state
from trainer import train
from trainer.core.errors import ConfigError, NoCheckpointError, Preempted

RISING = "steps=30 optimizer.lr=0.5 scheduler=constant eval.every=3"
"""A loss that goes up and down, so that the best evaluation is not the last."""


def evaluations(run):
    return [entry for entry in entries(run) if "eval_loss" in entry]


def steps_of(run):
    return sorted(int(path.name[5:]) for path in (run.folder / "checkpoints").glob("step-*"))


def test_the_best_checkpoint_stays_is_read_and_ends_a_run_that_gets_no_better():
    run = go(f"{RISING} checkpoint.best=eval_loss checkpoint.keep=1 stop.metric=eval_loss")
    seen = evaluations(run)
    best = min(seen, key=lambda entry: entry["eval_loss"])
    assert 0 < best["step"] < seen[-1]["step"] < 30, "a control: neither the last nor all steps"
    assert [each["step"] for each in seen if each["step"] > best["step"]] == [
        best["step"] + 3 * i for i in (1, 2, 3)
    ]
    assert steps_of(run) == [best["step"], seen[-1]["step"]]
    read = train(["evaluate", f"run={run.folder}", "step=best", "trust=[tests]"]).result
    assert (read["step"], read["eval_loss"]) == (best["step"], pytest.approx(best["eval_loss"]))
    assert read_json(run.folder / "status.json")["state"] == "completed"
    found = {"metric": "eval_loss", "value": best["eval_loss"], "step": best["step"]}
    assert run.result["best"] == found
    assert run.result["stopped"].startswith("stop.metric=eval_loss: 3 evaluations without a better")
    assert (run.folder / "train.log").read_text().count("3 evaluations without") == 1
    # It stays at its end, and goes on where it is let.
    saved = (run.folder / "config.yaml").read_text()
    assert on(run, "steps=40").result["step"] == seen[-1]["step"]
    assert (run.folder / "config.yaml").read_text() == saved
    assert on(run, "stop.patience=4 checkpoint.every=null").result["step"] == seen[-1]["step"] + 3
    assert on(run, "stop.metric=null").result["step"] == 30
    assert train(["evaluate", f"run={run.folder}", "trust=[tests]"]).result["step"] == 30


def test_a_fork_goes_on_from_a_checkpoint_as_the_run_did_and_leaves_it_alone(capsys):
    run = go("checkpoint.every=2 checkpoint.keep=9 eval.every=3")
    texts = [f'{{"step": {step}, "prompt": "a", "text": "b"}}\n' for step in (2, 4)]
    (run.folder / "generated.jsonl").write_text("".join(texts))
    before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*") if path.is_file()}
    fork = train([f"resume={run.folder}", "step=2", "name=fork", "trust=[tests]"])
    assert fork.folder != run.folder
    assert f"a new run from step 2 of outputs/{run.folder.parent.name}" in capsys.readouterr().out
    assert curve(fork, "loss") == curve(run, "loss")
    assert (fork.folder / "generated.jsonl").read_text() == texts[0]
    assert all(torch.equal(state(run)[name], tensor) for name, tensor in state(fork).items())
    assert before == {path: path.stat().st_mtime_ns for path in before}
    # From a folder of a checkpoint likewise, with another step where that is allowed.
    typed = ["optimizer.lr=1", "resume_allow=[optimizer.lr]", "trust=[tests]"]
    other = train([f"resume={run.folder}/checkpoints/step-00000004", *typed])
    assert curve(other, "loss")[:5] == curve(run, "loss")[:5] != curve(other, "loss")[1:]
    assert curve(other, "lr")[:4] == curve(run, "lr")[:4]
    assert curve(other, "lr")[4] > curve(run, "lr")[4]
    # A fork is a run, which goes on in its own folder.
    assert on(fork, "steps=8").folder == fork.folder
    for step, fault in (
        *(("3", "it has 2, 4, 6"), ("best", "has no such checkpoint")),
        ("newest", "step=newest: .* has no such checkpoint; it has 2, 4, 6"),
    ):
        with pytest.raises(NoCheckpointError, match=fault):
            train([f"resume={run.folder}", f"step={step}", "trust=[tests]"])
    with pytest.raises(ConfigError, match="init=RUN step=ema"):
        train([f"resume={run.folder}", "step=ema", "trust=[tests]"])


def test_a_run_whose_time_is_over_is_saved_and_goes_on():
    with pytest.raises(Preempted, match=r"^max_time=1s: stopped after step \d+, which is saved"):
        go("steps=1000000 max_time=1s")
    status = read_json(only_run() / "status.json")
    assert (status["state"], status["exit_code"]) == ("preempted", 75)


def test_evaluations_checkpoints_and_warm_up_count_epochs(capsys):
    line = (
        "steps=16 eval.every=0.5epoch checkpoint.every=1epoch checkpoint.keep=9 log.every=2epochs"
    )
    run = go(f"{line} scheduler.warmup=2epochs")  # an epoch is 42 samples: 6 steps of 8, one short
    assert [entry["step"] for entry in evaluations(run)] == [3, 6, 9, 12, 15, 16]
    assert steps_of(run) == [6, 12, 16]
    lrs = curve(run, "lr")
    assert lrs.index(max(lrs)) + 1 == 12
    screen = capsys.readouterr().out
    lines = [text for text in screen.splitlines() if "lr " in text]
    shown = [text.split("/")[0].split()[1] for text in lines if text.startswith("step ")]
    assert shown == ["1", "12", "16"]
    best = min(evaluations(run), key=lambda entry: entry["eval_loss"])
    found = {"metric": "eval_loss", "value": best["eval_loss"], "step": best["step"]}
    assert run.result["best"] == found, "though no checkpoint follows it"
    assert f"  best           eval_loss {found['value']:.4f} at step {found['step']}" in screen
