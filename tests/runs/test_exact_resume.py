"""What a resumed run keeps, may change, asks consent for and refuses."""

import shlex
import shutil
import signal
from pathlib import Path

import pytest

from tests.lib.run_support import (
    TOYS,
    curve,
    go,
    in_use,
    on,
    only_run,
    overrides,
    read_json,
    shell,
)
from tests.lib.run_toys import Stop
from trainer.cli.python_api import FinishedRun
from trainer.core.errors import ConfigError, DataError, TrainError


def stopped(line: str, at: int = 3) -> FinishedRun:
    """Start a run and stop it after a step."""
    Stop.at = at
    assert shell(shlex.join(overrides(f"{line} hooks=[{TOYS}.Stop]"))) == 75
    Stop.at = None
    return FinishedRun(folder=only_run(), exit_code=75, result={})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Six steps at one rate, stopped after three of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        return stopped("steps=6 scheduler=constant")


@pytest.fixture
def part(whole: FinishedRun, tmp_path: Path) -> FinishedRun:
    """A copy of that run."""
    folder = shutil.copytree(whole.folder, tmp_path / "part", symlinks=True)
    return FinishedRun(folder=folder, exit_code=75, result={})


def test_a_stopped_run_says_how_to_go_on_and_then_where_and_no_more(capsys):
    """By Ctrl-C, which a scheduler's SIGTERM is another of."""
    Stop.signal = signal.SIGINT
    run = stopped("steps=6", at=2).folder
    Stop.signal = signal.SIGTERM
    err = capsys.readouterr().err
    assert err.startswith("train: stopped after step 2")
    assert "train resume=" in err
    assert "error" not in err
    status = read_json(run / "status.json")
    assert (status["state"], status["exit_code"], status["step"]) == ("preempted", 75, 2)
    assert shell(status["reason"].partition("go on with: train ")[2]) == 0
    screen = capsys.readouterr().out
    assert "after step 2" in screen
    assert "now spans" not in screen
    assert read_json(run / "status.json")["state"] == "completed"


def test_a_run_that_was_killed_behind_its_last_checkpoint_ends_with_the_figures_of_all_its_steps():
    run = go("steps=4 eval.every=2 checkpoint.every=2")
    before = run.result
    (run.folder / "result.json").unlink()
    (run.folder / "status.json").write_text('{"state": "running", "step": 4}')
    (trash := run.folder / "checkpoints" / ".trash-step-00000002").mkdir()
    after = on(run).result
    assert after["loss"] == before["loss"] == curve(run, "loss")[-1]
    of_process = {"seconds", "time", "advice", "peak_bytes", "predicted"}
    same = before.keys() - of_process
    assert {key: after[key] for key in same} == {key: before[key] for key in same}
    assert not trash.exists()


def test_steps_may_grow_and_the_new_schedule_is_said(capsys):
    short = go("steps=4")
    before = curve(short, "lr")
    capsys.readouterr()
    again = on(short, "steps=8")
    screen = " ".join(capsys.readouterr().out.split())
    assert "4 -> 8" in screen
    assert "now spans" in screen
    assert curve(again, "lr") == [*before, *curve(go("steps=8"), "lr")[4:]]
    assert read_json(again.folder / "plan.json")["steps"] == 8


def test_an_allowed_change_takes_effect_and_is_not_asked_for_again(part):
    changed = on(part, "optimizer.lr=0.5 data.size=43 resume_allow=[optimizer.lr,data]")
    assert curve(changed, "lr") == [1.2e-2] * 3 + [0.5] * 3
    for other in ("optimizer.lr=0.4", "data.size=44"):
        with pytest.raises((ConfigError, DataError), match="resume_allow"):
            on(part, f"{other} steps=7")
    assert curve(on(part, "steps=7"), "lr") == [1.2e-2] * 3 + [0.5] * 4


def test_a_resumed_auto_run_does_not_tune_again(monkeypatch):
    run = stopped("accum=auto steps=6")
    cap = read_json(run.folder / "plan.json")["max_tokens"]

    def tune(*_: object) -> None:
        raise AssertionError("tuned again")

    monkeypatch.setattr("trainer.assemble.tuning.tune", tune)
    plan = read_json(on(run).folder / "plan.json")
    assert plan["max_tokens"] == cap
    assert "from its checkpoint" in plan["cap_source"]
    with pytest.raises(AssertionError, match="tuned again"):
        on(run, "steps=9 accum.micro=2")


def test_a_refused_resumption_leaves_the_records_as_they_are(part):
    def records() -> dict[str, bytes]:
        """What the next resumption goes by, and how often there was one."""
        found = [part.folder / "config.yaml", part.folder / "status.json"]
        found += part.folder.glob(".hydra/**/*.yaml")
        return {str(path): path.read_bytes() for path in found}

    before, allowed = records(), "optimizer.lr=0.5 resume_allow=[optimizer.lr,data.size]"
    with in_use(part.folder), pytest.raises(TrainError, match="in use by process") as raised:
        on(part, allowed)
    assert raised.value.exit_code == 4
    assert records() == before
    with pytest.raises(DataError, match="changed since the checkpoint") as refused:
        on(part, f"data.size=43 {allowed}")
    assert refused.value.exit_code == 3
    assert records() == before
    assert not list(part.folder.glob(".tmp-*"))
    assert curve(on(part), "lr") == [1.2e-2] * 6
    assert (part.folder / ".hydra" / "resumed" / "overrides.yaml").exists()
