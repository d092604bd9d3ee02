"""Runs over two hosts that torchrun starts: a rank that is lost, and hosts that differ."""

import os
import shutil
import sys

import pytest

from tests.lib.cli_support import CHECKOUT
from tests.lib.host_runs import C10D, LINE, OWN, STATIC, codes, started, weights
from tests.lib.nightly import LIMIT_S
from tests.lib.run_support import read_json, steps

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(LIMIT_S)]


@pytest.mark.parametrize("rendezvous", [C10D, STATIC], ids=["c10d", "static"])
@pytest.mark.parametrize("killed", "01")
def test_a_rank_that_is_killed_once_is_started_again_and_the_run_completes(
    killed, rendezvous, hosts
):
    (hosts.folder / "net.py").write_text(OWN)
    ended = started(hosts, [hosts.folder] * 2, *rendezvous, KILLED=killed)
    assert ended == [0, 0], hosts.printed()
    assert (hosts.folder / "killed").exists()
    (run,) = hosts.folder.glob("outputs/*/*-gpt")
    assert read_json(run / "status.json")["state"] == "completed"
    assert [entry["step"] for entry in steps(run)] == [*range(1, 11)]
    assert (run / ".hydra" / "resumed").is_dir()
    assert started(hosts, [hosts.folder] * 2, *rendezvous, "name=whole") == [0, 0]
    assert weights(hosts) == weights(hosts, "whole")


@pytest.mark.parametrize("other", ["trainer", "net"])
def test_hosts_with_other_code_are_refused_in_a_line_that_names_them(other, hosts):
    folders = [hosts.folder / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
        (folder / "net.py").write_text(OWN)
    if other == "net":
        (folders[1] / "net.py").write_text(OWN.replace("index % 3", "index % 2"))
    else:
        for name in ("trainer", "conf", "recipes"):
            shutil.copytree(CHECKOUT / name, folders[1] / name)
        schedules = folders[1] / "trainer" / "optim" / "schedules.py"
        schedules.write_text(f"{schedules.read_text()}\nCHANGED = True\n")
    codes = started(hosts, folders, *C10D, "--max-restarts=0")
    assert all(codes), hosts.printed()
    errors = [line for line in hosts.printed().splitlines() if line.startswith("train: error")]
    says = {"trainer": "step-trainer: rank 1 (", "net": "net: its file on two (rank 1) differs"}
    assert errors, hosts.printed()
    assert all(says[other] in line and "two" in line and "one" in line for line in errors)


def test_the_lines_of_train_hosts_start_a_run_on_both_hosts_as_they_are_pasted(hosts):
    (hosts.folder / "net.py").write_text(OWN)
    # What an engine of containers makes, and a network that hosts do not share: a pair in one host
    hosts.run(["ip", "link", "add", "docker0", "type", "veth", "peer", "name", "ib0"])
    for name, address in {"docker0": "172.17.0.1/16", "ib0": "10.78.0.1/24"}.items():
        hosts.run(["ip", "address", "add", address, "dev", name])
        hosts.run(["ip", "link", "set", name, "up"])
    hosts.environment = {"PYTHONPATH": f"{hosts.folder}{os.pathsep}{CHECKOUT}"}
    in_folder = ["sh", "-c", 'cd "$0" && exec "$@"', str(hosts.folder)]
    asked = [sys.executable, "-m", "trainer", "hosts", "one", "two", *LINE, "parallel.ranks=2"]
    by_host = [hosts.run([*in_folder, *asked], number) for number in range(2)]
    lines = [[each for each in text.splitlines() if each[:3] == "cd "] for text in by_host]
    # Each host gives both lines, and is named once.
    assert lines[0] == lines[1], by_host
    assert all("GLOO_SOCKET_IFNAME=cable" in line for line in lines[0])
    assert "docker0          172.17.0.1       speed not known, leads to no other host" in by_host[0]
    # The second host waits for the first.
    agents = [hosts.start(number, ["sh", "-c", lines[0][number]]) for number in (1, 0)]
    assert codes(hosts, agents) == [0, 0], hosts.printed()
    (run,) = hosts.folder.glob("outputs/*/*-gpt")
    assert [entry["step"] for entry in steps(run)] == [*range(1, 11)]
    # Without any other host in sight there are lines too, and what is missing is said.
    hosts.run(["ip", "link", "set", "cable", "down"])
    hosts.run(["ip", "link", "delete", "docker0"])
    alone = hosts.run([*in_folder, "sh", "-c", 'exec "$0" "$@" 2>&1', *asked])
    assert "no interface here leads to another host" in alone
    assert "GLOO_SOCKET_IFNAME" not in alone
