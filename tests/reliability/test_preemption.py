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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.reliability import lab, toys
from tests.reliability.rank_runs import RankRun, processes_in
from tests.reliability.support import cases, replay
from trainer.checkpoint.manifest import verify
from trainer.checkpoint.status import read_status
from trainer.checkpoint.store import CheckpointStore
from trainer.commands import train
from trainer.core import signals
from trainer.data import text
from trainer.launch import watch
from trainer.training import loop
from trainer.training.checkpointing import Checkpointer
from trainer.tune import known_memory

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
NUM_SIGNALS = 12
NUM_SIGNALS_NIGHTLY = 90
NUM_RANK_SIGNALS = 1
NUM_RANK_SIGNALS_NIGHTLY = 60
AT_ONCE_S = 20.0
"""What a busy machine may need for what takes milliseconds; what it is told from takes a minute."""

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
            assert took() < AT_ONCE_S, replay(case)
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


def _text(folder: Path) -> tuple[str, ...]:
    (folder / "corpus.txt").write_text("\n\n".join(f"document number {i}" for i in range(60)))
    return (
        "data=text",
        f"data.path={folder / 'corpus.txt'}",
        "data.max_length=24",
        "model.vocabulary=258",
        "steps=2",
    )


def _while_indexing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(text, "_document", _after(_once(signal.SIGTERM), text._document))


def _while_measuring(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(toys, "on_read", _once(signal.SIGUSR1))


def _while_tuning(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(toys, "on_call", _once(signal.SIGUSR1))


def _while_predicting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        known_memory, "corner_shapes", _after(_once(signal.SIGTERM), known_memory.corner_shapes)
    )


def _in_the_first_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loop, "train_step", _after(_once(signal.SIGTERM), loop.train_step))


def _while_saving(patch: pytest.MonkeyPatch) -> None:
    commit = CheckpointStore._commit
    patch.setattr(CheckpointStore, "_commit", _after(_once(signal.SIGTERM), commit))


