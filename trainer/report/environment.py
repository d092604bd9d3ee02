"""Describe what a run ran on: versions, source revision, hardware, as plain values."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

GIT_TIMEOUT_S = 2.0
PACKAGES = ("hydra-core", "omegaconf", "numpy", "safetensors", "wandb")


def environment() -> dict[str, Any]:
    """Describe the program, its source and the machine; what cannot be found out is None.

    Takes a few milliseconds; at most a few seconds where git hangs.
    """
    versions = {"python": platform.python_version(), "trainer": _version("step-trainer")}
    versions |= {name: _version(name) for name in ("torch", *PACKAGES)}
    ours = Path(__file__)
    # An installed copy may lie in a virtual environment inside somebody's repository.
    is_tracked = _git(ours.parent, "ls-files", "--error-unmatch", ours.name) is not None
    return {
        "versions": versions | {"cuda": torch.version.cuda},
        "git": {
            "project": git_revision(Path.cwd()),
            "trainer": git_revision(ours.parent) if is_tracked else None,
        },
        "hardware": {
            "host": platform.node(),
            "system": platform.platform(),
            "cpu": cpu_model(),
            "cores": num_cores(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
    }


def git_revision(folder: Path) -> dict[str, Any] | None:
    """Name the commit checked out in a folder.

    Returns:
        `commit`, and `dirty`: whether tracked files differ (None if that took too long); None
        outside a repository, in one without a commit, or without git.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    changes = commit and _git(folder, "status", "--porcelain", "--untracked-files=no")
    dirty = None if changes is None else bool(changes)
    return None if commit is None else {"commit": commit, "dirty": dirty}


def num_cores() -> int:
    """Count the processors that this process may use."""
    # macOS binds no process to some of them.
    can_tell = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if can_tell else os.cpu_count() or 1


def cpu_model() -> str:
    """Name the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    """Ask git, which may be missing, may hang on a network drive, and must ask nobody."""
    quiet = {"GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            check=False,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=GIT_TIMEOUT_S,
            env=os.environ | quiet,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.decode(errors="replace").strip() if answer.returncode == 0 else None
