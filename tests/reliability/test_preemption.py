"""Harness 17: a signal ends in a checkpoint, exit 75, and a run that goes on exactly."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lib.nightly import counts, nightly
from tests.reliability import lab, toys
from tests.reliability.rank_runs import RankRun
from tests.reliability.support import cases, intact_steps, replay
from trainer.checkpoint.store import CheckpointStore
from trainer.commands import train
from trainer.core import signals
from trainer.core.run_folder import RunFolder
from trainer.training import loop
from trainer.training.checkpointing import Checkpointer

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
AT_ONCE_S = 20.0
"""What a busy machine may need for what takes milliseconds; what it is told from takes a minute."""

STEP_S = 0.05

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def slowly(step: int) -> None:
    """Make steps long enough for a signal to come in one."""
    time.sleep(STEP_S)


def wait_for(path: Path, child: lab.Child, seconds: float = 150.0) -> None:
    """Wait until a path exists, or the child ended."""
    limit = time.monotonic() + seconds
    while not path.exists() and not child.has_ended():
        assert time.monotonic() < limit, f"no {path}"
        time.sleep(0.001)


def saved(folder: Path) -> list[int]:
    return CheckpointStore(folder / "checkpoints").steps()


def assert_ends_as(undisturbed: Path, settings: Any, folder: Path) -> None:
    """Go on with a run, and compare what it leaves with what the undisturbed one does."""
    if not undisturbed.exists():
        assert lab.run(settings, undisturbed).code == 0
    ended = lab.go_on(settings, folder)
    assert ended.code == 0, ended
    lab.assert_same(lab.outcome(folder), lab.outcome(undisturbed), folder.name)


@counts(2, 30)
def test_a_signal_at_any_time_saves_and_the_run_goes_on_exactly(count, tmp_path):
    settings = lab.config("data._target_=tests.reliability.toys.DrawnRows", "model.dropout=0.2")
    stopped = 0
    for case, chance in cases(count):
        folder, number = tmp_path / f"run{case}", SIGNALS[case % len(SIGNALS)]
        log = tmp_path / f"log{case}"
        child = lab.fork(lambda f=folder: lab.run(settings, f, after_step=slowly).code, log)
        wait_for(folder / "status.json", child)
        time.sleep(chance.uniform(0, 7 * STEP_S))
        with lab.timed() as took:
            child.kill(number)
            code = child.wait()
            assert took() < AT_ONCE_S, replay(case)
        assert code in (0, 75), f"{replay(case)}: {code} {log.read_text()}"
        if code == 75:
            stopped += 1
            assert lab.status(folder)["state"] == "preempted"
            last = max(intact_steps(folder / "checkpoints"), default=0)  # 0: before it took a step
            assert last == lab.status(folder)["step"], replay(case)
        assert_ends_as(tmp_path / "undisturbed", settings, folder)
    print(f"{count} signals, {stopped} runs stopped and resumed, all equal to the undisturbed one")
    assert stopped >= count // 2


def struck(work: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Do some work, if any, behind a signal, which comes the first time alone."""
    left = [signal.SIGTERM]

    def strike_and_work(*args: Any, **kwargs: Any) -> Any:
        if left:
            os.kill(os.getpid(), left.pop())
        return work and work(*args, **kwargs)

    return strike_and_work


UNMEASURED = "data._target_=tests.reliability.test_bad_data.Unmeasured"
TUNED = ("accum=auto", "accum.micro=null")


