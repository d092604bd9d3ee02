"""Set up launchers and sweepers of Hydra: a GPU for each job, as many jobs as there is room for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from omegaconf import DictConfig

from trainer.cli.compose import Job
from trainer.core.durable import make_folders, write_file_atomic
from trainer.core.errors import ConfigError
from trainer.core.run_folder import SEARCH_FILE
from trainer.features.sweeps.jobs import Slots
from trainer.features.sweeps.optuna_sweeper import OPTUNA

# Hydra names both by private modules.
BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"  # runs every combination

_SLURM = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
_REQUEUES = 1000  # of one job at its time limit
_DIRECTION = "hydra.sweeper.direction"


def slots_of(
    jobs: Sequence[Job], hydra: DictConfig, folder: Path, most: int | None
) -> Slots | None:
    """Give what jobs share that run at once on this machine; None where they run one by one.

    Of jobs there are `most`; None where a sweeper decides.
    """
    # Slurm gives its jobs GPUs and processors itself.
    if hydra.launcher._target_ in (BASIC_LAUNCHER, _SLURM):
        return None
    from trainer.report.records import num_cores  # noqa: PLC0415 - where it is needed

    ranks = 1
    for job in jobs:
        if job.config.parallel.ranks != "auto":
            ranks = max(ranks, job.config.parallel.ranks)
    gpus = list[str]()
    if jobs[0].config.device != "cpu":
        from trainer.core import gpu  # noqa: PLC0415 - imports torch, once every job is checked

        gpus = [*map(str, range(len(gpu.devices())))]
        if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
            gpus = visible.split(",")[: len(gpus)]
    cores, count = num_cores(), int(hydra.launcher.get("n_jobs", -1))
    if hydra.sweeper._target_ == OPTUNA and hydra.sweeper.n_jobs is not None:
        count = int(hydra.sweeper.n_jobs)
    # joblib's -1: as many as fit
    if count <= 0:
        count = max(1, (len(gpus) or cores) // ranks)
        if most is not None:
            count = min(count, most)
    return Slots(folder=folder, count=count, gpus=gpus, ranks=ranks, cores=cores)


def settings_of(
    hydra: DictConfig, typed: Sequence[str], slots: Slots | None, *, seed: int
) -> Iterator[str]:
    """List settings of launcher and sweeper that follow from the run's, where nobody typed them."""
    found: dict[str, object] = {}
    if slots is not None and "n_jobs" in hydra.launcher:
        found["hydra.launcher.n_jobs"] = slots.count
    if "n_jobs" in hydra.sweeper:
        found["hydra.sweeper.n_jobs"] = 1 if slots is None else slots.count
    # submitit's default of none ends a job at its time limit; ours goes on where it was.
    if hydra.launcher.get("max_num_timeout") == 0:
        found["hydra.launcher.max_num_timeout"] = _REQUEUES
    # Jobs of a search that wait in the queue could not know of those before.
    if hydra.sweeper._target_ == OPTUNA and "array_parallelism" in hydra.launcher:
        found["hydra.launcher.array_parallelism"] = hydra.sweeper.n_jobs or 1
    if "seed" in (hydra.sweeper.get("sampler") or ()):
        found["hydra.sweeper.sampler.seed"] = seed % 2**32
    keys = {line.lstrip("+").partition("=")[0] for line in typed}
    if _DIRECTION in keys:
        why = "the search follows sweep.metric; type sweep.mode=min or sweep.mode=max"
        raise ConfigError(f"{_DIRECTION}: {why}")
    for key, value in found.items():
        if key not in keys:
            yield f"{key}={value}"


def begin_search(folder: Path, lines: Sequence[str]) -> None:
    """Write what was typed into a search's folder, as Hydra does for its own sweeper."""
    make_folders(folder)
    typed = {"overrides": {"task": [*lines]}, "runtime": {"cwd": str(Path.cwd())}}
    write_file_atomic(folder / SEARCH_FILE, yaml.safe_dump({"hydra": typed}).encode())
