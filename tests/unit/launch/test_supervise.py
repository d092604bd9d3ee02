"""What a supervisor makes of its ranks' boards and of signals, with processes that are no ranks."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lib.cli_support import CHECKOUT
from trainer.core.errors import Preempted
from trainer.core.rank_progress import Board
from trainer.launch import session
from trainer.launch.attempt_folder import LOCK_FILE, UNLOCKED_S, private_folder, sweep
from trainer.launch.children import Child, end
from trainer.launch.nodes import Nodes
from trainer.launch.rank import JOB_FILE
from trainer.launch.stall import Pulse, Sight, family_of, processes
from trainer.launch.stall_watch import Lookout
from trainer.launch.verdict import verdict
from trainer.launch.watch import UNBEGUN_S, Asked, Watch

SLEEPS = "sleep 600"
WORKS = "while :; do :; done"
WORKS_BELOW = f"setsid sh -c '{WORKS}' & sleep 600"


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def rank(place: Path, number: int, work: str, opened: ExitStack) -> Child:
    process = subprocess.Popen(["sh", "-c", work], start_new_session=True)
    board = Board(place / f"board-{number}")
    child = Child(rank=number, process=process, board=board, log=None)
    opened.callback(board.close)
    opened.callback(process.wait)
    opened.callback(kill_family, process.pid)
    return child


def kill_family(leader: int) -> None:
    for pid in family_of(leader, processes()):
        os.kill(pid, signal.SIGKILL)


def quiet(pulse: Pulse, children: list[Child]) -> Sight:
    """Look until nothing moves: a process that sleeps had to be started first."""
    deadline = time.monotonic() + 60
    while (sight := pulse.look(children)).moves:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return sight


def watching(place: Path, children: list[Child], timeout_s: float = 600.0) -> Watch:
    return Watch(
        children=children,
        private=place,
        others=Nodes(),
        expected=range(len(children)),
        ranks_of=lambda node: range(len(children)),
        timeout_s=timeout_s,
        unbegun="nothing is saved",
    )


def test_a_rank_that_works_alone_is_told_from_one_that_hangs(
    tmp_path: Path, opened: ExitStack
) -> None:
    waiting, working = (rank(tmp_path, number, SLEEPS, opened) for number in range(2))
    opened.enter_context(waiting.board.waiting())
    pulse, both = Pulse(), [waiting, working]
    assert pulse.look(both).moves, "the first look"
    assert quiet(pulse, both).works == "rank 1, which computes at the start"
    for note in ({"phase": "saving"}, {"step": 3, "phase": "compute"}, {"micro_batch": 1}):
        working.board.write(replace(working.board.read(), **note))
        assert pulse.look(both).moves, note
        quiet(pulse, both)


def test_where_the_system_has_no_table_of_processes_a_rank_is_taken_for_alive(
    tmp_path: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.launch.stall.PROCESSES", tmp_path / "no-proc")
    children, pulse = [rank(tmp_path, 0, SLEEPS, opened)], Pulse()
    assert [pulse.look(children).moves for _ in range(3)] == [True] * 3


@pytest.mark.parametrize("work", [WORKS, WORKS_BELOW], ids=["itself", "in a session below"])
def test_processor_time_is_a_sign_of_life_unless_the_rank_is_stopped(
    work: str, tmp_path: Path, opened: ExitStack
) -> None:
    waiting = rank(tmp_path, 0, SLEEPS, opened)
    working = rank(tmp_path, 1, work, opened)
    opened.enter_context(waiting.board.waiting())
    pulse = Pulse()
    for _ in range(3):
        deadline = time.monotonic() + 60
        while not pulse.look([waiting, working]).moves:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    working.process.send_signal(signal.SIGSTOP)
    while not working.is_stopped:
        time.sleep(0.01)
    assert not pulse.look([waiting, working]).moves


WRITES_IN_PASSING = """
import os, threading, time
null = os.open(os.devnull, os.O_WRONLY)
while True:
    thread = threading.Thread(target=os.write, args=(null, b"x"))
    thread.start()
    thread.join()
    time.sleep(1)
"""


def test_what_a_thread_wrote_that_has_ended_since_is_a_sign_of_life(
    tmp_path: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.launch.stall.QUIET", 1e9)  # bytes alone are to be seen
    work = f"exec {sys.executable} -c '{WRITES_IN_PASSING}'"
    children, pulse = [rank(tmp_path, 0, work, opened)], Pulse()
    pulse.look(children)
    time.sleep(1)
    for _ in range(3):
        quiet(pulse, children)
        deadline = time.monotonic() + 60
        while not pulse.look(children).moves:
            assert time.monotonic() < deadline
            time.sleep(0.1)


LOOKS_AT_ITSELF = """
import os, threading
from trainer.launch.stall import _moved_bytes
zeros, seen = os.open("/dev/zero", os.O_RDONLY), set()
def look():
    for _ in range(70):
        seen.add(_moved_bytes(os.getpid()))
        os.read(zeros, 1 << 24)