@pytest.mark.parametrize(
    ("place", "name", "more", "step"),
    [
        (toys, "on_read", (UNMEASURED, "+data.bad=0"), None),
        nightly(toys, "on_call", TUNED, None),
        nightly(toys, "on_read", (), None),
        nightly(loop, "evaluate_parts", ("eval.at_start=true",), 0),
        nightly(loop, "train_step", (), 1),
        (CheckpointStore, "_commit", (), 2),
    ],
    ids=["measuring", "tuning", "loading", "evaluating at once", "the first step", "saving"],
)
def test_a_signal_at_any_stage_ends_in_a_run_that_goes_on(
    place, name, more, step, tmp_path, monkeypatch
):
    """Where nothing was saved, going on is to begin again, in the same folder."""
    settings = lab.config(*more)
    monkeypatch.setenv("TRAIN_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setattr(place, name, struck(getattr(place, name)))
        ended = lab.run(settings, tmp_path / "run")
    assert ended.code == 75, ended
    assert saved(tmp_path / "run") == ([] if step is None else [step])
    assert lab.status(tmp_path / "run")["step"] == (step or 0)
    assert not (tmp_path / "run" / "errors").exists()
    assert step is not None or f"resume={tmp_path / 'run'}" in ended.error
    if more != TUNED:
        assert_ends_as(tmp_path / "undisturbed", settings, tmp_path / "run")
        return
    # Timings differ, and with them the cut.
    assert lab.run(settings, tmp_path / "undisturbed").code == 0
    assert lab.go_on(settings, tmp_path / "run").code == 0
    found, expected = (lab.logged(tmp_path / name)["ledger"] for name in ("run", "undisturbed"))
    assert found == expected


def test_a_signal_when_all_is_done_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "finish", struck(train.finish))
    assert lab.run(lab.config(), tmp_path).code == 0
    assert lab.status(tmp_path)["state"] == "completed"


@pytest.mark.parametrize("at", [3, nightly(7)])
def test_a_signal_within_an_evaluation_ends_it_and_it_is_made_up_for(at, tmp_path, monkeypatch):
    """Step 3 is in the middle, step 7 is the last; both are followed by an evaluation."""
    settings = lab.config("accum.micro=1")
    reads: list[int] = []
    strike = struck()

    def read(split: str, index: int) -> None:
        if split == "held_out":
            reads.append(index)
            strike()

    def arm(step: int) -> None:
        if step == at:
            monkeypatch.setattr(toys, "on_read", read)

    ended = lab.run(settings, tmp_path / "run", after_step=arm)
    monkeypatch.setattr(toys, "on_read", None)
    assert ended.code == 75, ended
    assert len(reads) < 6, "the evaluation went on"
    assert saved(tmp_path / "run")[-1] == at
    assert_ends_as(tmp_path / "undisturbed", settings, tmp_path / "run")


def test_a_second_signal_after_the_last_save_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpointer, "release", struck(Checkpointer.release))
    child = lab.fork(lambda: lab.run(lab.config(), tmp_path, after_step=lab.stop_at(3)).code)
    assert child.wait() == 75
    assert lab.status(tmp_path)["exit_code"] == 75


def test_the_first_signal_says_on_a_terminal_what_a_second_one_would_leave(monkeypatch, capfd):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with signals.stop_signals() as stop:
        signals.show_when_stopped(lambda: "so far step 4 is saved")
        signal.raise_signal(signal.SIGUSR1)
        assert stop()
    shown = f"\ntrain: {signals.STOPPING}\ntrain: so far step 4 is saved\n\n"
    assert capfd.readouterr().err == shown


