"""Harness 17: a signal at any time ends in a checkpoint, exit 75, and a run that goes on exactly.

Signals are real. They come at random moments of a run in a process of its own, and at chosen
moments that random ones seldom hit: before the first step, while tuning, within an evaluation,
to a whole group with loading processes, and a second time.
"""

from __future__ import annotations

import ast
import os
import signal
import time
from pathlib import Path

import pytest

from tests.reliability import lab, toys
from tests.reliability.support import cases, replay
from trainer.checkpoint.store import CheckpointStore, verify

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
NUM_SIGNALS = 12
NUM_SIGNALS_NIGHTLY = 90
GRACE_S = 2.0
STEP_S = 0.05

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def slowly(step: int) -> None:
    """Make steps long enough for a signal to come in one."""
    time.sleep(STEP_S)


def wait_for(condition: object, child: lab.Child, seconds: float = 30.0) -> None:
    """Wait until a path exists, or the child ended."""
    assert isinstance(condition, Path)
    limit = time.monotonic() + seconds
    while not condition.exists() and not child.has_ended():
        assert time.monotonic() < limit, f"no {condition}"
        time.sleep(0.001)


def send_signals(count: int, tmp_path: Path) -> None:
    settings = lab.config("data._target_=tests.reliability.toys.DrawnRows", "model.dropout=0.2")
    assert lab.run(settings, tmp_path / "undisturbed").code == 0
    expected = lab.outcome(tmp_path / "undisturbed")
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
            assert took() < GRACE_S, replay(case)
        assert code in (0, 75), f"{replay(case)}: {code} {log.read_text()}"
        if code == 75:
            stopped += 1
            assert lab.status(folder)["state"] == "preempted"
            (newest := CheckpointStore(folder / "checkpoints")).load(set_aside=False)
            assert newest.steps()[-1] == lab.status(folder)["step"], replay(case)
        ended = lab.go_on(settings, folder)
        assert ended.code == 0, f"{replay(case)}: {ended}"
        lab.assert_same(lab.outcome(folder), expected, replay(case))
    print(f"{count} signals, {stopped} runs stopped and resumed, all equal to the undisturbed one")
    assert stopped >= count // 2


