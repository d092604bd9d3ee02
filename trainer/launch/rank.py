"""Run as one rank: `python -m trainer.launch.rank FOLDER RANK`, which the supervisor starts.

The folder says what to run, and takes what the supervisor wants to know: where the rank is, and how
it ended. Nothing is printed about an end; the supervisor prints it, once.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.config.run_config import RunConfig, digests, from_text, to_plain
from trainer.config.secrets import mask_logs
from trainer.core import durable
from trainer.core.errors import ConfigError
from trainer.core.own_code import OWN_CODE, digest
from trainer.core.rank_progress import RankProgress
from trainer.core.run_folder import RunFolder
from trainer.core.signals import stop_signals
from trainer.launch.ends import STACKS_SIGNAL, Ended, Records, describe_end
from trainer.launch.membership import Membership
from trainer.report.mirror import is_hanging

if TYPE_CHECKING:
    from trainer.core.world import World

_log = logging.getLogger(__name__)

_NOTHING = digests({"resume": None})["resume"]
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


def main(arguments: list[str]) -> NoReturn:
    """Run as one rank, and exit."""
    records, rank = Records(Path(arguments[0])), int(arguments[1])
    job = json.loads((records.folder / Records.JOB).read_bytes())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        # Of open files: each other rank takes two.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if os.getppid() != job["supervisor"]:
        os._exit(1)
    sys.path[:], OWN_CODE.folder = job["path"], Path(job["own_code"])
    stacks = records.stacks(rank).open("w")
    faulthandler.register(STACKS_SIGNAL, file=stacks)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {STACKS_SIGNAL})
    # Collectives abort the process when they find messages they did not expect.
    faulthandler.enable(file=stacks)
    # Others log to their standard error, which goes to a file of each rank.
    _log_to(Path(job["folder"]) / RunFolder.LOG if rank == 0 else None)
    rank_progress = RankProgress(records.rank_progress(rank))
    report = _work(job, Membership(**job["members"][str(rank)]), records, rank_progress)
    records.write(Ended.now(rank, rank_progress.read(), report))
    sys.stdout.flush()
    sys.stderr.flush()
    if report["code"] or is_hanging():
        # Frames of the traceback refer to process groups, whose destructors would abort.
        logging.shutdown()
        os._exit(report["code"])
    sys.exit(0)


def _work(
    job: Mapping[str, Any], member: Membership, records: Records, rank_progress: RankProgress
) -> dict[str, Any]:
    """Run the command among the other ranks, and describe how it ended."""
    folder, has_met, hosts = Path(job["folder"]), False, dict[int, list[str]]()
    try:
        with stop_signals(ends_at_second=False) as stop:
            from trainer.commands.verify_sync import verify_sync  # noqa: PLC0415 - imports torch
            from trainer.launch.session import joined_session, run_rank  # noqa: PLC0415 - imports torch

            config = from_text(job["config"])
            if member.is_ours:
                _redirect(RunFolder(folder).rank_log(config.command, member.rank))
            with joined_session(config, folder, member, rank_progress) as world:
                has_met = True
                hosts |= enumerate(world.collect(_names_of_host(member)))
                folder = _agree(config, folder, world)
                if not member.is_ours:
                    run = RunFolder(folder)
                    _redirect(run.rank_log(config.command, member.rank))
                    if member.rank > 0:
                        _log_to(run.host_log(socket.gethostname()), f"rank {member.rank}")
                    _log.info("process %d, %s, of %d ranks", os.getpid(), world.device, world.size)
                    joined = {"folder": str(folder), "hosts": [name for name, *_ in hosts.values()]}
                    durable.write_json(records.folder / Records.JOINED, joined)
                # One process verifies; ranks of ours are there for what it cannot try.
                if member.is_ours and config.command == "verify":
                    return {"code": verify_sync(config, folder, world, stop)}
                return {"code": run_rank(config, folder, world, stop)}
    except BaseException as error:
        return {**describe_end(error, folder, member.rank, hosts), "has_met": has_met}


def _log_to(path: Path | None, who: str = "%(name)s") -> None:
    """Log to a file, or to the standard error."""
    log = None if path is None else durable.open_log(path)
    text = f"[%(asctime)s][{who}][%(levelname)s] - %(message)s"
    logging.basicConfig(stream=log, format=text, level=logging.INFO, force=True)
    mask_logs()


def _redirect(log: Path | None) -> None:
    """Send what this process and those it starts print to a file; None is the screen."""
    if log is not None:
        durable.make_folders(log.parent)
        with durable.open_log(log) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)


def _names_of_host(member: Membership) -> list[str]:
    """Give this machine's name, and its addresses by which other ranks may know it."""
    name = socket.gethostname()
    found = [name]
    with suppress(OSError):
        found.append(socket.gethostbyname(name))
    if not member.is_ours:
        host, _, port = member.address.rpartition(":")
        # By the interface that leads to the first rank; nothing is sent.
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((host, int(port)))
            found.append(way.getsockname()[0])
    return found


def _agree(config: RunConfig, folder: Path, world: World) -> Path:
    """Take the first rank's folder, which all see; refuse another program or config. Collective."""
    from trainer.report.records import package_version  # noqa: PLC0415 - imports torch

    def find() -> None:
        if not first_folder.is_dir():
            raise ConfigError(
                f"outputs: rank {world.rank} does not see {first_folder} of rank 0; use a folder "
                "on a file system that all nodes share"
            )

    sources = sorted(Path(__file__).parents[1].rglob("*.py"))  # 2 MB
    mine = {"folder": str(folder), "config": digests(to_plain(config)), "sources": digest(sources)}
    place = f"{package_version('step-trainer')} on {socket.gethostname()}"
    answers = world.collect({**mine, "place": place})
    first = answers[0]["config"]
    for rank, answer in enumerate(answers):
        if answer["sources"] != answers[0]["sources"]:
            raise ConfigError(
                f"step-trainer: rank {rank} ({answer['place']}) has other sources than rank 0 "
                f"({answers[0]['place']}); install the same on every host"
            )
        own, differing = answer["config"], list[str]()
        if own["resume"] != first["resume"] and _NOTHING in (own["resume"], first["resume"]):
            # Of `auto` it is the run that was found.
            late, place = rank, answer["place"]
            if first["resume"] == _NOTHING:
                late, place = 0, answers[0]["place"]
            raise ConfigError(
                f"resume: rank {late} ({place.partition(' on ')[2]}) found no run to go on with, "
                "where another rank did: every host needs the same folder of outputs; start in "
                "one that they share, or type outputs=FOLDER"
            )
        for key in sorted(own.keys() | first.keys()):
            if own.get(key) != first.get(key):
                differing.append(key)
        if differing:
            raise ConfigError(
                f"{', '.join(differing)}: rank {rank} has a different value than rank 0; type "
                "the same command on every node"
            )
    first_folder = Path(answers[0]["folder"])
    world.on_all(find)
    return first_folder


if __name__ == "__main__":
    main(sys.argv[1:])
