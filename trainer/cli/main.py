"""Run a command line: argv, checked job, launch.

Nothing heavy is imported until it is needed: `--help` imports neither Hydra nor torch, and torch
waits until every job of the command line has been checked.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer import __version__
from trainer.cli import exit_messages, remote
from trainer.cli.argv import PAGE_WORDS, CommandLine, split_argv
from trainer.cli.feature_commands import show_page
from trainer.config.messages import clip
from trainer.config.option_files import data_dir, load_yaml
from trainer.core.errors import INTERRUPTED, ConfigError, TrainError
from trainer.core.format import lead_nowhere
from trainer.core.signals import raise_on_interrupt
from trainer.launch.membership import global_rank

if TYPE_CHECKING:
    from trainer.cli.compose import Composer


def main() -> None:
    """Run the command line of this process, and exit."""
    code = run(sys.argv[1:])
    # Else Python complains as it ends.
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            lead_nowhere(stream)
    mirror = sys.modules.get("trainer.report.mirror")
    if mirror is not None and mirror.is_hanging():
        os._exit(code)
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Run a command line, and give the exit code; one line per fault is printed on stderr."""
    try:
        return _run(argv)
    except KeyboardInterrupt as error:
        exit_messages.print_notes(getattr(error, "__notes__", ()))
        return INTERRUPTED
    except TrainError as error:
        return exit_messages.print_error(error)
    # Of a path that is too long, or a value that is too deep
    except (OSError, RecursionError) as error:
        return exit_messages.print_error(ConfigError(clip(f"{type(error).__name__}: {error}")))
    except Exception as error:
        return exit_messages.print_crash(error)


def _run(argv: Sequence[str]) -> int:
    request = split_argv(argv)
    flags = request.flags
    page = "help" if "--help" in flags else request.command
    if page in PAGE_WORDS:
        with exit_messages.piped():
            show_page(page, request.overrides, flags.get("--config-dir"))
        return 0
    if "--version" in flags:
        exit_messages.print_out(f"train {__version__}\n")
        return 0
    from trainer.cli.compose import Composer  # noqa: PLC0415 - imports Hydra

    composer = Composer.of(flags.get("--config-dir"))
    lines = request.lines
    if not flags.keys().isdisjoint({"--shell-completion", "--info"}):
        _show(request, composer)
        return 0
    # What a feature runs, by a flag that it brought; Hydra has a setting for each flag of its own.
    for flag, option in load_yaml(data_dir("conf") / "flags.yaml").items():
        if f"--{flag}" in flags or f"hydra.mode={flag.upper()}" in request.overrides:
            code: int = pkgutil.resolve_name(option["_target_"])(lines, composer, request.faults)
            return code
    from trainer.cli.prepare import prepare_run  # noqa: PLC0415
    from trainer.cli.start import run_and_report, start_job  # noqa: PLC0415

    job = prepare_run(lines, composer, request.faults)
    raise_on_interrupt()
    if "--cfg" in flags:
        with exit_messages.piped(), composer.open() as hydra:
            package, is_resolved = flags.get("--package"), "--resolve" in flags
            hydra.show_cfg("config", [*job.typed], flags["--cfg"], package, resolve=is_resolved)
        return 0
    if job.done is not None:
        with remote.sent(job.folder):  # which may have been away when the run ended
            exit_messages.print_out(f"{job.done}\n", is_prose=True)
        return 0
    if global_rank() > 0:
        # The first rank makes the folder, and sends its name to the others.
        return run_and_report(job.config, job.folder)
    return start_job(job, composer)


def _show(request: CommandLine, composer: Composer) -> None:
    """Print what Hydra's `--info` tells, or what a shell completes by."""
    from trainer.cli.completion import completion  # noqa: PLC0415 - imports Hydra

    with exit_messages.piped():
        if "--info" in request.flags:
            with composer.open() as hydra:
                hydra.show_info(request.flags["--info"], "config", [*request.overrides])
        else:
            exit_messages.print_out(completion(request.overrides, composer))