def test_a_signal_at_any_time_saves_and_the_run_goes_on_exactly(tmp_path: Path) -> None:
    send_signals(NUM_SIGNALS, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_ninety_signals_change_nothing(tmp_path: Path) -> None:
    send_signals(NUM_SIGNALS_NIGHTLY, tmp_path)


def test_a_signal_before_the_first_step_leaves_a_checkpoint_of_step_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = lab.config()
    assert lab.run(settings, tmp_path / "undisturbed").code == 0
    with monkeypatch.context() as patch:
        patch.setattr(toys, "on_read", _once(signal.SIGTERM))
        ended = lab.run(settings, tmp_path / "run")
    assert ended.code == 75
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [0]
    assert lab.go_on(settings, tmp_path / "run").code == 0
    lab.assert_same(lab.outcome(tmp_path / "run"), lab.outcome(tmp_path / "undisturbed"), "start")


def test_a_signal_while_tuning_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(toys, "on_call", _once(signal.SIGUSR1))
    settings = lab.config("accum=auto", "accum.micro=null")
    ended = lab.run(settings, tmp_path / "run")
    assert ended.code == 75
    assert "before the first step" in ended.error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    monkeypatch.setattr(toys, "on_call", None)
    assert lab.go_on(settings, tmp_path / "run").code == 0


@pytest.mark.parametrize("at", [3, 7])
def test_a_signal_within_an_evaluation_ends_it_and_it_is_made_up_for(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 is in the middle, step 7 is the last; both are followed by an evaluation."""
    settings = lab.config("accum.micro=1")
    assert lab.run(settings, tmp_path / "undisturbed").code == 0
    reads: list[int] = []

    def strike(step: int) -> None:
        def read(split: str, index: int) -> None:
            if split == "held_out":
                reads.append(index)
                if len(reads) == 1:
                    os.kill(os.getpid(), signal.SIGTERM)

        if step == at:
            monkeypatch.setattr(toys, "on_read", read)

    ended = lab.run(settings, tmp_path / "run", after_step=strike)
    monkeypatch.setattr(toys, "on_read", None)
    assert ended.code == 75, ended
    assert len(reads) < 6, "the evaluation went on"
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps()[-1] == at
    assert lab.go_on(settings, tmp_path / "run").code == 0
    lab.assert_same(lab.outcome(tmp_path / "run"), lab.outcome(tmp_path / "undisturbed"), "eval")


def _once(number: int) -> object:
    sent: list[int] = []

    def send(*_: object) -> None:
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)

    return send


def test_loading_processes_ignore_what_reaches_the_whole_group(tmp_path: Path) -> None:
    settings = lab.config("num_workers=2")
    assert lab.run(settings, tmp_path / "undisturbed").code == 0

    def work() -> int:
        os.setpgid(0, 0)
        return lab.run(settings, tmp_path / "run", after_step=slowly).code

    child = lab.fork(work, tmp_path / "log")
    wait_for(tmp_path / "run" / "metrics.jsonl", child)
    time.sleep(0.1)
    os.killpg(child.pid, signal.SIGTERM)
    code = child.wait()
    assert code == 75, (tmp_path / "log").read_text()
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
    assert lab.go_on(settings, tmp_path / "run").code == 0
    lab.assert_same(lab.outcome(tmp_path / "run"), lab.outcome(tmp_path / "undisturbed"), "group")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_stops_at_once_and_harms_nothing(number: int, tmp_path: Path) -> None:
    def hang(step: int) -> None:
        if step == 5:
            (tmp_path / "hangs").touch()
            time.sleep(60)

    settings = lab.config()
    child = lab.fork(lambda: lab.run(settings, tmp_path / "run", after_step=hang).code)
    wait_for(tmp_path / "hangs", child)
    child.kill(signal.SIGTERM)
    time.sleep(0.1)
    assert not child.has_ended()
    with lab.timed() as took:
        child.kill(number)
        assert child.wait() == -number
        assert took() < 1.0
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert [verify(store.path(step)).step for step in store.steps()] == [2, 4]
    assert lab.go_on(settings, tmp_path / "run").code == 0


def handlers(source: str) -> list[ast.FunctionDef]:
    """Find the functions of a module that are given to `signal.signal`."""
    tree = ast.parse(source)
    named = {
        argument.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "signal.signal"
        for argument in node.args[1:]
        if isinstance(argument, ast.Name)
    }
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return [function for function in functions if function.name in named]


FLAG_ONLY = {"signal.signal"}
FORWARDS = FLAG_ONLY | {"touch", "read", "send_signal", "suppress", "contextlib.suppress"}
"""What a supervisor, which computes and saves nothing, does to tell the ranks."""


def does_too_much(handler: ast.FunctionDef, allowed: set[str]) -> list[str]:
    """Name what a handler calls beyond what is allowed."""
    calls = [node for node in ast.walk(handler) if isinstance(node, ast.Call)]
    whole = [ast.unparse(call.func) for call in calls]
    return [
        n for n in whole if n not in allowed and n.rpartition(".")[2] not in allowed - FLAG_ONLY
    ]


def test_a_handler_does_nothing_but_set_a_flag() -> None:
    found = {path.name: handlers(path.read_text()) for path in (lab.ROOT / "trainer").rglob("*.py")}
    found = {name: functions for name, functions in found.items() if functions}
    assert "session.py" in found
    for name, functions in found.items():
        allowed = FORWARDS if name == "supervise.py" else FLAG_ONLY
        assert [call for handler in functions for call in does_too_much(handler, allowed)] == []


def test_a_handler_that_saves_is_noticed() -> None:
    source = "def h(n, f):\n    store.save(1)\nsignal.signal(15, h)\n"
    assert does_too_much(handlers(source)[0], FORWARDS) == ["store.save"]
