"""Two hosts whose cable, agent or folder fails: the weights are those of an undisturbed run."""

import re
import signal
import time

import pytest

from tests.lib.cluster import Hosts, wait_for
from tests.lib.host_runs import C10D, OWN, codes, start, start_on, started, weights
from tests.lib.nightly import LIMIT_S
from tests.lib.run_support import read_json, steps

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(LIMIT_S)]

LINE = ("steps=40", "checkpoint.every=10")


@pytest.fixture
def undisturbed(hosts: Hosts) -> bytes:
    """The weights of a run to which nothing happens."""
    (hosts.folder / "net.py").write_text(OWN)
    assert started(hosts, [hosts.folder] * 2, *C10D, *LINE, "name=whole") == [0, 0]
    return weights(hosts, "whole")


def has_taken(hosts: Hosts, least: int) -> bool:
    files = hosts.folder.glob("outputs/*/*-gpt/metrics.jsonl")
    return any(len(steps(file.parent)) >= least for file in files)


def disturb(hosts: Hosts, *words: str) -> list:
    """Start a run, and wait until it has saved and goes on."""
    agents = start(hosts, [hosts.folder] * 2, *C10D, *LINE, *words)
    wait_for(lambda: has_taken(hosts, 14), hosts)
    return agents


def cable(hosts: Hosts, state: str) -> None:
    hosts.run(["ip", "link", "set", "cable", state])


def errors(hosts: Hosts) -> list[str]:
    lines = hosts.printed().splitlines()
    return [line for line in lines if line.startswith("train: error")]


def goes_on(hosts: Hosts) -> bool:
    """Whether the same command completes the run, once both hosts have lost their power."""
    for number in range(2):
        hosts.lose(number)
    return started(hosts, [hosts.folder] * 2, *C10D, *LINE) == [0, 0]


def test_a_cable_that_is_out_for_five_seconds_is_waited_for(undisturbed, hosts):
    agents = disturb(hosts)
    cable(hosts, "down")
    time.sleep(5)
    cable(hosts, "up")
    assert codes(hosts, agents) == [0, 0], hosts.printed()
    assert weights(hosts) == undisturbed


def test_of_hosts_whose_cable_is_cut_each_names_the_other(undisturbed, hosts):
    disturb(hosts, "--max-restarts=0", "parallel.timeout_s=8")
    cable(hosts, "down")
    (run,) = hosts.folder.glob("outputs/*/*-gpt")
    for own, other in (("one", "two"), ("two", "one")):
        pattern = f"train.{own}.log"
        wait_for(lambda pattern=pattern: [*run.glob(pattern)], hosts, 120)
        words = re.compile(rf"(no word from|lost) rank \d on {other}\b.* at step \d+ ")
        wait_for(lambda words=words, log=run / pattern: words.search(log.read_text()), hosts)
    cable(hosts, "up")
    assert goes_on(hosts), hosts.printed()
    assert weights(hosts) == undisturbed


def test_packets_that_are_lost_change_no_bit(undisturbed, hosts):
    for number in range(2):
        # Not by `tc netem`, which not every kernel has.
        lost = ["-m", "statistic", "--mode", "random", "--probability", "0.03", "-j", "DROP"]
        hosts.run(["iptables", "-A", "INPUT", "-i", "cable", *lost], number)
    assert codes(hosts, disturb(hosts)) == [0, 0], hosts.printed()
    assert weights(hosts) == undisturbed


@pytest.mark.parametrize(("number", "state"), [(0, "preempted"), (1, "completed")])
def test_an_agent_that_is_killed_takes_no_step_from_the_run(undisturbed, hosts, number, state):
    agents = disturb(hosts, "--max-restarts=0", "parallel.timeout_s=8")
    # The words around an agent have become it.
    agents[number].send_signal(signal.SIGKILL)
    (run,) = hosts.folder.glob("outputs/*/*-gpt")
    # Without the first, where agents meet, the other ends its rank; ranks without the second go on.
    wait_for(lambda: read_json(run / "status.json")["state"] != "running", hosts)
    assert read_json(run / "status.json")["state"] == state
    assert goes_on(hosts), hosts.printed()
    assert weights(hosts) == undisturbed