thread = threading.Thread(target=look)
thread.start()
thread.join()
assert len(seen) == 1, seen
"""


def test_what_the_thread_that_looks_reads_is_no_sign_of_life() -> None:
    """The system's own count of it becomes longer by a digit on the way."""
    subprocess.run([sys.executable, "-c", LOOKS_AT_ITSELF], check=True)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_that_stands_still_ends_and_the_rank_that_is_waited_for_is_named(
    stopped: bool, tmp_path: Path, opened: ExitStack
) -> None:
    """The one that hangs may have been stopped while it waited itself."""
    children = [rank(tmp_path, number, SLEEPS, opened) for number in range(2)]
    if stopped:
        opened.enter_context(children[1].board.waiting())
        children[1].process.send_signal(signal.SIGSTOP)
    opened.enter_context(children[0].board.waiting())
    watch = watching(tmp_path, children, timeout_s=0.2)
    watch.run()
    error = verdict(watch.ended, tmp_path, 0.2)
    assert str(error) == "rank 1 did not answer for 0.2 s (parallel.timeout_s), at the start"


def test_a_rank_that_leaves_with_code_0_and_no_word_is_named_and_ends_the_others(
    tmp_path: Path, opened: ExitStack
) -> None:
    children = [
        rank(tmp_path, number, work, opened) for number, work in enumerate((SLEEPS, "true"))
    ]
    watch = watching(tmp_path, children)
    began = time.monotonic()
    watch.run()
    assert time.monotonic() - began < 60
    error = verdict(watch.ended, tmp_path, 600)
    assert str(error) == "rank 1 ended with exit code 0 and without a word, at the start"


def test_a_step_that_is_held_up_by_one_rank_ends_when_collectives_would(
    tmp_path: Path, opened: ExitStack
) -> None:
    children = [rank(tmp_path, number, SLEEPS, opened) for number in range(2)]
    for child, phase in zip(children, ("agree", "compute"), strict=True):
        child.board.write(replace(child.board.read(), step=3, phase=phase))
    watch = watching(tmp_path, children, timeout_s=0.2)
    watch.run()
    error = verdict(watch.ended, tmp_path, 0.2)
    assert str(error).startswith("rank 1 did not answer for 0.2 s (parallel.timeout_s), at step 3")


@pytest.mark.parametrize("stopped", [False, True], ids=["asleep", "stopped"])
def test_a_step_in_which_every_rank_hangs_ends_also_when_a_signal_asked_to_stop(
    stopped: bool, tmp_path: Path, opened: ExitStack
) -> None:
    children = [rank(tmp_path, number, SLEEPS, opened) for number in range(2)]
    for child in children:
        child.board.write(replace(child.board.read(), step=3, phase="compute", micro_batch=2))
        if stopped:
            child.process.send_signal(signal.SIGSTOP)
    watch = watching(tmp_path, children, timeout_s=0.2)
    watch.asked = Asked(at=time.monotonic() - UNBEGUN_S)
    watch.run()
    error = verdict(watch.ended, tmp_path, 0.2)
    assert str(error) == (
        "rank 0 did not answer for 0.2 s (parallel.timeout_s), at step 3 (compute, micro-batch 2)"
    )


