"""Whole runs as a user starts them, in this process, and what they leave behind."""

import fcntl
import json
import logging
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer import train
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.weights import checkpoint_weights
from trainer.cli.main import run as run_line
from trainer.cli.python_api import FinishedRun

TOYS = "tests.lib.run_toys"

BASE = {
    "model._target_": f"{TOYS}.Net",
    "data._target_": f"{TOYS}.Rows",
    "batch.global": "8",
    "accum": "fixed",
    "accum.micro": "3",
    "steps": "6",
    "optimizer.lr": "0.012",
    "scheduler.warmup": "0",
    "eval.every": "null",
    "checkpoint.every": "null",
    "wandb.mode": "disabled",
    "device": "cpu",
    "precision": "fp32",
    "log.samples": "true",
}
"""A run over 1.1 epochs of 42 ragged rows: six steps an epoch, the last one short."""


def overrides(line: str, base: Mapping[str, str] = BASE) -> list[str]:
    """Put settings over those of `base`, `accum=...` over its micro-batch too; the last wins."""
    typed = list({each.partition("=")[0]: each for each in shlex.split(line)}.values())
    keys = {each.partition("=")[0] for each in typed}
    dropped = {key for key in base if key in keys or key.rpartition(".")[0] in keys - {"batch"}}
    dropped |= {key for key in base if f"{key.partition('.')[0]}._target_" in keys}
    dropped |= {"wandb.mode"} & base.keys() if "logger" in keys else set()
    return [*(f"{key}={value}" for key, value in base.items() if key not in dropped), *typed]


def go(line: str = "", *, config_dir: str | None = None) -> FinishedRun:
    """Run `BASE` with more settings; raises what the command line would say."""
    return train(overrides(line), config_dir=config_dir)


def on(run: FinishedRun, line: str = "") -> FinishedRun:
    return train([f"resume={run.folder}", "trust=[tests]", *shlex.split(line)])


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Lock a run as another process does: `flock` belongs to an open file, not to a process."""
    with (folder / ".lock").open("w") as file:
        file.write(json.dumps({"pid": 1, "host": "elsewhere"}))
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def small_library(patch: pytest.MonkeyPatch) -> None:
    """Let `data=stdlib` read 60 files of the current folder, not what takes a minute to index."""
    folder = Path("library").absolute()
    patch.setattr(
        "trainer.features.stdlib.stdlib.sysconfig", SimpleNamespace(get_path=lambda _: str(folder))
    )
    folder.mkdir()
    for i in range(60):
        (folder / f"m{i}.py").write_text(f"def f{i}():\n    return {i}, 'of {i % 7}'\n")


def shell(line: str) -> int:
    """Run a command line in this process, as `main` does; gives the exit code.

    Hydra's log ends with a command, as its process does: its folder may be gone.
    """
    try:
        return run_line(shlex.split(line))
    finally:
        for handler in [*logging.getLogger().handlers]:
            if isinstance(handler, logging.FileHandler):
                logging.getLogger().removeHandler(handler)
                handler.close()


def only_run() -> Path:
    """The one run folder below the current folder."""
    (folder,) = {path.parent for path in Path().glob("outputs/*/*/config.yaml")}
    return folder.absolute()


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def entries(run: FinishedRun | Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Every entry of a journal, steps and evaluations."""
    folder = run.folder if isinstance(run, FinishedRun) else run
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def steps(run: FinishedRun | Path) -> list[dict[str, Any]]:
    return [entry for entry in entries(run) if "loss" in entry]


def curve(run: FinishedRun | Path, name: str) -> list[Any]:
    return [entry[name] for entry in steps(run)]


def state(run: FinishedRun | Path, step: int | None = None) -> Mapping[str, torch.Tensor]:
    """Every tensor of a checkpoint by all its names, by default the newest, but random states."""
    folder = run.folder if isinstance(run, FinishedRun) else run
    loaded = CheckpointStore(folder / "checkpoints").load(step, set_aside=False)
    found = {n: t[...] for n, t in loaded.tensors.items() if not n.startswith("rng.")}
    weights = checkpoint_weights(loaded).values
    return found | {f"model.{name}": tensor[...] for name, tensor in weights.items()}


def saved(run: FinishedRun | Path, part: str) -> Any:
    """What the newest checkpoint says of a part, beside tensors."""
    folder = run.folder if isinstance(run, FinishedRun) else run
    loaded = CheckpointStore(folder / "checkpoints").load(set_aside=False)
    return loaded.parts[part]["state"]