UNMEASURED = "data._target_=tests.reliability.test_bad_data.Unmeasured"
TUNED = ("accum=auto", "accum.micro=null")
STAGES: Mapping[str, tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...], int | None]] = {
    "indexing a corpus": (_while_indexing, ("data=text",), None),
    "measuring samples": (_while_measuring, (UNMEASURED, "+data.bad=0"), None),
    "looking for bad samples": (_while_measuring, (UNMEASURED, "data.on_bad=skip"), None),
    "predicting memory": (_while_predicting, TUNED, None),
    "tuning": (_while_tuning, TUNED, None),
    "the first step": (_in_the_first_step, (), 1),
    "saving": (_while_saving, (), 2),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_signal_at_any_stage_ends_in_a_run_that_goes_on(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing was saved, going on is to begin again, in the same folder."""
    strike, more, step = STAGES[stage]
    if "data=text" in more:
        more = _text(tmp_path)
    settings = lab.config.__wrapped__(*more)
    monkeypatch.setenv("TRAIN_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        strike(patch)
        ended = lab.run(settings, tmp_path / "run")
    assert ended.code == 75, ended
    saved = CheckpointStore(tmp_path / "run" / "checkpoints").steps()
    assert saved == ([] if step is None else [step])
    assert (lab.status(tmp_path / "run")["step"], (tmp_path / "run" / "errors").exists()) == (
        step or 0,
        False,
    )
    assert step is not None or f"resume={tmp_path / 'run'}" in ended.error
    assert lab.run(settings, tmp_path / "undisturbed").code == 0
    assert lab.go_on(settings, tmp_path / "run").code == 0
    found, expected = lab.outcome(tmp_path / "run"), lab.outcome(tmp_path / "undisturbed")
    if more == TUNED:  # timings differ, and with them the cut
        assert found["ledger"] == expected["ledger"]
    else:
        lab.assert_same(found, expected, stage)


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


def test_a_signal_when_all_is_done_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike = _after(_once(signal.SIGTERM), train.summarize_end)
    monkeypatch.setattr(train, "summarize_end", strike)
    assert lab.run(lab.config(), tmp_path).code == 0
    assert lab.status(tmp_path)["state"] == "completed"


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


def _once(number: int) -> Callable[..., None]:
    sent: list[int] = []

    def send(*_: object) -> None:
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)

    return send


def _after(strike: Callable[..., None], work: Callable[..., Any]) -> Callable[..., Any]:
    def struck(*args: Any, **kwargs: Any) -> Any:
        strike()
        return work(*args, **kwargs)

    return struck


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


def test_a_second_signal_after_the_last_save_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = Checkpointer.release

    def strike(own: Checkpointer) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        release(own)

    monkeypatch.setattr(Checkpointer, "release", strike)
    child = lab.fork(lambda: lab.run(lab.config(), tmp_path, after_step=lab.stop_at(3)).code)
    assert child.wait() == 75
    assert lab.status(tmp_path)["exit_code"] == 75


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
    time.sleep(2.5 * signals.TOGETHER_S)
    assert not child.has_ended()
    with lab.timed() as took:
        child.kill(number)
        assert child.wait() == -number
        assert took() < AT_ONCE_S
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert [verify(store.path(step)).step for step in store.steps()] == [2, 4]
    assert lab.go_on(settings, tmp_path / "run").code == 0


def test_the_status_of_a_run_moves_at_checkpoints_and_evaluations(tmp_path: Path) -> None:
    """Checkpoints are due every 2 steps, evaluations every 3; step 5 is the killed one's last."""
    seen: list[int] = []

    def look(step: int) -> None:
        seen.append(lab.status(tmp_path)["step"])
        if step == 5:
            assert seen == [0, 0, 2, 3, 4]
            os.kill(os.getpid(), signal.SIGKILL)

    def look_on(step: int) -> None:
        seen.append(lab.status(tmp_path)["step"])

    settings = lab.config()
    assert lab.fork(lambda: lab.run(settings, tmp_path, after_step=look).code).wait() == -9
    assert lab.status(tmp_path) | {"reason": None} == {
        "state": "running",
        "exit_code": None,
        "step": 4,
        "reason": None,
    }
    assert read_status(tmp_path)["state"] == "failed"
    del seen[:]
    assert lab.run(settings, tmp_path, resume=True, after_step=look_on).code == 0
    assert seen == [4, 4, 6]
    assert lab.status(tmp_path)["step"] == 7


RANKS = (
    "model._target_=tests.reliability.rank_toys.Net",
    "model.dropout=0.2",
    "parallel.ranks=2",
    "parallel=ddp",
    "hooks=[]",
)


def stopped_alike(folder: Path) -> int:
    """The step after which all ranks stopped: what is saved, and what is logged."""
    (status, steps) = lab.status(folder), CheckpointStore(folder / "checkpoints").steps()
    assert (status["state"], status["exit_code"]) == ("preempted", 75)
    assert status["step"] == steps[-1]
    assert not (folder / "errors").exists()
    return int(steps[-1])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the undisturbed run of two ranks leaves."""
    folder = tmp_path_factory.mktemp("ranks")
    assert lab.run(lab.config(*RANKS), folder / "run").code == 0
    return lab.outcome(folder / "run", rng=False)


@pytest.mark.parametrize(
    ("strike", "step"),
    [
        ("SIGTERM@update:3@1", 3),
        pytest.param("SIGUSR1@evaluation:3@1", 3, marks=pytest.mark.nightly),
        pytest.param("SIGINT@saving:2@0", 2, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    strike: str,
    step: int,
    two_ranks: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STRIKES", strike)
    monkeypatch.setenv("MARKS", str(tmp_path))
    ended = lab.run(lab.config(*RANKS), tmp_path / "run")
    assert ended.code == 75, ended
    assert stopped_alike(tmp_path / "run") == step
    assert lab.go_on(lab.config(*RANKS), tmp_path / "run").code == 0
    lab.assert_same(lab.outcome(tmp_path / "run", rng=False), two_ranks, strike)


def same_as(expected: dict[str, Any], found: dict[str, Any], about: str) -> None:
    """Compare, the settings of pauses and workers aside."""
    lab.assert_same(found | {"meta": ""}, expected | {"meta": ""}, about)


def signal_ranks(count: int, expected: dict[str, Any], tmp_path: Path) -> None:
    stopped = 0
    for case, chance in cases(count):
        folder, number = tmp_path / f"run{case}", SIGNALS[case % len(SIGNALS)]
        settings = lab.config(*RANKS, "model.pause=0.02", "num_workers=1")
        child = lab.fork(lambda f=folder, s=settings: lab.run(s, f).code, tmp_path / "log")
        wait_for(folder / ("status.json" if case % 2 else "metrics.jsonl"), child)
        time.sleep(chance.uniform(0, 0.3 if case % 2 == 0 else 3))
        child.kill(number)
        code = child.wait()
        assert code in (0, 75), f"{replay(case)}: {code} {(tmp_path / 'log').read_text()}"
        if code == 75 and CheckpointStore(folder / "checkpoints").steps():
            stopped_alike(folder)
        stopped += code == 75
        assert lab.go_on(settings, folder).code == 0
        same_as(expected, lab.outcome(folder, rng=False), replay(case))
    print(f"{count} signals to two ranks, {stopped} stopped and resumed, all equal")


@pytest.mark.nightly
def test_a_signal_to_all_ranks_stops_them_at_the_same_step(
    two_ranks: dict[str, Any], tmp_path: Path
) -> None:
    signal_ranks(NUM_RANK_SIGNALS, two_ranks, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_sixty_signals_to_two_ranks_change_nothing(
    two_ranks: dict[str, Any], tmp_path: Path
) -> None:
    signal_ranks(NUM_RANK_SIGNALS_NIGHTLY, two_ranks, tmp_path)


@pytest.mark.parametrize(
    ("strike", "number"),
    [
        ("sleep@compute:3@1", signal.SIGTERM),
        *(
            pytest.param(f"sleep@{place}", number, marks=pytest.mark.nightly)
            for place in ("start:0@1", "data:2@0", "reduce:3@0", "saving:2@0", "evaluation:3@1")
            for number in SIGNALS
        ),
    ],
)
def test_a_second_signal_ends_all_ranks_at_once(strike: str, number: int, tmp_path: Path) -> None:
    """One rank sleeps at the stated place, and the other is in a collective before long."""
    run = RankRun.start(tmp_path, "num_workers=1", STRIKES=strike)
    run.wait_for("marks/*")
    time.sleep(2 * signals.TOGETHER_S)
    run.process.send_signal(signal.SIGTERM)
    time.sleep(2 * signals.TOGETHER_S)
    assert run.process.poll() is None
    with lab.timed() as took:
        run.process.send_signal(number)
        assert run.end().code == 130
        assert took() < AT_ONCE_S
    assert processes_in(tmp_path) == []
    assert lab.status(run.folder)["exit_code"] == 130


@pytest.mark.nightly
def test_a_signal_that_a_rank_does_not_hear_before_the_first_step_ends_it_in_time(
    tmp_path: Path,
) -> None:
    run = RankRun.start(tmp_path, STRIKES="sleep@start:0@1")
    run.wait_for("marks/*")
    with lab.timed() as took:
        run.process.send_signal(signal.SIGTERM)
        ended = run.end()
        assert took() < watch.UNBEGUN_S + AT_ONCE_S
    assert ended.code == 75
    assert ended.errors == ["train: stopped before it took a step: go on with: train resume=run"]
    run.assert_none_left("start")
    assert (lab.status(run.folder)["state"], lab.status(run.folder)["step"]) == ("preempted", 0)


def handlers(source: str) -> list[ast.FunctionDef]:
    """Find the functions of a module that are given to `signal.signal`, and its own they call."""
    tree = ast.parse(source)
    named = {
        argument.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "signal.signal"
        for argument in node.args[1:]
        if isinstance(argument, ast.Name)
    }
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = [function for function in functions if function.name in named]
    called = {call for function in found for call in calls_of(function)}
    return [function for function in functions if function.name in named | called]


def calls_of(function: ast.FunctionDef) -> list[str]:
    return [ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)]


FLAG_ONLY = {
    "signal.signal",
    "time.sleep",
    "_end_at_next",
    "os.write",
    "sys.stderr.isatty",
    "sys.stderr.fileno",
}
"""A handler sets a flag, and a little later lets the next signal end the process; it says so to a
terminal, past the stream that may be in the midst of writing."""


def does_too_much(handler: ast.FunctionDef) -> list[str]:
    """Name what a handler calls beyond what is allowed."""
    return [call for call in calls_of(handler) if call not in FLAG_ONLY]


def test_a_handler_does_nothing_but_set_a_flag() -> None:
    found = {path.name: handlers(path.read_text()) for path in (lab.ROOT / "trainer").rglob("*.py")}
    found = {name: functions for name, functions in found.items() if functions}
    assert "signals.py" in found
    for name, functions in found.items():
        assert [call for handler in functions for call in does_too_much(handler)] == [], name


def test_a_handler_that_saves_is_noticed() -> None:
    source = "def h(n, f):\n    store.save(1)\nsignal.signal(15, h)\n"
    assert does_too_much(handlers(source)[0]) == ["store.save"]
