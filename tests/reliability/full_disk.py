"""Runs a trainer on file systems that are really full; started by `unshare` with one of its own.

For every size in bytes on the command line: mounts a file system of that size on the folder, runs
until the disk is full, mounts it larger and goes on. Prints one JSON object a size.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from tests.reliability import lab
from trainer.checkpoint.manifest import verify
from trainer.checkpoint.store import CheckpointStore

PLENTY = 64 << 20
SETTINGS = ("checkpoint.every=1", "checkpoint.keep=2", "model.width=256", "model.dropout=0.1")
"""A checkpoint of about 110 KiB at every step."""


def mount(folder: Path, size: int, *options: str) -> None:
    flags = ",".join([f"size={size}", *options])
    command = ["mount", "-t", "tmpfs", "-o", flags, "tmpfs", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def attempt(place: Path, size: int, on_full: str) -> dict[str, object]:
    mount(place, size)
    run = place / "run"
    settings = lab.config(*SETTINGS, f"checkpoint.on_full={on_full}")
    found: dict[str, object] = {"size": size, "on_full": on_full}
    try:
        ended = lab.run(settings, run)
    except OSError as error:  # what the trainer must never let through
        ended = lab.Ended(-1, repr(error))
    store = CheckpointStore(run / "checkpoints")
    found |= {
        "code": ended.code,
        "error": ended.error,
        "screen": ended.screen[-2000:],
        "steps": store.steps(),
        "intact": [step for step in store.steps() if verify(store.path(step), step)],
        "logged": [e["step"] for e in lab.logged(run)["metrics"] if "lr" in e],
        "ledger": [e["step"] for e in lab.logged(run)["ledger"]],
    }
    mount(place, PLENTY, "remount")
    ended = lab.go_on(settings, run)
    found |= {
        "then": ended.code,
        "then_error": ended.error,
        "left": [path.name for path in run.rglob(".t*")],
        "outcome": str(lab.difference(lab.outcome(run), EXPECTED)),
    }
    subprocess.run(["umount", str(place)], check=True)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    here = Path(sys.argv[1])
    undisturbed = here / "undisturbed"
    lab.run(lab.config(*SETTINGS), undisturbed)
    EXPECTED = lab.outcome(undisturbed)
    shutil.rmtree(undisturbed)
    (here / "disk").mkdir()
    for number, kilobytes in enumerate(map(int, sys.argv[2:])):
        policy = ("stop", "continue")[number % 2]
        sys.__stdout__.write(json.dumps(attempt(here / "disk", kilobytes << 10, policy)) + "\n")
