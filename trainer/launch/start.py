"""Start a run: in this process, or in ranks that are watched from here.

Imports torch only where this process computes, so that a supervisor is light.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from trainer.config.command_words import READING_COMMANDS
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.signals import StopFlag, stop_signals
from trainer.launch.membership import Membership, membership
from trainer.launch.supervise import supervise

# Commands that run on several ranks; others run in one process
SEVERAL = frozenset(
    ("train", "evaluate", *(w for w, each in READING_COMMANDS.items() if each.on_all_ranks))
)
# By which PyTorch's allocator of GPU memory is set; the later names are older
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def run(config: RunConfig, folder: Path) -> int:
    """Run one command to its end, and give the exit code.

    The run folder exists, except on ranks that torchrun or srun started beside the first.
    """
    set_process_defaults()
    if config.deterministic is not False:  # cuBLAS refuses else; it reads it when CUDA starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # no kernel chosen by its time
    with listening(config) as stop:
        if members := _members(config):
            return supervise(config, folder, members, stop)
        from trainer.launch.session import local_ranks, run_single  # noqa: PLC0415 - imports torch

        if config.command == "verify" and (config.matrix or local_ranks(config) > 1):
            # Two ranks on the CPU compare what they reduce; `NotExactError` where it is wrong.
            update: dict[str, Any] = {"ranks": 2}
            if config.parallel.mode == "hsdp":
                update |= {"shard": 1, "replicate": 2}
            elif config.parallel.mode == "none":
                update |= {"mode": "ddp"}
            parallel = config.parallel.model_copy(update=update)
            two = config.model_copy(update={"device": "cpu", "parallel": parallel})
            supervise(two, folder, _all_ranks(2), stop)
        return run_single(config, folder, stop)


def set_process_defaults() -> None:
    """Set what libraries read once, when they start; ranks inherit it, and what the user set wins.

    Threads that wait for each other spin for long by default, which starves whatever shares the
    processors. A short spin costs nothing where a sleep triples steps of 1 ms. And where segments
    of a GPU's allocator cannot grow, shapes that differ cost up to a third of the memory.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if os.environ.keys().isdisjoint(ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
    if not sys.stderr.isatty():  # a progress bar in a log is hundreds of lines
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def listening(config: RunConfig) -> AbstractContextManager[StopFlag]:
    """Turn signals into a stop at the next step boundary, where there are steps.

    Any other command ends at once, and leaves nothing half done.
    """
    return stop_signals() if config.command == "train" else nullcontext(StopFlag())


def _members(config: RunConfig) -> list[Membership]:
    """List the ranks that this process starts: its place in a launcher's job, or all of the run."""
    ranks, joined, restarts = config.parallel.ranks, membership(), 0
    if config.command == "train":
        restarts = config.parallel.max_restarts
    if joined is not None:
        if restarts:
            text = "the launcher restarts its ranks (torchrun --max-restarts); leave it out"
            raise ConfigError(f"parallel.max_restarts={restarts}: {text}")
        if ranks not in ("auto", joined.local_size):
            raise ConfigError(
                f"parallel.ranks={ranks}: the launcher started "
                f"{joined.local_size} on this machine; leave parallel.ranks out to join them"
            )
        return [joined]
    if config.command not in SEVERAL:
        return []
    if ranks == "auto":  # torch counts the GPUs
        from trainer.launch.session import local_ranks  # noqa: PLC0415 - imports torch

        ranks = local_ranks(config)
    if ranks > 1 and config.parallel.mode == "none":
        raise ConfigError(f"parallel.ranks={ranks}: parallel=none is one rank; use parallel=ddp")
    # A single rank needs a supervisor only to be started again.
    if ranks > 1 or restarts:
        return _all_ranks(ranks)
    return []


def _all_ranks(size: int) -> list[Membership]:
    return [Membership(rank=r, size=size, local_rank=r, local_size=size) for r in range(size)]
