"""What a supervisor makes of boards, ends and signals, with processes that are no ranks."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.reliability import lab
from trainer.core.errors import Preempted, RankFailedError
from trainer.core.rank_progress import RankPosition, RankProgress
from trainer.core.signals import StopFlag
from trainer.core.world import World
from trainer.launch import supervise
from trainer.launch.ends import (
    STACKS_SIGNAL,
    Ended,
    Records,
    among_hosts,
    find_end,
    leave_end,
    lost_rank,
    verdict,
)
from trainer.launch.membership import Membership
from trainer.launch.supervise import UNBEGUN_S, Child, Watch

SLEEPS = "sleep 600"
KEY = "parallel.timeout_s"


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Callable[..., Watch]]:
    """Makes a watch over ranks that do as a shell does."""

    def watch_over(*works: str, timeout_s: float = 600.0) -> Watch:
        records, children = Records(tmp_path), []
        before = signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # which processes inherit
        for rank, work in enumerate(works):
            process = subprocess.Popen(["sh", "-c", work], start_new_session=True)
            progress = RankProgress(records.rank_progress(rank))
            child = Child(rank=rank, process=process, rank_progress=progress)
            for end in (process.wait, child.kill):
                opened.callback(end)
            children.append(child)
        signal.signal(STACKS_SIGNAL, before)
        how = {"timeout_s": timeout_s, "unbegun": "nothing is saved", "stop": StopFlag()}
        return Watch(children=children, records=records, **how)

    with ExitStack() as opened:
        yield watch_over


def test_a_rank_that_leaves_with_code_0_and_no_word_is_named_and_ends_the_others(
    tmp_path, watching
):
    watch, began = watching(SLEEPS, "true"), time.monotonic()
    watch.run()
    assert time.monotonic() - began < 60
    error = verdict(watch.ended, tmp_path, 600)
    assert str(error) == "rank 1 exited with code 0 and no error report, at the start"


def test_a_rank_waits_in_a_sum_so_that_one_that_hangs_before_it_is_named(monkeypatch):
    world, seen = World(size=2), []
    monkeypatch.setattr(dist, "all_reduce", lambda _: seen.append(world.rank_progress.read().waits))
    world.sum(torch.ones(1))
    assert [*seen, world.rank_progress.read().waits] == [True, False]


HELD_UP, ALL = ("agree", "compute"), ("compute", "compute")
FIRST = f"ten times {KEY} in the first step"


@pytest.mark.parametrize(
    ("phases", "is_first", "signalled", "says"),
    [
        (HELD_UP, False, None, f"rank 1 did not answer for 0.1 s ({KEY})"),
        (HELD_UP, True, None, f"rank 1 did not answer for 1 s ({FIRST})"),
        (ALL, False, signal.SIGCONT, f"rank 0 did not answer for 0.1 s ({KEY})"),
        (ALL, False, signal.SIGSTOP, f"rank 0 did not answer for 0.1 s ({KEY})"),
    ],
)
def test_a_step_that_ranks_hold_up_ends_in_time_also_when_a_signal_asked_to_stop(
    phases, is_first, signalled, says, tmp_path, watching
):
    watch = watching(SLEEPS, SLEEPS, timeout_s=0.1)
    for child, phase in zip(watch.children, phases, strict=True):
        child.rank_progress.write(RankPosition(step=3, phase=phase, is_first=is_first))
        lost = {"crash": "lost another rank", "lost": [], "code": 1}
        watch.records.write(Ended.now(child.rank, RankPosition(step=4, phase="agree"), lost))
        if signalled is not None:
            child.process.send_signal(signalled)
            watch.stop.is_set, watch.stopped_at = True, -UNBEGUN_S
    began = time.monotonic()
    watch.run()
    assert time.monotonic() - began > (1 if is_first else 0.1)
    assert str(verdict(watch.ended, tmp_path, 0.1)) == f"{says}, at step 3 (compute)"


def test_time_in_which_the_whole_job_was_suspended_is_no_silence_of_a_rank(
    tmp_path, watching, monkeypatch
):
    """The watch itself does not run for a while, as between SIGSTOP and SIGCONT."""
    monkeypatch.setattr(supervise, "LONGEST_POLL_S", 0.1)
    over = tmp_path / "over"
    watch = watching(f"until test -e {over}; do sleep 0.02; done; sleep 0.5", timeout_s=2.0)

    def suspend_once() -> None:
        if not over.exists():
            time.sleep(2.3)
            over.touch()

    watch.stop = suspend_once
    watch.children[0].rank_progress.write(RankPosition(step=3, phase="compute"))
    watch.records.write(Ended.now(0, RankPosition(), {"code": 0}))
    watch.run()
    assert over.exists()
    assert verdict(watch.ended, tmp_path, 2.0) is None


def test_an_abort_of_nccl_is_a_timeout_or_a_desync(tmp_path):
    end = Ended(1, -signal.SIGABRT, {}, 1.0, RankPosition(step=2, phase="reduce"))
    text = str(verdict({1: end}, tmp_path, 600))
    assert "as collectives do that time out, or when ranks call different ones (a desync" in text


def test_outside_of_steps_ranks_may_take_their_time():
    for phase in ("start", "saving", "evaluation", "end"):
        assert RankPosition(step=3, phase=phase).limit_s(1e-9) == float("inf")


def test_a_signal_before_the_first_step_ends_ranks_that_do_not_follow(watching):
    watch = watching(SLEEPS)
    watch.stop.is_set, watch.stopped_at = True, -UNBEGUN_S
    with pytest.raises(Preempted, match="nothing is saved"):
        watch.run()


PEER = {"crash": "RuntimeError: Connection closed by peer", "code": 1}
CRASH = {"crash": "ValueError: injected", "code": 1}
TORN = {"error": "DataError", "text": "record 7 is torn", "code": 3}


@pytest.mark.parametrize(
    ("report", "place", "says"),
    [
        (CRASH, ("compute", False), "rank 1 failed at step 2 (compute): ValueError: injected"),
        (PEER, ("agree", True), "rank 1 failed in a collective at step 2 (agree): RuntimeError: C"),
        (TORN, ("compute", False), "rank 1, step 2 (compute): record 7 is torn"),
        ({}, ("compute", False), f"rank 1 did not answer for 600 s ({KEY}), at step 2 (com"),
        ({}, ("agree", True), f"rank 1 waited for other ranks for 600 s ({KEY}), at step 2"),
    ],
)
def test_a_supervisor_of_one_rank_says_how_it_ended(report, place, says, tmp_path):
    at = RankPosition(step=2, phase=place[0], waits=place[1])
    end = Ended(1, 1, report, 1.0, at, is_killed=not report)
    assert str(verdict({1: end}, tmp_path, 600)).startswith(says)


GLOO = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:{}. This is typically "
    "caused by a remote worker crashing. Check the logs of the remote worker. GLHF!"
)
HOSTS = {0: ["one", "10.0.0.1"], 1: ["one", "10.0.0.1"], 2: ["two", "10.0.0.2"]}


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("537] Read error [10.0.0.2]:32900: Connection reset by peer", "rank 2 on two (Connection"),
        ("553] Connection closed by peer [::ffff:10.0.0.1]:1", "rank 1 on one (Connection closed"),
        ("553] Connection closed by peer [10.9.9.9]:1", "another rank on 10.9.9.9 (Connection"),
    ],
)
def test_the_rank_that_gloo_lost_is_named_with_its_host(what, says):
    report = lost_rank(GLOO.format(what), 0, HOSTS)
    assert report["crash"].startswith(f"lost {says}")
    assert lost_rank("RuntimeError: injected", 0, HOSTS) == {}


COMPUTES, WAITS = RankPosition(2, "compute"), RankPosition(2, "agree", waits=True)
KILLED = Ended(1, -signal.SIGKILL, {}, 9.0, COMPUTES)


def test_what_a_lost_rank_was_doing_is_read_from_the_folder_that_hosts_share(tmp_path):
    place = RankPosition(8, "reduce", waits=True)
    end = Ended(0, 1, {"crash": "lost rank 1 on two (reset)", "lost": [1]}, 1.0, place)
    error = verdict({0: end}, tmp_path, 600, "one")
    leave_end(tmp_path, KILLED, "rank 1 on two was killed by SIGKILL, at step 8 (compute)")
    found = str(among_hosts(error, end, tmp_path, 0, ["one", "two"]))
    assert found == (
        "lost rank 1 on two (reset), at step 8 (reduce): rank 1 on two was killed by SIGKILL, at "
        "step 8 (compute)"
    )
    (log,) = tmp_path.glob("train.*.log")
    assert "[rank 0] lost rank 1 on two" in log.read_text()
    assert find_end(tmp_path, [0], 1.0).startswith("lost rank 1")
    assert find_end(tmp_path, [2], 0.0) == ""


@pytest.mark.parametrize(
    ("places", "says"),
    [
        # The cable is cut, the power of a host is gone, or a rank hangs.
        ([WAITS, WAITS], "no word from rank 1 on two, rank 2 on three: rank 0 waited"),
        ([WAITS], "no word from rank 2 on three: rank 0 waited for other ranks for 600 s"),
        ([WAITS, COMPUTES], "rank 2 did not answer for 600 s"),
    ],
)
def test_of_ranks_that_wait_in_vain_each_names_who_is_lost(places, says, tmp_path):
    for rank, place in reversed([*enumerate([WAITS, *places])]):
        end = Ended(rank, -9, {}, 1.0, place, is_killed=True)
        error = verdict({rank: end}, tmp_path, 600)
        leave_end(tmp_path, end, str(error))
    assert str(among_hosts(error, end, tmp_path, 0, ["one", "two", "three"])).startswith(says)


SAID = Ended(1, 3, TORN, 9.0, COMPUTES)
FAILED = Ended(1, 1, CRASH, 5.0, COMPUTES)


@pytest.mark.parametrize("first", [KILLED, SAID, FAILED], ids=["killed", "said", "failed"])
def test_the_rank_that_others_follow_is_named_wherever_their_collective_fails(first, tmp_path):
    for place in (COMPUTES, WAITS):  # in lockstep, or at the end of a window
        followers = {r: Ended(r, 1, PEER, 6.0, place) for r in (0, 2)}
        assert str(verdict({**followers, 1: first}, tmp_path, 600)).startswith("rank 1")


def test_a_run_whose_rank_failed_begins_or_goes_on_as_often_as_is_allowed(
    tmp_path, monkeypatch, capsys
):
    saved, begun = iter([0, 4, 4]), []

    def fail(config, *_):
        begun.append(config.resume)
        raise RankFailedError("rank 1 failed")

    monkeypatch.setattr(supervise, "_attempt", fail)
    monkeypatch.setattr(supervise, "saved_step", lambda _: next(saved))
    member = Membership(rank=0, size=2, local_rank=0, local_size=2)
    with pytest.raises(RankFailedError):
        supervise.supervise(lab.config("parallel.max_restarts=2"), tmp_path, [member], StopFlag())
    assert begun == [None, None, str(tmp_path)], "from its checkpoint, once there is one"
    again = "train: rank 1 failed; starting again after step"
    shown = [f"{again} 0 (1 of 2 restarts)", f"{again} 4 (2 of 2 restarts)"]
    assert capsys.readouterr().err.splitlines()[:2] == shown


def test_stacks_are_of_ranks_that_gave_no_reason_and_make_no_folder_that_was_taken_back(
    tmp_path, watching
):
    watch, folder = watching("true", "true"), tmp_path / "run"
    for rank, report in enumerate((TORN, PEER)):
        watch.records.write(Ended.now(rank, RankPosition(), report))
        watch.records.stacks(rank).write_text("where it was")
    watch.run()
    watch.end(folder)
    assert not folder.exists()
    folder.mkdir()
    watch.end(folder)
    assert [path.name for path in folder.rglob("*.txt")] == ["rank1.txt"]
