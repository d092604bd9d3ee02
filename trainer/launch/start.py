"""Start a run: in this process, among ranks that a launcher started, or with ranks of its own.

Imports torch only where this process computes, so that a supervisor is light.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from trainer.config.run_config import RunConfig
from trainer.core.launcher import membership
from trainer.core.signals import StopFlag, stop_signals

SEVERAL = ("train", "evaluate")
"""Commands that run on several ranks; the others compute what they need in one process."""


def run(config: RunConfig, folder: Path) -> int:
    """Run one command to its end.

    Args:
        config: composed and valid.
        folder: the run folder; it exists, except on ranks that torchrun or srun started beside
            the first.

    Returns:
        The process's exit code.

    Raises:
        TrainError: how the run ended, where it did not end well; its exit code is in status.json.
    """
    # Threads that wait for each other spin for long unless told otherwise, which starves whatever
    # shares the processors. A short spin costs nothing where a sleep triples steps of 1 ms. OpenMP
    # reads it once, when torch is imported; ranks inherit it, and what the user set wins.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    with listening(config) as stop:
        member = membership()
        if member is not None:
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            from trainer.launch.join import join  # noqa: PLC0415 - imports torch

            return join(config, folder, stop, member)
        num_ranks = _num_ranks(config) if config.command in SEVERAL else 1
        if num_ranks > 1:
            from trainer.launch.supervise import supervise  # noqa: PLC0415 - only where used

            return supervise(config, folder, num_ranks)
        from trainer.launch.session import run_alone  # noqa: PLC0415 - imports torch

        return run_alone(config, folder, stop)


def listening(config: RunConfig) -> AbstractContextManager[StopFlag]:
    """Turn signals into a stop at the next step boundary, where there are steps.

    Any other command ends at once, and leaves nothing half done.
    """
    return stop_signals() if config.command == "train" else nullcontext(StopFlag())


def _num_ranks(config: RunConfig) -> int:
    """Resolve `parallel.ranks`, without torch where it is typed."""
    if config.parallel.ranks != "auto":
        return config.parallel.ranks
    from trainer.launch.session import local_ranks  # noqa: PLC0415 - imports torch

    return local_ranks(config)
