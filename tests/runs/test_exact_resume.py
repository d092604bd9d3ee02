"""What a resumed run keeps, may change, asks consent for and refuses.

That it ends bit for bit as if it had not been stopped is in `tests/reliability/test_resume.py`, and
what of the step may not change in `tests/reliability/test_bad_data.py`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.lib.run_support import (
    TOYS,
    assert_same_bits,
    curve,
    entries,
    go,
    in_use,
    meta,
    on,
    read_json,
    shell,
    state,
    steps,
    untimed,
)
from tests.lib.run_toys import Stop
from trainer.cli.main import FinishedRun
from trainer.core.errors import ConfigError, DataError, Preempted, TrainError

HOOK = f"hooks=[{TOYS}.Stop]"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Stop, "at", None)


def stopped(line: str, at: int) -> FinishedRun:
    """Start a run and stop it after a step."""
    Stop.at = at
    with pytest.raises(Preempted) as raised:
        go(f"{line} {HOOK}")
    Stop.at = None
    assert raised.value.exit_code == 75
    folder = max(Path().glob("outputs/*/*"), key=lambda path: path.name).absolute()
    return FinishedRun(folder=folder, exit_code=75, result={})


def assert_same_runs(found: FinishedRun, expected: FinishedRun) -> None:
    """The same weights, moments, metrics and ledger, bit for bit."""
    assert_same_bits(state(found), state(expected))
    assert untimed(found) == untimed(expected)
    assert entries(found, "samples.jsonl") == entries(expected, "samples.jsonl")
    for key in ("cursor", "tokens"):
        assert meta(found)["extra"][key] == meta(expected)["extra"][key]


def test_a_run_goes_on_from_a_checkpoint_in_the_middle_of_an_epoch():
    whole = go("steps=10 checkpoint.every=3 checkpoint.keep=9")
    part = go("steps=10 checkpoint.every=3 checkpoint.keep=9")
    # What a crash after step 8 leaves: the checkpoint of step 6, and metrics beyond it.
    for step in (9, 10):
        shutil.rmtree(part.folder / "checkpoints" / f"step-{step:08d}")
    (part.folder / "status.json").write_text('{"state": "running", "step": 0}')
    metrics = part.folder / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:8]) + lines[8][:25])
    assert_same_runs(on(part), whole)


def test_a_stopped_run_says_how_to_go_on_and_then_where_and_no_more(capsys):
    part = stopped("steps=6", at=2)
    status = read_json(part.folder / "status.json")
    assert (status["state"], status["exit_code"], status["step"]) == ("preempted", 75, 2)
    capsys.readouterr()
    assert shell(status["reason"].partition("go on with: train ")[2]) == 0
    screen = capsys.readouterr().out
    assert "after step 2" in screen
    assert "re-anchored" not in screen
    assert read_json(part.folder / "result.json")["step"] == 6
    assert read_json(part.folder / "status.json")["state"] == "completed"


def test_a_run_goes_on_in_the_same_run_of_wandb_though_its_folder_is_gone():
    part = stopped("steps=6 wandb.mode=offline", at=2)
    run_id = (part.folder / "wandb" / "id").read_text()
    assert meta(part)["extra"]["wandb"] == run_id
    shutil.rmtree(part.folder / "wandb")
    without = on(part, "wandb.mode=disabled")
    assert not (part.folder / "wandb").exists()
    assert meta(without)["extra"]["wandb"] == run_id
    more = on(part, "steps=8 wandb.mode=offline")
    assert (part.folder / "wandb" / "id").read_text() == run_id
    assert meta(more)["extra"]["wandb"] == run_id


def test_steps_may_grow_and_the_new_schedule_is_said(capsys):
    short = go("steps=4")
    before = curve(short, "lr")
    capsys.readouterr()
    again = on(short, "steps=8")
    screen = " ".join(capsys.readouterr().out.split())
    assert "4 -> 8" in screen
    assert "re-anchored" in screen
    fresh = go("steps=8")
    assert curve(again, "lr")[4:] == curve(fresh, "lr")[4:]
    assert curve(again, "lr")[:4] == before
    assert [entry["step"] for entry in steps(again)] == list(range(1, 9))
    assert read_json(again.folder / "plan.json")["steps"] == 8


def test_epochs_may_grow_too():
    short = go("epochs=1 steps=null")
    assert len(steps(on(short, "epochs=2"))) == 12


@pytest.mark.parametrize("line", ["model.norm=batch", "batch.normalizer=micro_batches"])
def test_a_change_of_the_cut_is_refused_where_the_step_depends_on_it(line):
    part = stopped(f"{line} steps=6", at=4)
    with pytest.raises(ConfigError, match=r"accum\.micro=2: the run has 3"):
        on(part, "accum.micro=2")
    assert len(steps(on(part, "accum.micro=2 resume_allow=[accum.micro]"))) == 6


def test_an_allowed_change_takes_effect():
    part = stopped("steps=6 scheduler=constant", at=4)
    again = on(part, "optimizer.lr=0.5 resume_allow=[optimizer.lr]")
    assert curve(again, "lr") == [1.2e-2] * 4 + [0.5] * 2


@pytest.mark.parametrize(
    ("change", "allowed"),
    [("optimizer.lr=0.5", "optimizer.lr"), ("data.size=43", "data")],
)
def test_what_was_allowed_is_not_asked_for_again(change, allowed, monkeypatch):
    """Killed before the next checkpoint, whose terms would be the new ones."""
    part = stopped("steps=6 scheduler=constant", at=3)

    def die(run: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("trainer.commands.train.train", die)
        with pytest.raises(KeyboardInterrupt):
            on(part, f"{change} resume_allow=[{allowed}]")
    again = on(part)
    assert len(steps(again)) == 6
    other = "data.size=44" if allowed == "data" else "optimizer.lr=0.4"
    with pytest.raises((ConfigError, DataError), match="resume_allow"):
        on(part, f"{other} steps=7")


@pytest.mark.parametrize(
    "change",
    [
        "accum.micro=2",
        "accum=budget accum.max_tokens=30",
        "accum=auto activation_checkpointing=auto",
    ],
)
def test_how_the_step_is_computed_may_change(change):
    whole = go("steps=7")
    again = on(stopped("steps=7", at=3), change)
    assert curve(again, "loss") == pytest.approx(curve(whole, "loss"), rel=1e-6)
    assert entries(again, "samples.jsonl") == entries(whole, "samples.jsonl")


def test_a_resumed_auto_run_does_not_tune_again(monkeypatch):
    part = stopped("accum=auto steps=6", at=3)
    cap = read_json(part.folder / "plan.json")["max_tokens"]

    def tune(*_: object) -> None:
        raise AssertionError("tuned again")

    monkeypatch.setattr("trainer.build.prepare.tune", tune)
    again = on(part)
    plan = read_json(again.folder / "plan.json")
    assert plan["max_tokens"] == cap
    assert "from the checkpoint" in plan["cap_source"]
    with pytest.raises(AssertionError, match="tuned again"):
        on(again, "steps=9 accum.micro=2")


def files(folder: Path) -> dict[str, bytes]:
    """What the next resumption goes by, and how often there was one."""
    paths = [folder / "config.yaml", folder / "status.json", *folder.glob(".hydra/**/*")]
    return {str(path): path.read_bytes() for path in paths if path.is_file()}


def test_a_refused_resumption_leaves_the_records_as_they_are():
    part = stopped("steps=6 scheduler=constant", at=3)
    before = files(part.folder)
    allowed = "optimizer.lr=0.5 resume_allow=[optimizer.lr,data.size]"
    with in_use(part.folder), pytest.raises(TrainError, match="in use by process") as raised:
        on(part, allowed)
    assert raised.value.exit_code == 4
    assert files(part.folder) == before
    with pytest.raises(DataError, match="changed since the checkpoint") as refused:
        on(part, f"data.size=43 {allowed}")
    assert refused.value.exit_code == 3
    assert files(part.folder) == before
    assert not list(part.folder.glob(".tmp-*"))
    assert curve(on(part), "lr") == [1.2e-2] * 6
    assert (part.folder / ".hydra" / "resume_1" / "overrides.yaml").exists()


def test_the_checkpoint_knows_the_step_where_the_records_were_changed():
    part = stopped("steps=6 scheduler=constant", at=3)
    record = part.folder / "config.yaml"
    record.write_text(record.read_text().replace("lr: 0.012", "lr: 0.5"))
    with pytest.raises(ConfigError, match=r"optimizer\.lr=0\.5: the run has 0\.012"):
        on(part, "optimizer.lr=0.5")
    assert len(steps(on(part, "optimizer.lr=0.5 resume_allow=[optimizer.lr]"))) == 6


def test_no_such_run_and_no_usable_checkpoint_end_with_4(capsys):
    assert shell("resume=outputs/nowhere") == 4
    part = stopped("steps=6", at=3)
    (weights,) = part.folder.glob("checkpoints/*/model.safetensors")
    weights.write_bytes(b"x")
    assert shell(f"resume={part.folder} trust=[tests]") == 4
    assert "model.safetensors" in capsys.readouterr().err


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before_and_says_so(capsys):
    whole = go("steps=7 checkpoint.every=2 checkpoint.keep=9")
    part = stopped("steps=7 checkpoint.every=2 checkpoint.keep=9", at=5)
    os.truncate(part.folder / "checkpoints" / "step-00000005" / "model.safetensors", 60)
    capsys.readouterr()
    again = on(part)
    assert "step-00000005" in capsys.readouterr().out
    assert_same_bits(state(again), state(whole))
    assert curve(again, "loss") == curve(whole, "loss")


def test_a_new_run_starts_from_another_s_weights_at_step_0():
    first = go("steps=5")
    second = go(
        f"init={first.folder} steps=5 optimizer.lr=1e-9 checkpoint.every=1 checkpoint.keep=9"
    )
    assert second.folder != first.folder
    assert [entry["step"] for entry in steps(second)] == [1, 2, 3, 4, 5]
    assert curve(second, "lr")[0] == 1e-9
    found, expected = state(second, 1), state(first)
    for name, tensor in expected.items():
        if name.startswith("model."):
            assert found[name].allclose(tensor, atol=1e-6), name
    assert not found["model.head.weight"].equal(state(go("steps=1"))["model.head.weight"])
