"""Starts a run's local ranks, watches over them, and says in one line why they ended.

The ranks are processes of this program, started by a command and never by a function, so that a
notebook, joblib or a sweep can start them alike. On one machine they meet at a file in a private
folder and talk over the loopback interface alone. On several, each machine has a supervisor; the
first one's folder, verdict and decision to start again are everybody's.

PyTorch's own launcher is not used. Its store listens on every interface, whatever address it is
given; it takes a rank that hangs for one that works; and it ends with code 1 for every cause and
says so in fifty lines (torch 2.13). Ranks that torchrun or srun started are joined instead:
`trainer.core.launcher`.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, final

from trainer.checkpoint import lock
from trainer.config.keys import digests
from trainer.config.run_config import RunConfig, to_plain
from trainer.core import signals
from trainer.core.errors import ConfigError, RankLostError, TrainError, heard, said
from trainer.core.launcher import rendezvous_of
from trainer.launch import children as processes
from trainer.launch import nodes as network
from trainer.launch.attempt_folder import private_folder
from trainer.launch.children import Child
from trainer.launch.nodes import Hello, Nodes
from trainer.launch.rank import JOB_FILE, STOP_FILE, Job
from trainer.launch.verdict import verdict
from trainer.launch.watch import Asked, Watch
from trainer.report import journal
from trainer.report.run_status import rank_log, recorded, saved_step, to_go_on

POLL_S = 0.05

SHARED_S = 10.0
"""How long a shared file system may take to show one machine what another wrote."""

GONE = "node 0 was lost: its command ended, or its machine cannot be reached"


@final
@dataclass(frozen=True, kw_only=True)
class Team:
    """The ranks of this machine among those of all machines.

    Attributes:
        config: composed and valid.
        folder: the run folder, the first node's.
        node: number of this machine.
        count: ranks on each machine.
        size: ranks on all machines.
        others: the other machines' supervisors.
        asked: whether a signal asked to stop.
    """

    config: RunConfig
    folder: Path
    node: int
    count: int
    size: int
    others: Nodes = field(default_factory=Nodes)
    asked: Asked = field(default_factory=Asked)

    def ranks_of(self, node: int) -> range:
        """Give the ranks of a machine."""
        return range(node * self.count, (node + 1) * self.count)


def supervise(config: RunConfig, folder: Path, num_ranks: int, node: int = 0) -> int:
    """Run one command on several ranks.

    Args:
        config: composed and valid.
        folder: the run folder; it exists on the first machine.
        num_ranks: on this machine.
        node: number of this machine.

    Returns:
        The exit code: 0.

    Raises:
        ConfigError: the parallel mode knows one rank only, or the machines were not told the same.
        TrainError: how the run ended, where it did not end well; a `RankLostError` where a rank
            was lost more often than `parallel.max_restarts` allows.
    """
    if config.parallel.mode == "none":
        raise ConfigError(
            f"parallel.ranks={num_ranks}: parallel=none is one rank; use parallel=ddp"
        )
    # A last look for garbage takes long where a class of the user's own brought torch along.
    atexit.register(gc.freeze)
    num_nodes = config.parallel.nodes
    # Which values are defaults follows from the others, which are compared.
    settings = digests({key: value for key, value in to_plain(config).items() if key != "unset"})
    hello = Hello(node=node, nodes=num_nodes, ranks=num_ranks, config=settings)
    size = num_nodes * num_ranks
    address = rendezvous_of(config.parallel.rendezvous) if num_nodes > 1 else ""
    if node:
        with closing(network.join(hello, address)) as others:
            team = Team(
                config=config, folder=folder, node=node, count=num_ranks, size=size, others=others
            )
            return _follow(team)
    with ExitStack() as opened:
        if config.command == "train":
            opened.enter_context(lock.hold(folder))
            opened.enter_context(recorded(folder))
        others = network.gather(hello, address) if num_nodes > 1 else Nodes()
        team = Team(config=config, folder=folder, node=0, count=num_ranks, size=size, others=others)
        opened.enter_context(closing(others))
        return _lead(team)


def _lead(team: Team) -> int:
    """Run on the first machine, and tell the others how it ended.

    Raises:
        TrainError: how it ended, where it did not end well.
    """
    told: dict[str, Any] = said(RankLostError("node 0 was stopped"))
    try:
        if team.others.links:
            written = (team.folder / lock.FILE_NAME).read_text()
            team.others.tell({"folder": str(team.folder), "lock": written})
        _restarting(team)
        told = {}
    except RankLostError as error:
        lost = RankLostError(f"{error}{_what_is_left(team)}")
        told = said(lost)
        raise lost from None
    except TrainError as error:
        told = said(error)
        raise
    finally:
        team.others.tell({"ended": told})
    return 0


def _what_is_left(team: Team) -> str:
    """Say what of a training run is saved, and what to type."""
    if team.config.command != "train" or not (step := saved_step(team.folder)):
        return ""
    return f"; saved up to step {step}: go on with: {to_go_on(team.config, team.folder)}"


def _restarting(team: Team) -> None:
    """Try, and after a lost rank try again, as often as may be.

    Raises:
        RankLostError: a whole machine is gone, or a rank once more than may be, or a signal asked
            to stop.
    """
    resumes = False
    most = team.config.parallel.max_restarts if team.config.command == "train" else 0
    for restart in range(most):
        try:
            _attempt(team, resumes=resumes)
        except RankLostError as error:
            if not team.others.are_whole or team.asked.at is not None:
                raise
            step = _newest_step(team.folder)
            resumes = step is not None
            sys.stderr.write(
                f"train: {error}; starting again after step {step or 0} "
                f"({restart + 1} of {most} restarts)\n"
            )
        else:
            return
    _attempt(team, resumes=resumes)


def _newest_step(folder: Path) -> int | None:
    """Find the step to go on from; None, with the metrics begun anew, where nothing is saved."""
    from trainer.checkpoint.store import CHECKPOINTS, CheckpointStore  # noqa: PLC0415 - imports torch

    steps = CheckpointStore(folder / CHECKPOINTS).steps()
    if steps:
        return steps[-1]
    journal.truncate_after(folder / journal.METRICS_FILE, 0)
    return None


def _follow(team: Team) -> int:
    """Run on another machine than the first, as the first one says.

    Raises:
        RankLostError: the first machine is gone.
        heard: how the run ended, as the first machine says, where it did not end well.
    """
    link = team.others.links[0]
    while (message := link.wait()) is not None:
        if "folder" in message:
            team = replace(team, folder=_shared(message["folder"], message["lock"], team.node))
        if "start" in message:
            message = _attempt(team, **message["start"]) or {}
        if "ended" in message:
            if message["ended"]:
                raise heard(message["ended"])
            return 0
    raise RankLostError(GONE)


def _shared(folder: str, written: str, node: int) -> Path:
    """Find the first machine's run folder on this one.

    Raises:
        ConfigError: it is not there; the file that says who holds the run is not the same.
    """
    place = Path(folder)
    limit = time.monotonic() + SHARED_S
    while time.monotonic() < limit:
        with suppress(OSError):
            if (place / lock.FILE_NAME).read_text() == written:
                return place
        time.sleep(POLL_S)
    raise ConfigError(
        f"outputs: {folder} of node 0 is not on node {node}; type a folder on a file system that "
        "all nodes share"
    )


def _attempt(team: Team, *, resumes: bool, meeting: str | None = None) -> dict[str, Any] | None:
    """Start the ranks of this machine once, and wait for all ranks there are.

    Args:
        team: this machine's part.
        resumes: whether to go on from the newest checkpoint.
        meeting: where the ranks meet, if the first machine said it.

    Returns:
        What the first machine said last, where it said that the run is over.

    Raises:
        error: how it ended, on the first machine, where it did not end well.
    """
    config = team.config
    if resumes:
        config = config.model_copy(update={"resume": str(team.folder)})
    with private_folder() as private:
        children, handles = list[Child](), list[int]()
        again = to_go_on(config, team.folder, begins=True)
        with ExitStack() as opened:
            if team.node == 0 and team.others.links:
                server = opened.enter_context(network.listen_for_ranks(team.others.address))
                host, port = server.getsockname()[:2]
                meeting, handles = f"tcp://{network.bracketed(host)}:{port}", [server.fileno()]
                start = {"resumes": resumes, "meeting": meeting}
                team.others.tell({"start": start})
            _write_job(team, config, private, meeting or f"file://{private}/meeting", handles)
            watch = Watch(
                children=children,
                private=private,
                others=team.others,
                expected=team.ranks_of(team.node) if team.node else range(team.size),
                ranks_of=team.ranks_of,
                timeout_s=config.parallel.timeout_s,
                unbegun=f"{signals.UNBEGUN}: go on with: {again}",
                asked=team.asked,
                tell=_tell,
            )
            opened.callback(processes.end, children, private, team.folder)
            with _forwarding(team, private, children):
                for rank in team.ranks_of(team.node):
                    log, variables = rank_log(config, team.folder, rank), _environment(team, rank)
                    own = handles if rank == 0 else []
                    children.append(processes.start(log, private, rank, variables, own))
                watch.run()
    if team.node:
        return watch.over
    error = verdict(watch.ended, team.folder, config.parallel.timeout_s)
    if error is not None:
        raise error
    return None


def _tell(line: str) -> None:
    """Say something while the ranks run, on the screen and in train.log."""
    sys.stderr.write(f"train: {line}\n")
    logging.getLogger(__name__).warning(line)


def _write_job(
    team: Team, config: RunConfig, private: Path, meeting: str, handles: Sequence[int]
) -> None:
    job = Job(
        config=config.model_dump(mode="json", by_alias=True),
        folder=str(team.folder),
        path=sys.path,
        size=team.size,
        local_size=team.count,
        supervisor=os.getpid(),
        meeting=meeting,
        listener=handles[0] if handles else None,
    )
    (private / JOB_FILE).write_text(json.dumps(asdict(job)))


def _environment(team: Team, rank: int) -> dict[str, str]:
    """Give the variables of a rank, for the user's own code and for libraries that ask."""
    name = network.interface_of(team.others.address)
    interfaces = {} if name is None else dict.fromkeys(processes.INTERFACES, name)
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank % team.count,
        "WORLD_SIZE": team.size,
        "LOCAL_WORLD_SIZE": team.count,
    }
    return {**interfaces, **{key: str(value) for key, value in numbers.items()}}


@contextmanager
def _forwarding(team: Team, private: Path, children: Sequence[Child]) -> Iterator[None]:
    """Pass the first signal to stop on to every rank that has something to save.

    The watch ends them at once where nothing is to be saved, or a second signal came.

    Yields:
        Nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked, saves = team.asked, team.config.command == "train"

    def on_signal(number: int, frame: FrameType | None) -> None:
        if asked.at is not None:
            asked.at_once |= time.monotonic() > asked.at + signals.TOGETHER_S
            return
        asked.at, asked.at_once = time.monotonic(), not saves
        (private / STOP_FILE).touch()
        for child in children:
            # Before it notes its process it does not listen, and will look for the file.
            child.signal(signal.SIGTERM)

    before = {each: signal.signal(each, on_signal) for each in signals.SIGNALS}
    if signals.was_asked():
        asked.at = time.monotonic()
    if asked.at is not None:
        (private / STOP_FILE).touch()
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
