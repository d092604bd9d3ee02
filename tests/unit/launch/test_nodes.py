"""Runs over two machines, played by two supervisors on the loopback interface."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.reliability import lab
from tests.reliability.rank_runs import Ended, RankRun
from trainer.core.errors import ConfigError
from trainer.core.launcher import first_host, is_loss, membership, node_of, rendezvous_of, task
from trainer.launch import nodes
from trainer.launch.nodes import Hello, Link

SLACK_S = float(os.environ.get("RELIABILITY_SLACK_S", "10"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Machines:
    """The same command on two machines that share a folder, typed in different places."""

    def __init__(self, place: Path, *typed: str, ranks: int = 1, strikes: str = "") -> None:
        self.place, self.address = place, f"127.0.0.1:{free_port()}"
        self.runs = []
        for node in range(2):
            self.runs.append(
                RankRun.start(
                    place / f"machine{node}",
                    *typed,
                    f"parallel.ranks={ranks}",
                    "parallel.nodes=2",
                    f"parallel.node={node}",
                    f"parallel.rendezvous={self.address}",
                    f"hydra.run.dir={place / 'run'}",
                    STRIKES=strikes,
                    MARKS=str(self.marks),
                )
            )

    @property
    def marks(self) -> Path:
        marks = self.place / "marks"
        marks.mkdir(parents=True, exist_ok=True)
        return marks

    @property
    def folder(self) -> Path:
        return self.place / "run"

    def end(self) -> list[Ended]:
        return [run.end() for run in self.runs]

    def assert_none_left(self) -> None:
        for run in self.runs:
            run.assert_none_left("machines")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_two_machines_make_one_run_with_the_bits_of_one(ranks: int, tmp_path: Path) -> None:
    alone = RankRun.start(tmp_path / "alone", f"parallel.ranks={2 * ranks}")
    machines = Machines(tmp_path, ranks=ranks)
    assert [ended.code for ended in machines.end()] == [0, 0]
    assert alone.end().code == 0
    theirs, mine = (lab.outcome(folder, rng=False) for folder in (machines.folder, alone.folder))
    lab.assert_same(theirs, mine, "machines")
    plan = json.loads((machines.folder / "plan.json").read_text())
    assert plan["world_size"] == 2 * ranks
    for run in machines.runs:
        assert {path.name for path in run.place.iterdir()} == {"marks"}
    machines.assert_none_left()


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        ("rank", "rank 1 was killed by SIGKILL"),
        pytest.param("node 1", "node 1 with rank 1 was lost", marks=pytest.mark.nightly),
        pytest.param("node 0", "node 0 was lost", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.nightly
def test_a_death_on_one_machine_ends_the_run_on_all(lost: str, says: str, tmp_path: Path) -> None:
    strikes = "SIGKILL@update:3@1" if lost == "rank" else ""
    machines = Machines(tmp_path, "model.pause=0.2", strikes=strikes)
    killed = None
    if lost == "rank":
        ended = machines.end()
        began = float(next(iter(machines.marks.iterdir())).read_text())
    else:
        machines.runs[0].wait_for("../run/metrics.jsonl")
        killed, began = int(lost[-1]), time.time()
        machines.runs[killed].process.send_signal(signal.SIGKILL)
        ended = machines.end()
    for node, each in enumerate(ended):
        if node != killed:
            assert each.code == 7, ended
            assert len(each.errors) == 1, ended
            assert says in each.errors[0], ended
            assert each.at - began < 10 + SLACK_S
    if killed != 0:
        assert lab.status(machines.folder)["exit_code"] == 7
    machines.assert_none_left()
    print(f"{lost}: {max(each.at for each in ended) - began:.1f} s")


def test_a_difference_between_machines_stops_both_with_one_line(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    other = machines.runs[1].process
    other.kill()
    other.communicate()
    machines.runs[1] = RankRun.start(
        tmp_path / "machine1",
        *("optimizer.lr=0.5", "parallel.ranks=1", "parallel.nodes=2", "parallel.node=1"),
        *(f"parallel.rendezvous={machines.address}", f"hydra.run.dir={tmp_path / 'run'}"),
    )
    for ended in machines.end():
        assert ended.code == 2
        assert len(ended.errors) == 1
        assert "optimizer.lr: node 1 was given another value than node 0" in ended.errors[0]
    assert not machines.folder.exists()


@pytest.mark.nightly
def test_a_rank_lost_on_another_machine_is_started_again_there(tmp_path: Path) -> None:
    undisturbed = Machines(tmp_path / "undisturbed")
    assert [ended.code for ended in undisturbed.end()] == [0, 0]
    strikes = "SIGKILL@update:3@1 exit@reduce:6@0"
    machines = Machines(tmp_path / "run", "parallel.max_restarts=2", strikes=strikes)
    ended = machines.end()
    assert [each.code for each in ended] == [0, 0], ended
    assert [len(each.errors) for each in ended] == [2, 0], ended
    assert lab.logged(machines.folder) == lab.logged(undisturbed.folder)


@pytest.mark.nightly
def test_a_signal_to_one_machine_stops_all_saved(tmp_path: Path) -> None:
    machines = Machines(tmp_path, "model.pause=0.1")
    machines.runs[0].wait_for("../run/metrics.jsonl")
    machines.runs[1].process.send_signal(signal.SIGTERM)
    assert [ended.code for ended in machines.end()] == [75, 75]
    assert lab.status(machines.folder)["state"] == "preempted"


HELLO = Hello(node=0, nodes=2, ranks=1, config={"seed": "0"})


def test_strangers_at_the_meeting_are_ignored() -> None:
    address = f"127.0.0.1:{free_port()}"
    greetings = [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 70000, b"[1]\n", b'{"node": 9}\n', b"", b"{}\n"]
    strangers: list[socket.socket] = []

    def knock() -> None:
        for greeting in greetings:
            strangers.append(socket.create_connection(nodes.split(address)))
            strangers[-1].sendall(greeting)
        guest.append(nodes.join(Hello(node=1, nodes=2, ranks=1, config={"seed": "0"}), address))

    guest: list[nodes.Nodes] = []
    thread = threading.Thread(target=_when_open, args=(address, knock))
    thread.start()
    host = nodes.gather(HELLO, address)
    thread.join()
    assert list(host.links) == [1]
    host.tell({"folder": "x"})
    assert guest[0].links[0].wait(5) == {"folder": "x"}
    for each in (host, *guest):
        each.close()
    for stranger in strangers:
        stranger.close()


def _when_open(address: str, work: Callable[[], None]) -> None:
    for _ in range(100):
        with suppress(OSError):
            socket.create_connection(nodes.split(address)).close()
            break
        time.sleep(0.05)
    work()


def test_a_link_keeps_messages_apart_and_knows_when_it_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        one, two = Link(here), Link(server.accept()[0])
    for number in range(3):
        one.send({"number": number})
    assert one.wait(0.01) is None
    assert two.wait(1) == {"number": 0}
    assert two.receive() == [{"number": 1}, {"number": 2}]
    one.close()
    assert two.wait(1) is None
    assert not two.is_open
    two.close()


@pytest.mark.parametrize(
    ("listed", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[03-05,9],head", "gpu03"),
        ("head,gpu[1-2]", "head"),
        ("r[1-2]n.x", "r1n.x"),
        ("a[7,9]", "a7"),
    ],
)
def test_the_first_machine_of_a_slurm_list(listed: str, first: str) -> None:
    assert first_host(listed) == first
    environment = {"SLURM_JOB_NODELIST": listed, "SLURM_JOB_ID": "123456"}
    assert rendezvous_of(None, environment) == f"{first}:23456"


def test_srun_says_which_rank_or_which_machine_this_is() -> None:
    srun = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "7",
    }
    member = membership(srun)
    assert member is not None
    assert (member.rank, member.size, member.local_rank, member.local_size) == (3, 4, 1, 2)
    assert member.meeting == "tcp://n1:20007"
    uneven = membership({**srun, "SLURM_STEP_TASKS_PER_NODE": "1,3"})
    assert uneven is not None
    assert uneven.local_size == 3
    assert task(srun) == 3
    one_a_node = {**srun, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    assert node_of("auto", 2, one_a_node) == 1
    with pytest.raises(ConfigError, match="srun started 4 tasks"):
        node_of("auto", 2, srun)
    with pytest.raises(ConfigError, match="largest valid value is 1"):
        node_of(2, 2, {})
    with pytest.raises(ConfigError, match=r"parallel\.node: which of the 2 machines"):
        node_of("auto", 2, {})
    with pytest.raises(ConfigError, match="something else started the ranks"):
        node_of(0, 2, {"RANK": "0"})
    with pytest.raises(ConfigError, match="needs the host and a free port"):
        rendezvous_of(None, {})


def test_an_address_that_is_not_this_machines_is_refused() -> None:
    with pytest.raises(ConfigError, match="node 0 cannot listen there"):
        nodes.gather(HELLO, "192.0.2.1:29500")


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "5"}, "RANK=5 in the environment: WORLD_SIZE=2 makes 1 the largest"),
        ({"RANK": "one"}, "RANK='one' in the environment: not a number from 0 on"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' in the environment: not a number from 1 on"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 in the environment: LOCAL_WORLD_SIZE=2 makes 1"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3: WORLD_SIZE=2 ranks are all there are"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' in the environment: not a number"),
        ({"TRAIN_MEETING_S": "-1"}, "TRAIN_MEETING_S='-1' in the environment: not a number"),
    ],
)
def test_a_place_among_ranks_that_cannot_be_is_refused(
    variables: dict[str, str], says: str
) -> None:
    good = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    good |= {"MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    assert membership(good) is not None
    with pytest.raises(ConfigError, match=re.escape(says)):
        membership(good | variables)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: reset", True),
        ("Gloo connectFullMesh failed with [../third_party/gloo/gloo/rendezvous/x.cc:9] no", True),
        ("Connection closed by the label server", False),
        ("cannot open gloo.txt", False),
    ],
)
def test_a_lost_rank_is_told_from_any_other_error(text: str, lost: bool) -> None:
    assert is_loss(RuntimeError(text)) is lost
    assert not is_loss(ValueError(text))
