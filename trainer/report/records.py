"""Describe what happened, and what it ran on: plain values, numbers and words only.

plan.json and result.json are mappings that are written as they are, and printed from.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from trainer.config.option_files import LIBRARIES
from trainer.core import gpu

PlanRecord = Mapping[str, Any]
"""What plan.json or result.json holds."""

GIT_TIMEOUT_S = 2.0
PACKAGES = ("torch", "hydra-core", "omegaconf", "numpy", "safetensors")


def environment() -> dict[str, Any]:
    """Describe the program, its source and the machine; what cannot be found out is None.

    Takes a few milliseconds; at most a few seconds where git hangs.
    """
    versions = {name: package_version(name) for name in PACKAGES} | {"torch": torch.__version__}
    versions |= {"trainer": package_version("step-trainer"), "cuda": torch.version.cuda}
    for name in LIBRARIES["reported"]:
        # What a run uses it has imported by now.
        if name in sys.modules:
            versions[name] = package_version(name)
    return {
        "versions": {"python": platform.python_version(), **versions},
        "git": git_revision(Path.cwd()),
        "hardware": {
            "host": platform.node(),
            "system": platform.platform(),
            "cpu": cpu_model(),
            "cores": num_cores(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "gpus": [*map(gpu.name_of, gpu.devices())],
        },
    }


def device_names() -> dict[torch.device, str]:
    """Name what this machine computes on: its CPU, and each GPU."""
    gpus = {each: f"{each} {gpu.name_of(each)}" for each in gpu.devices()}
    return {torch.device("cpu"): "memory", **gpus}


def device_name(device: torch.device) -> str:
    """Name the card or processor that a device is."""
    return gpu.name_of(device) or cpu_model()


def git_revision(folder: Path) -> dict[str, Any] | None:
    """Name the `commit` checked out in a folder, and count `changed_files`, None if not known.

    None where git, which may hang, names no commit. Files that git does not track are not counted.
    """
    with suppress(OSError, subprocess.SubprocessError):
        commit = _git(folder, "rev-parse", "HEAD")[0]
        return {"commit": commit, "changed_files": _changed_files(folder, commit)}
    return None


def _changed_files(folder: Path, commit: str) -> int | None:
    """Count the files that differ from a commit.

    `git status` would start programs that the settings of the repository, perhaps a stranger's,
    name: so git is given an empty repository, with the index and the objects of this one.
    """
    with suppress(OSError, subprocess.SubprocessError), TemporaryDirectory() as empty:
        paths = ("--show-toplevel", "--git-path", "index", "--git-path", "objects")
        top, index, objects = _git(folder, "rev-parse", "--path-format=absolute", *paths)
        (Path(empty) / "refs").mkdir()
        (Path(empty) / "HEAD").write_text(commit)
        own = {"GIT_DIR": empty, "GIT_WORK_TREE": top, "GIT_INDEX_FILE": index}
        # Nothing is written into the index, nor fetched.
        own |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"}
        flags = ("-c", "core.fileMode=false", "diff", "--name-only", "--ignore-submodules")
        return len(_git(folder, *flags, commit, GIT_OBJECT_DIRECTORY=objects, **own))
    return None


def _git(folder: Path, *words: str, **environment: str) -> list[str]:
    """Give the lines that git prints."""
    printed = subprocess.check_output(
        ["git", "-C", str(folder), *words],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=GIT_TIMEOUT_S,
        env={**os.environ, **environment},
    )
    return printed.decode(errors="replace").splitlines()


def num_cores() -> int:
    """Count the processors that this process may use."""
    # macOS binds no process to some of them
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
