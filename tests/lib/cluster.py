"""Two hosts on one machine, each in a network of its own, and a real Slurm over them.

A host is a network namespace with its own name; both see the same files. Slurm's and munge's
daemons are Debian's; they run in the hosts, with their files in one folder, until the block ends.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.lib.cli_support import CHECKOUT

NAMES = ("one", "two")
ADDRESSES = ("10.77.0.1", "10.77.0.2")  # in namespaces of our own, so nobody else's
PROGRAMS = {
    "hosts": {"ip": "iproute2", "unshare": "util-linux", "iptables": "iptables"},
    "slurm": {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "munged": "munge"},
}
LIMIT_S = 300.0

_ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
_CONF = """
ClusterName=tests
SlurmctldHost=one
SlurmUser=root
AuthInfo=socket={folder}/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=30
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=one,two CPUs=8
PartitionName=all Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2
"""


def missing(*kinds: str) -> str:
    """Say in one line what these tests lack here; empty where they can run."""
    needed = {program: package for kind in kinds for program, package in PROGRAMS[kind].items()}
    lacking = {package for program, package in needed.items() if shutil.which(program) is None}
    if lacking:
        return f"no {', '.join(sorted(lacking))}: apt-get install {' '.join(sorted(lacking))}"
    return "" if os.geteuid() == 0 else "network namespaces need root"


@dataclass
class Hosts:
    """Two hosts that see each other, and whatever still runs in them."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def words(self, number: int, command: Sequence[str]) -> list[str]:
        """Give the words that run a command on a host."""
        # Not by `ip netns exec`, which hides the control groups that slurmd looks for.
        space = ["nsenter", f"--net=/run/netns/{namespace(number)}", "unshare", "--uts", "--mount"]
        space = ["setpriv", "--pdeathsig", "TERM", *space]  # ends with the tests that are killed
        enter = ["sh", "-c", _ENTER, "enter", NAMES[number], str(self.folder / "hosts")]
        return [*space, *enter, *command]

    def start(self, number: int, command: Sequence[str], **more: str) -> subprocess.Popen[str]:
        """Start a command on a host; what it prints goes to one file for each."""
        name = f"log-{len(self.started)}-{NAMES[number]}.txt"
        with (self.folder / name).open("w") as log:
            process = subprocess.Popen(
                self.words(number, command),
                env={**os.environ, **self.environment, **more},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def run(self, command: Sequence[str], number: int = 0) -> str:
        """Run a command on a host to its end, and give what it printed."""
        ended = subprocess.run(
            self.words(number, command),
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    def lose(self, number: int) -> None:
        """Kill all that runs on a host, as when its power is gone."""
        asked = ["ip", "netns", "pids", namespace(number)]
        found = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()
        for each in found:
            with suppress(ProcessLookupError):
                os.kill(int(each), signal.SIGKILL)

    def printed(self) -> str:
        """Give what commands that were started have printed, for messages of tests."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("log-*")))


def namespace(number: int) -> str:
    """Name the network namespace of a host of this process."""
    return f"train-{os.getpid()}-{NAMES[number]}"


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Make two hosts with a cable between them; ends what was started on them."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    lines = [f"{address} {name}\n" for address, name in zip(ADDRESSES, NAMES, strict=True)]
    (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
    hosts = Hosts(folder)
    with ExitStack() as opened:
        for number in range(2):
            ip("netns", "add", namespace(number))
            opened.callback(ip, "netns", "delete", namespace(number))
        first, second = namespace(0), namespace(1)
        ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "cable", "netns", second)
        for number, address in enumerate(ADDRESSES):
            ip("-n", namespace(number), "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", namespace(number), "link", "set", device, "up")
        opened.callback(_end, hosts.started)
        yield hosts


def _end(started: Sequence[subprocess.Popen[str]]) -> None:
    """End processes, the last that was started first, with what they started."""
    for process in reversed(started):
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextmanager
def real_slurm(folder: Path) -> Iterator[Hosts]:
    """Start Slurm on two hosts; `train` and `torchrun` are this checkout's."""
    (folder / "bin").mkdir(parents=True)
    for name in ("state", *(f"spool-{each}" for each in NAMES)):
        (folder / name).mkdir()
    for name, module in {"train": "trainer", "torchrun": "torch.distributed.run"}.items():
        path = folder / "bin" / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        path.chmod(0o755)
    (folder / "slurm.conf").write_text(_CONF.format(folder=folder))
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    with two_hosts(folder) as hosts:
        hosts.environment = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(CHECKOUT),
            "OMP_NUM_THREADS": "1",
        }
        munge = ("munged", "--force", "--foreground", f"--key-file={folder / 'key'}")
        files = {"socket": "munge", "log-file": "munge.log", "pid-file": "munge.pid"}
        files["seed-file"] = "munge.seed"
        hosts.start(0, [*munge, *(f"--{key}={folder / name}" for key, name in files.items())])
        wait_for((folder / "munge").exists, hosts)
        hosts.start(0, ["slurmctld", "-D"])
        for number in range(2):
            hosts.start(number, ["slurmd", "-D"])
        wait_for(lambda: "2 idle" in _idle(hosts), hosts)
        yield hosts


def _idle(hosts: Hosts) -> str:
    words = hosts.words(0, ["sinfo", "--noheader", "--format=%D %t"])
    environment = {**os.environ, **hosts.environment}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    return ended.stdout


def wait_for(is_so: Callable[[], object], hosts: Hosts, limit_s: float = LIMIT_S) -> None:
    limit = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < limit, hosts.printed()
        time.sleep(0.1)
