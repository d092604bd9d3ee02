"""Print what this machine is, and how well runs on it were predicted: `train doctor [history]`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import trainer
from trainer.cli.exit_messages import print_out
from trainer.config import trackers
from trainer.config.messages import clip
from trainer.config.option_files import LIBRARIES, options_of
from trainer.config.secrets import is_secret
from trainer.core.errors import ConfigError
from trainer.core.format import duration, number, size
from trainer.core.gpu import has_fast_bf16
from trainer.core.urls import cache_folder
from trainer.report import records
from trainer.tune import history
from trainer.tune.memory_limit import memory_limit

HISTORY = "history"
SHOWN_RUNS = 20
_VARIABLES = ("TRAIN_", "CUDA_", "NCCL_", "OMP_", "PYTORCH_", "TORCH", "HF_", "SLURM_")


def print_diagnosis(words: Sequence[str], settings: Mapping[str, str]) -> None:
    """Print the page that the word names; without one that of the machine."""
    if words and [*words] != [HISTORY]:
        raise ConfigError(clip(f"{' '.join(words)}: train doctor takes the word history alone"))
    lines = _history() if words else _machine()
    for line in lines:
        print_out(f"{line}\n")


def _machine() -> Iterator[str]:
    """Give versions, devices, kernels, limits and folders; no secrets and no host names."""
    found = records.environment()
    hardware = found["hardware"]
    yield "versions"
    packages = {name: records.package_version(name) for name in LIBRARIES["reported"]}
    for name, text in (found["versions"] | packages).items():
        yield f"  {name:<14}{text or 'not installed'}"
    yield "machine"
    yield f"  {'system':<14}{hardware['system']}"
    yield f"  {'cpu':<14}{hardware['cpu']}, {hardware['cores']} cores for this process"
    for device, name in records.device_names().items():
        limit = memory_limit(device)
        bf16 = "no fast bf16" if not has_fast_bf16(device) else "fast bf16"
        yield f"  {name:<14}{size(limit.bytes)} for tensors ({limit.source}), {bf16}"
    yield "folders"
    yield f"  {'tuning cache':<14}{cache_folder()}"
    yield f"  {'program':<14}{Path(trainer.__file__).parent}"
    yield "environment"
    # Variables that options of trackers read
    named = re.findall(r"oc\.env:(\w+)", str(options_of(trackers.OPTIONS_FOLDER)))
    for name in sorted(os.environ):
        if name.startswith((*_VARIABLES, *named)) and not is_secret(name, os.environ[name]):
            yield f"  {name}={clip(os.environ[name])}"


def _history() -> Iterator[str]:
    """Give the last runs on each device of this machine, predicted beside measured."""
    by_device = dict[str, list[history.PastRun]]()
    for run in history.past_runs():
        by_device.setdefault(run.device, []).append(run)
    if not by_device:
        yield "no run has ended on this machine yet"
    for device, runs in by_device.items():
        yield f"{device}: {number(len(runs))} runs, the last of them"
        yield f"  {'ended':<18}{'steps':>7}{'peak':>24}{'step':>24}  run"
        for run in runs[-SHOWN_RUNS:]:
            peak = _beside(run.predicted_bytes, run.measured_bytes, size)
            step = _beside(run.predicted_seconds, run.measured_seconds, duration)
            yield f"  {run.ended:<18}{run.steps:>7,}{peak:>24}{step:>24}  {run.folder}"
    yield f"predicted -> measured; in {history.history_file()}"


def _beside(
    predicted: float | None, measured: float | None, written: Callable[[float | None], str]
) -> str:
    if predicted is None:
        return written(measured)
    return f"{written(predicted)} -> {written(measured)}"
