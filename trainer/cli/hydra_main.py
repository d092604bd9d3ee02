"""Hand a command line to Hydra's own `main`: what it shows of itself, and sweeps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import hydra

from trainer.cli.compose import CONFIG_NAME, VERSION_BASE, ComposeError, explain
from trainer.cli.exit_messages import FULL_ERROR
from trainer.config import recipes
from trainer.config.keys import data_dir
from trainer.core.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def run_hydra(argv: Sequence[str], job: Callable[[Any], float] | None = None) -> int:
    """Hand a command line to Hydra itself.

    Args:
        argv: flags and overrides, as Hydra wants them.
        job: what a sweep runs.

    Raises:
        ConfigError: what Hydra would print with a traceback or advice that does not fit.
    """
    typed = os.environ.get(FULL_ERROR)

    def task(cfg: DictConfig) -> float | None:
        """Run the job with the environment as the user has it."""
        with variable(FULL_ERROR, typed):
            return None if job is None else job(cfg)

    recipes.register()
    decorate = hydra.main(
        version_base=VERSION_BASE, config_path=str(data_dir("conf")), config_name=CONFIG_NAME
    )
    before, sys.argv = sys.argv, ["train", *argv]
    try:
        with variable(FULL_ERROR, "1"):  # Hydra then raises what it would print
            decorate(task)()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except ComposeError as error:
        raise ConfigError(*explain(error)) from error
    finally:
        sys.argv = before
    return 0


@contextmanager
def variable(name: str, value: str | None) -> Iterator[None]:
    """Set an environment variable, or take it away, for as long as the context lasts.

    Yields:
        Nothing.
    """
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
