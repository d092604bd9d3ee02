"""A run that was stopped goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
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
    only_run,
    overrides,
    read_json,
    shell,
    state,
    steps,
    untimed,
)
from tests.lib.run_toys import Stop
from trainer.cli.main import FinishedRun
from trainer.core.errors import ConfigError, DataError, Preempted, TrainError

MEAN_OF_MEANS = "batch.normalizer=micro_batches"
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


@pytest.mark.parametrize(
    "line",
    [
        "model.dropout=0.4",
        "accum=budget accum.max_tokens=40 model.dropout=0.4",
        "accum=auto model.dropout=0.4",
        "precision=bf16 model.dropout=0.4",
        "checkpoint.asynchronous=true checkpoint.every=2",
        f"num_workers=2 data._target_={TOYS}.Plain batch.global=7",
        f"num_workers=0 data._target_={TOYS}.Plain batch.global=7",
        "batch.unit=tokens batch.global=50 accum=budget accum.max_tokens=40",
        "optimizer=sgd scheduler=wsd scheduler.warmup=3",
        f"optimizer._target_={TOYS}.Descent optimizer.weight_decay=0.1",
        "model.norm=batch batchnorm=micro",
        f"accum._target_={TOYS}.Pairs",
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(line: str) -> None:
    whole = go(f"{line} steps=9 eval.every=4")
    part = stopped(f"{line} steps=9 eval.every=4", at=4)
    status = read_json(part.folder / "status.json")
    assert (status["state"], status["exit_code"], status["step"]) == ("preempted", 75, 4)
    again = on(part)
    assert again.folder == part.folder
    assert_same_runs(again, whole)
    assert read_json(again.folder / "status.json")["state"] == "completed"


def test_a_run_goes_on_from_a_checkpoint_in_the_middle_of_an_epoch() -> None:
    whole = go("steps=10 checkpoint.every=3 checkpoint.keep=9")
    part = go("steps=10 checkpoint.every=3 checkpoint.keep=9")
    # What a crash after step 8 leaves: the checkpoint of step 6, and metrics beyond it.
    for step in (9, 10):
        folder = part.folder / "checkpoints" / f"step-{step:08d}"
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    (part.folder / "status.json").write_text(json.dumps({"state": "running", "step": 0}))
    metrics = part.folder / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:8]) + lines[8][:25])
    assert_same_runs(on(part), whole)


def test_a_torn_last_line_is_mended() -> None:
    part = stopped("steps=6", at=3)
    with (part.folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "lo')
    again = on(part)
    assert [entry["step"] for entry in steps(again)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_every_signal_to_stop_saves_at_the_step_boundary(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stop, "signal", number)
    part = stopped("steps=6 checkpoint.every=null", at=2)
    assert [path.name for path in (part.folder / "checkpoints").iterdir()] == ["step-00000002"]
    assert len(steps(part)) == 2


def test_a_stopped_run_says_how_to_go_on() -> None:
    part = stopped("steps=6", at=2)
    reason = read_json(part.folder / "status.json")["reason"]
    assert shell(reason.partition("go on with: train ")[2]) == 0
    assert read_json(part.folder / "result.json")["step"] == 6


def test_a_run_goes_on_in_the_same_run_of_wandb_though_its_folder_is_gone() -> None:
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


def test_the_newest_run_goes_on_by_itself() -> None:
    part = stopped("steps=5", at=2)
    line = " ".join(overrides(f"steps=5 {HOOK} resume=auto"))
    assert shell(line) == 0
    assert only_run() == part.folder
    assert len(steps(part)) == 5


def test_steps_may_grow_and_the_new_schedule_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    short = go("steps=4")
    before = curve(short, "lr")
    capsys.readouterr()
    again = on(short, "steps=8")
    said = " ".join(capsys.readouterr().out.split())
    assert "4 -> 8" in said
    assert "re-anchored" in said
    fresh = go("steps=8")
    assert curve(again, "lr")[4:] == curve(fresh, "lr")[4:]
    assert curve(again, "lr")[:4] == before
    assert [entry["step"] for entry in steps(again)] == list(range(1, 9))
    assert read_json(again.folder / "plan.json")["steps"] == 8


def test_epochs_may_grow_too() -> None:
    short = go("epochs=1 steps=null")
    assert len(steps(on(short, "epochs=2"))) == 12


def test_an_unchanged_resumption_says_nothing_of_the_schedule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    part = stopped("steps=6", at=2)
    capsys.readouterr()
    on(part)
    said = capsys.readouterr().out
    assert "re-anchored" not in said
    assert "after step 2" in said


@pytest.mark.parametrize(
    "change",
    ["batch.global=4", "seed=1", "model.width=4", "optimizer.lr=0.5", "clip_norm=2.0", "steps=3"],
)
def test_a_change_of_the_step_is_refused_with_a_diff(change: str) -> None:
    part = stopped("steps=6", at=4)
    before = state(part)
    key, _, value = change.partition("=")
    with pytest.raises(ConfigError, match=f"{key}={value}: the run has"):
        on(part, change)
    assert_same_bits(state(part), before)
    assert read_json(part.folder / "status.json")["state"] == "preempted"


@pytest.mark.parametrize(
    "line", ["model.norm=batch", "model.norm=batch batchnorm=micro", MEAN_OF_MEANS]
)
def test_a_change_of_the_cut_is_refused_where_the_step_depends_on_it(line: str) -> None:
    part = stopped(f"{line} steps=6", at=4)
    with pytest.raises(ConfigError, match=r"accum\.micro=2: the run has 3"):
        on(part, "accum.micro=2")
    assert len(steps(on(part, "accum.micro=2 resume_allow=[accum.micro]"))) == 6


def test_an_allowed_change_takes_effect() -> None:
    part = stopped("steps=6 scheduler=constant", at=4)
    again = on(part, "optimizer.lr=0.5 resume_allow=[optimizer.lr]")
    assert curve(again, "lr") == [1.2e-2] * 4 + [0.5] * 2


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ("optimizer.lr=0.5", "optimizer.lr"),
        ("data.size=43", "data"),
        ("clip_norm=2.0", "clip_norm"),
    ],
)
def test_what_was_allowed_is_not_asked_for_again(
    change: str, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_changed_data_end_with_3() -> None:
    part = stopped("steps=6", at=3)
    with pytest.raises(DataError, match="changed since the checkpoint") as raised:
        on(part, "data.size=43 resume_allow=[data.size]")
    assert raised.value.exit_code == 3
    assert len(steps(on(part, "data.size=43 resume_allow=[data]"))) == 6


@pytest.mark.parametrize(
    "change",
    [
        "accum.micro=2",
        "accum=budget accum.max_tokens=30",
        "accum=auto",
        "num_workers=1",
        "checkpoint.asynchronous=true",
        "accum=auto activation_checkpointing=auto",
    ],
)
def test_how_the_step_is_computed_may_change(change: str) -> None:
    whole = go("steps=7")
    again = on(stopped("steps=7", at=3), change)
    assert curve(again, "loss") == pytest.approx(curve(whole, "loss"), rel=1e-6)
    assert entries(again, "samples.jsonl") == entries(whole, "samples.jsonl")


def test_a_resumed_auto_run_does_not_tune_again(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_cap_that_memory_lowered_stays_lowered() -> None:
    line = (
        f"accum=budget accum.max_tokens=90 steps=6 checkpoint.every=2 "
        f"accum.gradient._target_={TOYS}.Cramped accum.gradient.limit=9000"
    )
    part = stopped(line, at=4)
    replays = [entry.get("replays", 0) for entry in steps(part)]
    assert sum(replays) > 0
    lowered = meta(part)["extra"]["cut"]["state"]["lowered"]
    assert lowered < 90
    again = on(part)
    assert [entry.get("replays", 0) for entry in steps(again)][4:] == [0, 0]
    assert meta(again)["extra"]["cut"]["state"]["lowered"] == lowered
    assert_same_runs(again, go(line))


def test_two_processes_cannot_hold_one_run() -> None:
    part = stopped("steps=6", at=3)
    with in_use(part.folder), pytest.raises(TrainError, match="in use by process") as raised:
        on(part)
    assert raised.value.exit_code == 4
    assert read_json(part.folder / "status.json")["state"] == "preempted"
    assert len(steps(on(part))) == 6


def files(folder: Path) -> dict[str, bytes]:
    """What the next resumption goes by, and how often there was one."""
    kept = [folder / "config.yaml", folder / "status.json", *folder.glob(".hydra/**/*")]
    return {str(path): path.read_bytes() for path in kept if path.is_file()}


def test_a_refused_resumption_leaves_the_records_as_they_are() -> None:
    part = stopped("steps=6 scheduler=constant", at=3)
    before = files(part.folder)
    allowed = "optimizer.lr=0.5 resume_allow=[optimizer.lr,data.size]"
    with in_use(part.folder), pytest.raises(TrainError, match="in use by process"):
        on(part, allowed)
    assert files(part.folder) == before
    with pytest.raises(DataError, match="changed since the checkpoint"):
        on(part, f"data.size=43 {allowed}")
    assert files(part.folder) == before
    assert not list(part.folder.glob(".tmp-*"))
    assert curve(on(part), "lr") == [1.2e-2] * 6
    assert (part.folder / ".hydra" / "resume_1" / "overrides.yaml").exists()


def test_the_checkpoint_knows_the_step_where_the_records_were_changed() -> None:
    part = stopped("steps=6 scheduler=constant", at=3)
    record = part.folder / "config.yaml"
    record.write_text(record.read_text().replace("lr: 0.012", "lr: 0.5"))
    with pytest.raises(ConfigError, match=r"optimizer\.lr=0\.5: the run has 0\.012"):
        on(part, "optimizer.lr=0.5")
    assert len(steps(on(part, "optimizer.lr=0.5 resume_allow=[optimizer.lr]"))) == 6


def test_no_such_run_and_no_usable_checkpoint_end_with_4(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shell("resume=outputs/nowhere") == 4
    part = stopped("steps=6", at=3)
    (weights,) = part.folder.glob("checkpoints/*/model.safetensors")
    weights.write_bytes(b"x")
    assert shell(f"resume={part.folder} trust=[tests]") == 4
    assert "model.safetensors" in capsys.readouterr().err


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = go("steps=7 checkpoint.every=2 checkpoint.keep=9")
    part = stopped("steps=7 checkpoint.every=2 checkpoint.keep=9", at=5)
    os.truncate(part.folder / "checkpoints" / "step-00000005" / "model.safetensors", 60)
    capsys.readouterr()
    again = on(part)
    assert "step-00000005" in capsys.readouterr().out
    assert_same_bits(state(again), state(whole))
    assert curve(again, "loss") == curve(whole, "loss")


def test_a_new_run_starts_from_another_s_weights_at_step_0() -> None:
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