def test_a_rank_that_is_killed_is_named_with_its_host_and_what_it_did(hosts):
    (hosts.folder / "net.py").write_text(OWN)
    words = ("--max-restarts=0", *LINE)
    assert all(started(hosts, [hosts.folder] * 2, *C10D, *words, KILLED="1"))
    killed, lines = "rank 1 on two was killed by SIGKILL, .*, at step 4 .compute", errors(hosts)
    assert any(re.match(f"train: error: {killed}", line) for line in lines), lines
    assert any(re.match(f"train: error: lost rank 1 on two .*: {killed}", line) for line in lines)


def test_hosts_with_caches_of_their_own_take_the_same_steps(undisturbed, hosts):
    agents = []
    for number in range(2):
        cache = {"TRAIN_CACHE": str(hosts.folder / f"cache-{number}")}
        agents.append(start_on(hosts, number, hosts.folder, *C10D, *LINE, **cache))
    assert codes(hosts, agents) == [0, 0], hosts.printed()
    assert weights(hosts) == undisturbed


def test_hosts_whose_clocks_differ_by_an_hour_take_the_same_steps(undisturbed, hosts):
    late = hosts.folder / "late"
    late.mkdir()
    (late / "net.py").write_text(OWN)
    # Python imports it at its start.
    clock = "import time\nright = time.time\ntime.time = lambda: right() - 3600\n"
    (late / "sitecustomize.py").write_text(clock)
    assert started(hosts, [hosts.folder, late], *C10D, *LINE) == [0, 0], hosts.printed()
    assert weights(hosts) == undisturbed


def test_a_host_that_is_lost_is_done_without_and_may_come_back(hosts, monkeypatch):
    """By `--nnodes=1:2`; a layout of sums that is of no ranks keeps the bits."""
    # Else PyTorch 2.13 tells a host that comes later no address.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    (hosts.folder / "net.py").write_text(OWN)
    words = ("deterministic=layout", "--nnodes=1:2")
    assert started(hosts, [hosts.folder] * 2, *C10D, *LINE, *words, "name=whole") == [0, 0]
    first, _ = disturb(hosts, *words)
    hosts.lose(1)
    wait_for(lambda: has_taken(hosts, 24), hosts)
    second = start_on(hosts, 1, hosts.folder, *C10D, *LINE, *words)
    assert codes(hosts, [first, second]) == [0, 0], hosts.printed()
    assert weights(hosts) == weights(hosts, "whole")


def test_hosts_with_folders_of_their_own_are_refused(hosts):
    (hosts.folder / "net.py").write_text(OWN)
    agents = []
    for number in range(2):
        own = f"outputs={hosts.folder / f'outputs-{number}'}"
        words = (*C10D, "--max-restarts=0", *LINE, own)
        agents.append(start_on(hosts, number, hosts.folder, *words))
    assert all(codes(hosts, agents))
    assert "type the same command on every node" in errors(hosts)[0], hosts.printed()


def sent(hosts: Hosts, number: int) -> int:
    """Count the bytes that a host has sent over the cable."""
    path = "/sys/class/net/cable/statistics/tx_bytes"
    # /sys shows the interfaces of where it was mounted.
    line = ["sh", "-c", f"mount -t sysfs sysfs /sys && cat {path}"]
    return int(hosts.run(line, number))


def test_the_traffic_between_hosts_is_that_of_the_plan(hosts):
    (hosts.folder / "net.py").write_text(OWN.replace("nn.Linear(4, 3)", WIDE))
    shards = ("--nproc-per-node=2", "parallel=hsdp", "parallel.shard=2", "parallel.replicate=2")
    figures = []
    for count in (5, 25):
        before = sent(hosts, 1)
        words = (*C10D, *shards, f"steps={count}", f"name=n{count}", "checkpoint.every=null")
        assert started(hosts, [hosts.folder] * 2, *words) == [0, 0], hosts.printed()
        figures.append(sent(hosts, 1) - before)
    (run,) = hosts.folder.glob("outputs/*/*-n25")
    plan = read_json(run / "plan.json")
    (row,) = [row for row in plan["sync_table"] if row["policy"] == plan["sync"]]
    # Of both ranks of a host.
    each = (figures[1] - figures[0]) / 20 / 2
    assert each == pytest.approx(row["across"], rel=0.25)


WIDE = "nn.Sequential(nn.Linear(4, 4096), nn.Linear(4096, 64), nn.Linear(64, 3))"
