"""Run a command line: argv, checked jobs, launch.

Nothing heavy is imported until it is needed: `--help` imports neither Hydra nor torch, and torch
waits until every job of the command line has been checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from trainer import __version__
from trainer.cli.argv import CommandLine, split
from trainer.cli.exit_messages import (
    flush_std_streams,
    is_follower,
    piped,
    print_crash,
    print_error,
    print_out,
    reopen_std_streams,
)
from trainer.core.durable import read_json
from trainer.core.errors import INTERRUPTED, TrainError
from trainer.core.signals import unheard

if TYPE_CHECKING:
    from trainer.cli.compose import Composer

RECORDS: Mapping[str, str] = {
    "train": "result.json",
    "plan": "plan.json",
    "verify": "verify.json",
    "evaluate": "evaluate.json",
}
"""What each command writes its findings into, in the run folder."""


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """How a run from Python ended.

    Attributes:
        folder: the run folder.
        exit_code: as of the command line.
        result: what the command found, as in the file that it writes; empty for export.
    """

    folder: Path
    exit_code: int
    result: Mapping[str, Any]


def main() -> None:
    """Run the command line of this process, and exit."""
    reopen_std_streams()
    code = run(sys.argv[1:])
    flush_std_streams()
    mirror = sys.modules.get("trainer.report.wandb")
    if mirror is not None and mirror.is_hanging():
        os._exit(code)
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Run a command line.

    Args:
        argv: the arguments after the program's name.

    Returns:
        The exit code. What is wrong is printed on stderr, one line per fault.
    """
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return INTERRUPTED
    except TrainError as error:
        return print_error(error)
    except Exception as error:
        return print_crash(error)


def train(config: Mapping[str, Any] | Sequence[str] = (), **hydra_flags: str) -> Run:
    """Run from Python or a notebook what a command line runs.

    Args:
        config: a composed config, nested mappings of some settings, or a command and overrides
            as they are typed: `train(["verify", "batch.global=64", "accum=budget"])`.
        hydra_flags: `config_dir="..."` for a folder of options of one's own.

    Returns:
        Where the run is and how it ended.

    Raises:
        TrainError: what the command line would print; its `exit_code` is the command line's.
    """
    from trainer.cli.prepare import prepare_run  # noqa: PLC0415
    from trainer.cli.python_api import overrides_of  # noqa: PLC0415
    from trainer.cli.start import start  # noqa: PLC0415
    from trainer.launch.start import run as launch  # noqa: PLC0415

    _make_importable(Path.cwd())
    flags = {f"--{name.replace('_', '-')}": value for name, value in hydra_flags.items()}
    composer = _composer(CommandLine(command=None, flags=flags, overrides=()))
    ready = prepare_run(overrides_of(config, composer), composer)
    folder = ready.job.folder
    code = 0
    if ready.done is None:
        code = start(ready, composer, launch, sets_up_logging=False)
    record = RECORDS.get(ready.job.config.command)
    result = {} if record is None else read_json(folder / record)
    return Run(folder=folder, exit_code=code, result=result)


def _run(argv: Sequence[str]) -> int:
    request = split(argv)
    if "--help" in request.flags:
        from trainer.cli.help_page import show  # noqa: PLC0415

        with piped():
            show(request.flags.get("--config-dir"))
        return 0
    if "--version" in request.flags:
        print_out(f"train {__version__}\n")
        return 0
    _make_importable(Path.cwd())
    flags = request.hydra_flags()
    if request.only_shows:
        from trainer.cli.hydra_main import run_hydra  # noqa: PLC0415

        with piped():
            return run_hydra([*flags, *request.overrides])
    composer = _composer(request)
    lines = request.lines
    if "--multirun" in request.flags or "hydra.mode=MULTIRUN" in lines:
        from trainer.cli.sweep import run_sweep  # noqa: PLC0415

        return run_sweep(lines, flags, composer)
    return _run_single(request, composer)


def _run_single(request: CommandLine, composer: Composer) -> int:
    with unheard():
        from trainer.cli.prepare import prepare_run  # noqa: PLC0415
        from trainer.cli.start import run_and_report, start  # noqa: PLC0415

        ready = prepare_run(request.lines, composer)
    if "--cfg" in request.flags:
        from trainer.cli.hydra_main import run_hydra  # noqa: PLC0415

        with piped():
            return run_hydra([*request.hydra_flags(), *ready.job.lines])
    if ready.done is not None:
        print_out(f"{ready.done}\n")
        return 0
    if is_follower():
        # The first rank makes the folder, and sends its name to the others.
        return run_and_report(ready.job.config, ready.job.folder)
    return start(ready, composer)


def _composer(request: CommandLine) -> Composer:
    from trainer.cli.compose import CONFIG_NAME, Composer  # noqa: PLC0415
    from trainer.config.keys import data_dir  # noqa: PLC0415

    flags = request.flags
    own, path = flags.get("--config-dir"), flags.get("--config-path")
    return Composer(
        config_folder=Path(path).absolute() if path else data_dir("conf"),
        config_name=flags.get("--config-name", CONFIG_NAME),
        own_folder=Path(own).absolute() if own else None,
    )


def _make_importable(folder: Path) -> None:
    """Let `_target_` name a module of a folder, here and in the processes that are started."""
    if str(folder) not in sys.path:
        # Last, so that a file named like an installed package is not taken for it.
        sys.path.append(str(folder))
