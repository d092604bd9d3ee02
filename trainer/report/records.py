"""Describe what happened, and what it ran on: plain values, numbers and words only.

plan.json and result.json are mappings that are written as they are, and printed from.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, final

import torch

from trainer.core import gpu

PlanRecord = Mapping[str, Any]
"""What plan.json or result.json holds."""

Verdict = Literal["exact", "exact_without_dropout", "not_exact", "not_proven"]

GIT_TIMEOUT_S = 2.0
PACKAGES = ("torch", "hydra-core", "omegaconf", "numpy", "safetensors")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `train verify` found: the planned step's gradient against a reference."""

    # `exact` where the error is at most 1e-10, in float64, or within the rounding of float32 where
    # the model runs in nothing else, and every loss is a sum over samples; `exact_without_dropout`;
    # `not_exact`; `not_proven` where something cannot be compared
    verdict: Verdict
    # Over parameters, of max absolute difference / max absolute reference
    max_relative_error: float
    reference: str  # `whole batch`, or `sample by sample, summed` where the whole does not fit
    dtype: str  # both were computed in, e.g. `float64`.
    num_parameters: int  # tensors compared
    micro_batches: int  # of the planned step
    global_batch: int  # samples of the step
    # Largest error that is rounding: 1e-10 in float64; in float32 as measured, for the worst
    # parameter
    limit: float
    # The same with random draws held, where that is what passes; else None
    error_without_draws: float | None = None
    # Parameters by name with their error, the largest first
    worst: tuple[tuple[str, float], ...] = ()
    # Modules by name, with the reason why they depend on the cut
    culprits: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()  # what a reader of the verdict must know, one line each

    @property
    def exact(self) -> bool:
        """Whether the step is exact as it is."""
        return self.verdict == "exact"

    def to_json(self) -> dict[str, Any]:
        """Give verify.json."""
        return asdict(self) | {
            "exact": self.exact,
            "culprits": [{"module": name, "reason": reason} for name, reason in self.culprits],
            "worst": [{"parameter": name, "error": error} for name, error in self.worst],
        }


def environment() -> dict[str, Any]:
    """Describe the program, its source and the machine; what cannot be found out is None.

    Takes a few milliseconds; at most a few seconds where git hangs.
    """
    versions = {name: package_version(name) for name in PACKAGES}
    versions |= {"trainer": package_version("step-trainer"), "cuda": torch.version.cuda}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "git": git_revision(Path.cwd()),
        "hardware": {
            "host": platform.node(),
            "system": platform.platform(),
            "cpu": cpu_model(),
            "cores": num_cores(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "gpus": [gpu.name_of(each) for each in gpu.devices()],
        },
    }


def device_names() -> dict[torch.device, str]:
    """Name what this machine computes on: its CPU, and each GPU."""
    found = {torch.device("cpu"): "memory"}
    for each in gpu.devices():
        found[each] = f"{each} {gpu.name_of(each)}"
    return found


def git_revision(folder: Path) -> dict[str, str] | None:
    """Name the `commit` checked out in a folder; None where git, which may hang, names none.

    Whether files differ is not asked: `git status` starts programs that the repository, perhaps a
    stranger's, names.
    """
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            check=False,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {"commit": answer.stdout.decode().strip()} if answer.returncode == 0 else None


def num_cores() -> int:
    """Count the processors that this process may use."""
    # macOS binds no process to some of them.
    can_tell = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if can_tell else os.cpu_count() or 1


def cpu_model() -> str:
    """Name the processor."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        if found := re.search(r"^model name\s*: (.+)$", text, re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()


@cache
def package_version(package: str) -> str | None:
    """Give the version of an installed package; None where it is not."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None
