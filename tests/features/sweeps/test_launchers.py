"""What launchers and sweepers that nobody here knows are given."""

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from trainer.features.sweeps.jobs import SweepTask
from trainer.features.sweeps.launchers import BASIC_LAUNCHER, settings_of, slots_of

JOB: Any = SimpleNamespace(config=SimpleNamespace(parallel=SimpleNamespace(ranks=1), device="cpu"))


def hydra(launcher: str, n_jobs: int = -1) -> DictConfig:
    """Settings of a launcher, and of a sweeper that is a copy of Optuna's."""
    sweeper = {"_target_": "own.Search", "n_jobs": 2, "sampler": {"seed": None}}
    settings = {"_target_": launcher, "n_jobs": n_jobs}
    return OmegaConf.create({"launcher": settings, "sweeper": sweeper})


def test_any_launcher_of_other_processes_shares_the_machine(tmp_path):
    own = hydra("own.Launcher", n_jobs=3)
    slots = slots_of([JOB], own, tmp_path, 8)
    assert slots is not None
    assert slots.count == 3
    assert list(settings_of(own, ["hydra.launcher.n_jobs=3"], slots, seed=5)) == [
        "hydra.sweeper.n_jobs=3",
        "hydra.sweeper.sampler.seed=5",
    ]
    assert slots_of([JOB], hydra(BASIC_LAUNCHER), tmp_path, 8) is None


def test_a_job_of_submitit_goes_back_into_the_queue_at_its_time_limit_unless_a_count_is_given():
    own, key = hydra("own.Slurm"), "hydra.launcher.max_num_timeout"

    def given(count: int, *typed: str) -> list[str]:
        own.launcher.max_num_timeout = count
        return [line for line in settings_of(own, typed, None, seed=0) if line.startswith(key)]

    assert given(0) == [f"{key}=1000"]  # submitit's own default
    assert given(0, f"{key}=0") == given(3) == []


@pytest.mark.parametrize(
    ("mode", "code", "given"), [("min", 0, 2.0), ("max", 75, -2.0), ("max", 1, float("inf"))]
)
def test_a_sweeper_minimises_whatever_the_metric(mode, code, given, tmp_path, monkeypatch):
    record = SimpleNamespace(runtime=SimpleNamespace(output_dir=str(tmp_path)))
    monkeypatch.setattr("trainer.features.sweeps.jobs.HydraConfig.get", lambda: record)
    monkeypatch.setattr("trainer.features.sweeps.jobs.value_of", lambda *_: 2.0)
    monkeypatch.setattr(SweepTask, "_run_elsewhere", lambda *_: code)
    sweep: Any = SimpleNamespace(mode=mode, metric="eval_loss")
    composer: Any = None
    task = SweepTask(sweep=sweep, host="elsewhere", pid=1, composer=composer)
    assert task(None) == given
