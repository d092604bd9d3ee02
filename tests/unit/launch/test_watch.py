"""What a watch makes of its ranks' boards and of signals, with processes that are no ranks."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.lib.cli_support import CHECKOUT
from trainer.core.errors import Preempted
from trainer.core.rank_progress import Board, Phase, Place
from trainer.launch import join
from trainer.launch.attempt_folder import LOCK_FILE, attempt_folder, sweep
from trainer.launch.children import Child, end
from trainer.launch.ends import Records, verdict
from trainer.launch.watch import UNBEGUN_S, Asked, Watch

SLEEPS = "sleep 600"
KEY = "parallel.timeout_s"
AT = "compute, micro-batch 2"


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def rank(place: Path, number: int, work: str, opened: ExitStack) -> Child:
    process = subprocess.Popen(["sh", "-c", work], start_new_session=True)
    board = Board(Records(place).board(number))
    child = Child(rank=number, process=process, board=board, log=None)
    opened.callback(board.close)
    opened.callback(process.wait)
    opened.callback(child.kill)
    return child


def watching(place: Path, children: list[Child], timeout_s: float = 600.0) -> Watch:
    return Watch(
        children=children,
        size=len(children),
        records=Records(place),
        timeout_s=timeout_s,
        unbegun="nothing is saved",
        asked=Asked(),
    )


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


@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_a_step_that_one_rank_holds_up_ends_in_time_and_names_that_rank(
    first: bool, tmp_path: Path, opened: ExitStack
) -> None:
    children = [rank(tmp_path, number, SLEEPS, opened) for number in range(2)]
    for child, phase in zip(children, ("agree", "compute"), strict=True):
        place = Place(step=3, phase=phase, is_first=first)  # type: ignore[arg-type] # a phase
        child.board.write(place)
    watch, began = watching(tmp_path, children, timeout_s=0.2), time.monotonic()
    watch.run()
    limit_s, key = (2, "ten times parallel.timeout_s in the first step") if first else (0.2, KEY)
    assert time.monotonic() - began > limit_s
    error = verdict(watch.ended, tmp_path, 0.2)
    expected = f"rank 1 did not answer for {limit_s} s ({key}), at step 3 (compute)"
    assert str(error) == expected


@pytest.mark.parametrize("stopped", [False, True], ids=["asleep", "stopped"])
def test_a_step_in_which_every_rank_hangs_ends_also_when_a_signal_asked_to_stop(
    stopped: bool, tmp_path: Path, opened: ExitStack
) -> None:
    children = [rank(tmp_path, number, SLEEPS, opened) for number in range(2)]
    for child in children:
        child.board.write(Place(step=3, phase="compute", micro_batch=2))
        if stopped:
            child.process.send_signal(signal.SIGSTOP)
    watch = watching(tmp_path, children, timeout_s=0.2)
    watch.asked = Asked(at=time.monotonic() - UNBEGUN_S)
    watch.run()
    error = verdict(watch.ended, tmp_path, 0.2)
    assert str(error) == f"rank 0 did not answer for 0.2 s ({KEY}), at step 3 ({AT})"


@pytest.mark.parametrize("phase", ["start", "saving", "evaluation", "end"])
def test_outside_of_steps_ranks_may_take_their_time(phase: Phase) -> None:
    for is_first in (False, True):
        assert not Place(step=3, phase=phase, is_first=is_first).is_overdue(1e-9)


def test_what_a_killed_rank_was_writing_is_cleared_away(tmp_path: Path, opened: ExitStack) -> None:
    child = rank(tmp_path, 1, SLEEPS, opened)
    (tmp_path / "errors").mkdir()
    for name in (".tmp-rank1.txt-0a", ".tmp-rank12.txt-0b", "rank1.txt"):
        (tmp_path / "errors" / name).touch()
    end([child], Records(tmp_path), tmp_path)
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
    with attempt_folder() as mine:
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"train-strange", "train-young", "train-link", mine.name}
        sweep(tmp_path)
        assert mine.exists()
    assert not mine.exists()
    with (strange / LOCK_FILE).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        sweep(tmp_path)
        assert strange.exists()


def test_what_a_joined_rank_prints_is_filed_and_its_end_goes_where_the_launcher_wants(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "ranks" / "rank1.log"
    for words in (("one", "two"), ()):
        with join._redirected(log):
            subprocess.run(["echo", *words], check=True) if words else None
        print("the end", flush=True)
        assert capfd.readouterr().out == "the end\n"
    assert log.read_text() == "one two\n"
    log.write_text("")
    with join._redirected(log):
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
    assert ended.stderr.splitlines()[-1].startswith("train: error: model._target_=own.Other: ")
