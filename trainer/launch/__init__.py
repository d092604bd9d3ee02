"""Starts a run: in this process, among ranks that a launcher started, or with ranks of its own.

Imports torch only where this process computes, so that a supervisor is light.
"""

from __future__ import annotations

import os
from pathlib import Path

from trainer.config import RunConfig
from trainer.membership import membership

SEVERAL = ("train",)
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
    member = membership()
    if member is None and config.command in SEVERAL:
        num_ranks = local_ranks(config)
        if num_ranks > 1:
            from trainer.launch.supervise import supervise  # noqa: PLC0415 - only where it is used

            return supervise(config, folder, num_ranks)
    from trainer.session import run_session  # noqa: PLC0415 - imports torch

    return run_session(config, folder, member)


def local_ranks(config: RunConfig) -> int:
    """Resolve `parallel.ranks` on this machine."""
    from trainer.session import local_ranks as resolve  # noqa: PLC0415 - may import torch

    return resolve(config) if config.parallel.ranks == "auto" else config.parallel.ranks