def test_a_second_signal_stops_at_once_and_harms_nothing(tmp_path):
    def hang(step: int) -> None:
        if step == 5:
            (tmp_path / "hangs").touch()
            while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                time.sleep(0.01)
            (tmp_path / "ends at the next").touch()
            time.sleep(60)

    settings = lab.config()
    work, log = lambda: lab.run(settings, tmp_path / "run", after_step=hang).code, tmp_path / "log"
    child = lab.fork(work, log)
    wait_for(tmp_path / "hangs", child)
    child.kill(signal.SIGTERM)
    wait_for(tmp_path / "ends at the next", child)
    assert not child.has_ended()
    with lab.timed() as took:
        child.kill(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
        assert took() < AT_ONCE_S
    assert intact_steps(tmp_path / "run" / "checkpoints") == [2, 4]
    assert lab.go_on(settings, tmp_path / "run").code == 0


def test_the_status_of_a_run_moves_at_checkpoints_and_evaluations(tmp_path):
    """Checkpoints are due every 2 steps, evaluations every 3; step 5 is the killed one's last."""
    seen: list[int] = []

    def look(step: int) -> None:
        seen.append(lab.status(tmp_path)["step"])
        if seen == [0, 0, 2, 3, 4]:
            os.kill(os.getpid(), signal.SIGKILL)

    settings = lab.config()
    assert lab.fork(lambda: lab.run(settings, tmp_path, after_step=look).code).wait() == -9
    found = {key: lab.status(tmp_path)[key] for key in ("state", "exit_code", "step")}
    assert found == {"state": "running", "exit_code": None, "step": 4}
    assert RunFolder(tmp_path).status()["state"] == "failed"
    assert lab.run(settings, tmp_path, resume=True, after_step=look).code == 0
    assert seen == [4, 4, 6]
    assert lab.status(tmp_path)["step"] == 7


@pytest.mark.parametrize("count", [nightly(12)])
def test_a_signal_to_all_ranks_stops_them_at_the_same_step(count, tmp_path):
    settings = lab.config(
        *("model._target_=tests.reliability.rank_toys.Net", "model.dropout=0.2", "hooks=[]"),
        *("parallel=ddp", "parallel.ranks=2", "model.pause=0.02", "num_workers=1"),
    )
    assert lab.run(settings, tmp_path / "undisturbed").code == 0
    undisturbed = lab.outcome(tmp_path / "undisturbed", rng=False)
    for case, chance in cases(count):
        folder, number = tmp_path / f"run{case}", SIGNALS[case % len(SIGNALS)]
        child = lab.fork(lambda f=folder: lab.run(settings, f).code, tmp_path / "log")
        wait_for(folder / ("status.json" if case % 2 else "metrics.jsonl"), child)
        time.sleep(chance.uniform(0, 0.3 if case % 2 == 0 else 3))
        child.kill(number)
        code = child.wait()
        assert code in (0, 75), f"{replay(case)}: {code} {(tmp_path / 'log').read_text()}"
        if code == 75 and saved(folder):
            status = lab.status(folder)
            assert (status["state"], status["exit_code"]) == ("preempted", 75)
            assert status["step"] == saved(folder)[-1]
            assert not (folder / "errors").exists()
        assert lab.go_on(settings, folder).code == 0
        lab.assert_same(lab.outcome(folder, rng=False), undisturbed, replay(case))


@pytest.mark.parametrize(
    ("strike", "number"),
    [
        nightly("sleep@start:0@1", signal.SIGTERM),
        nightly("sleep@data:2@0", signal.SIGUSR1),
        nightly("sleep@compute:3@1", signal.SIGINT),
        nightly("sleep@reduce:3@0", signal.SIGTERM),
        nightly("sleep@evaluation:3@1", signal.SIGUSR1),
        nightly("sleep@saving:2@0", signal.SIGINT),
    ],
)
def test_a_second_signal_ends_all_ranks_at_once(strike, number, tmp_path):
    """One rank sleeps at the stated place, and the other is in a collective before long."""
    run = RankRun(tmp_path, "num_workers=1", STRIKES=strike)
    run.wait_for("marks/*")
    time.sleep(2 * signals.TOGETHER_S)
    run.process.send_signal(signal.SIGTERM)
    time.sleep(2 * signals.TOGETHER_S)
    assert run.process.poll() is None
    with lab.timed() as took:
        run.process.send_signal(number)
        ended = run.end()
        assert ended.code == 130
        assert took() < AT_ONCE_S
    run.assert_none_left("after the second signal")
    if "@start" in strike:
        said = "train: ended before its first step was done: nothing is saved"
        assert (ended.errors, run.folder.exists()) == ([said], False)
    else:
        assert ended.errors[-1].endswith("with: train resume=run")
        assert lab.status(run.folder)["exit_code"] == 130