def test_who_is_waited_for_while_it_computes_is_said_once_and_a_signal_ends_it(
    tmp_path: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.launch.watch.WORK_S", 0.5)
    waiting, working = rank(tmp_path, 0, SLEEPS, opened), rank(tmp_path, 1, WORKS, opened)
    opened.enter_context(waiting.board.waiting())
    watch = watching(tmp_path, [waiting, working], timeout_s=0.5)
    lines: list[str] = []
    watch.tell = lines.append
    deadline = time.monotonic() + 60
    while not lines:
        assert time.monotonic() < deadline
        watch._look()
        time.sleep(0.02)
    for _ in range(10):
        watch.looked -= 0.025
        watch._look()
    assert lines == ["waiting for rank 1, which computes at the start"]
    assert not watch.then
    watch.asked = Asked(at=time.monotonic() - UNBEGUN_S)
    with pytest.raises(Preempted, match="nothing is saved"):
        watch.run()


def looked(lookouts: list[Lookout], seconds: float, meanwhile: Callable[[], object]) -> bool:
    """Whether the first of some ranks finds within some seconds that all stand still."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        found = [lookout.look() for lookout in lookouts]
        if any(found):
            return True
        meanwhile()
        time.sleep(0.01)
    return False


def test_ranks_without_a_supervisor_see_that_all_stand_still_and_take_no_work_for_it(
    tmp_path: Path, opened: ExitStack
) -> None:
    boards = [Board(tmp_path / f"board-{number}") for number in range(2)]
    opened.enter_context(boards[0].waiting())
    first, second = lookouts = [Lookout(tmp_path, r, 2, boards[r], 0.5) for r in range(2)]

    def step() -> None:
        boards[1].write(replace(boards[1].read(), step=boards[1].read().step + 1))

    def compute() -> None:
        thread = threading.Thread(target=sum, args=(range(2_000_000),))
        thread.start()
        thread.join()

    assert not looked(lookouts, 2, step)
    assert not looked(lookouts, 2, compute)
    # A rank that says nothing may hold on to the interpreter, and its threads with it.
    assert not looked([first], 2, lambda: None)
    assert looked(lookouts, 60, lambda: None)
    step()
    time.sleep(2 * first.interval_s)
    assert not looked([second, first], 0.1, lambda: None), "it went on"


def test_what_a_killed_rank_was_writing_is_cleared_away(tmp_path: Path, opened: ExitStack) -> None:
    child = rank(tmp_path, 1, SLEEPS, opened)
    (tmp_path / "errors").mkdir()
    for name in (".tmp-rank1.txt-0a", ".tmp-rank12.txt-0b", "rank1.txt"):
        (tmp_path / "errors" / name).touch()
    end([child], tmp_path, tmp_path)
    left = {path.name for path in (tmp_path / "errors").iterdir()}
    assert left == {".tmp-rank12.txt-0b", "rank1.txt"}


def test_signals_end_at_once_or_when_nothing_is_to_be_saved(
    tmp_path: Path, opened: ExitStack
) -> None:
    watch = watching(tmp_path, [rank(tmp_path, 0, SLEEPS, opened)])
    watch.asked = Asked(at=time.monotonic() - UNBEGUN_S)
    with pytest.raises(Preempted, match="nothing is saved"):
        watch.run()
    watch.asked.at_once = True
    with pytest.raises(KeyboardInterrupt):
        watch.run()


def test_what_killed_supervisors_left_is_swept_and_what_is_held_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, strange, young = (tmp_path / f"train-{name}" for name in ("dead", "strange", "young"))
    for folder in (dead, strange, young):
        folder.mkdir()
    (dead / LOCK_FILE).touch()
    (young / f"{LOCK_FILE}-soon").touch()
    (tmp_path / "train-link").symlink_to(strange)
    (strange / "theirs").touch()
    with private_folder() as mine:
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"train-strange", "train-young", "train-link", mine.name}
        sweep(tmp_path)
        assert mine.exists()
    assert not mine.exists()
    with (strange / LOCK_FILE).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        sweep(tmp_path)
        assert strange.exists()


def test_an_old_folder_of_a_job_without_a_lock_is_swept_and_no_folder_of_the_users_own(
    tmp_path: Path,
) -> None:
    yesterday = time.time() - UNLOCKED_S - 60
    for name, file, seconds in (
        ("left", JOB_FILE, yesterday),
        ("goes-on", JOB_FILE, time.time()),
        ("data", "corpus.jsonl", yesterday),
    ):
        folder = tmp_path / f"train-{name}"
        folder.mkdir()
        (folder / file).touch()
        os.utime(folder / file, (seconds, seconds))
        os.utime(folder, (yesterday, yesterday))
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"train-goes-on", "train-data"}


def test_what_a_joined_rank_prints_is_filed_and_its_end_goes_where_the_launcher_wants(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "ranks" / "rank1.log"
    for words in (("one", "two"), ()):
        with session.filed(log):
            subprocess.run(["echo", *words], check=True) if words else None
        print("the end", flush=True)
        assert capfd.readouterr().out == "the end\n"
    assert log.read_text() == "one two\n"
    log.write_text("")
    with session.filed(log):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_strangers_module_in_the_current_folder_is_not_taken_for_an_installed_one(
    tmp_path: Path,
) -> None:
    for name in ("__future__", "typing", "signal", "json", "yaml", "hydra", "torch"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} was taken')")
    (tmp_path / "own.py").write_text("class Net:\n    pass\n")
    line = [sys.executable, "-m", "trainer", "model._target_=own.Other", "steps=1"]
    ended = subprocess.run(
        line,
        cwd=tmp_path,
        env={"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("train: error: model._target_=own.Other: ")
