"""What launchers and sweepers that nobody here knows are given."""

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from trainer.cli.launchers import BASIC_LAUNCHER, settings_of, slots_of
from trainer.cli.sweep_jobs import SweepTask

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
    ("mode", "code", "given"),
    [("min", 0, 2.0), ("max", 0, -2.0), ("max", 75, -2.0), ("max", 1, float("inf"))],
)
def test_a_sweeper_minimises_whatever_the_metric(mode, code, given, tmp_path, monkeypatch):
    record = SimpleNamespace(
        runtime=SimpleNamespace(output_dir=str(tmp_path)),
        overrides=SimpleNamespace(task=[]),
        job=SimpleNamespace(num=0),
    )
    monkeypatch.setattr("trainer.cli.sweep_jobs.HydraConfig.get", lambda: record)
    monkeypatch.setattr("trainer.cli.sweep_jobs.value_of", lambda *_: 2.0)
    monkeypatch.setattr(SweepTask, "_run_elsewhere", lambda *_: code)
    monkeypatch.setattr("trainer.cli.sweep_jobs.OWN_CODE", SimpleNamespace(folder=None))
    sweep: Any = SimpleNamespace(mode=mode, metric="eval_loss")
    own: dict[str, Any] = {"composer": None, "own_folder": None, "safe_path": "1"}
    task = SweepTask(sweep=sweep, process=("elsewhere", 1), **own)
    assert task(None) == given
