"""What the harnesses share: a small state of every awkward kind, an oracle, and replays.

Every case of a harness is a pure function of `(seed, case)`. A failure prints the command that
runs that case alone: `RELIABILITY_SEED=0 RELIABILITY_CASE=17 pytest <file>`.
"""

import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint.manifest import verify_folder
from trainer.checkpoint.state import GeneratorsPart, OptimizerPart
from trainer.checkpoint.store import CheckpointStore, Loaded
from trainer.checkpoint.tensor_files import assign_files
from trainer.checkpoint.weights import ModelPart
from trainer.core.stateful import Stateful

KEEP = 2
SEED = os.environ.get("RELIABILITY_SEED", "0")


def state(step: int) -> tuple[dict[str, Tensor], dict[str, object]]:
    """A checkpoint that only `step` can have: tied, bf16, 0-d, empty, strided, 1 KiB in all."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(8, 6, generator=generator)
    tensors = {
        "model.embed.weight": weight,
        "model.head.weight": weight,
        "model.norm.count": torch.tensor(step),
        "model.empty": torch.zeros(0, 3),
        "model.scale": torch.randn(5, generator=generator).bfloat16(),
        "optimizer.embed.weight.exp_avg": torch.randn(6, 8, generator=generator).t(),
        "optimizer.embed.weight.step": torch.tensor(float(step)),
        "rng.cpu": torch.randint(0, 256, (64,), generator=generator, dtype=torch.uint8),
    }
    return tensors, {"step": step, "lr": 0.1 / (step + 1)}


def assert_is(loaded: Loaded, step: int) -> None:
    """Compare a loaded checkpoint with the oracle, bit for bit."""
    tensors, meta = state(step)
    assert (loaded.step, loaded.parts) == (step, meta)
    assert loaded.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded.tensors[name][...].dtype == tensor.dtype, name
        assert torch.equal(loaded.tensors[name][...], tensor), name


def parts_of(model: nn.Module, optimizer: Optimizer, **how: bool) -> dict[str, Stateful]:
    """Give the parts of a checkpoint that training moves."""
    rest = OptimizerPart(model, optimizer, **how)
    return {"model": ModelPart(model), "optimizer": rest, "rng": GeneratorsPart()}


def put(
    store: CheckpointStore, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> Path:
    """Save on one rank."""
    return store.save(step, assign_files(tensors, 0), meta)


def save(folder: Path, *steps: int) -> None:
    """Save the oracle's checkpoints with a store of its own, as a new process would."""
    store = CheckpointStore(folder, KEEP)
    for step in steps:
        put(store, step, *state(step))


def intact_steps(folder: Path) -> list[int]:
    """Verify every folder that is named like a checkpoint; a damaged one raises."""
    store = CheckpointStore(folder)
    return [verify_folder(store.path(step), step).step for step in store.steps()]


def leftovers(folder: Path) -> list[str]:
    """List unfinished and half-deleted names."""
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def cases(count: int) -> Iterator[tuple[int, random.Random]]:
    """Give each case its number and its own random source; one case alone where asked for."""
    only = os.environ.get("RELIABILITY_CASE")
    print(f"RELIABILITY_SEED={SEED}, {count} cases")
    for case in range(count) if only is None else [int(only)]:
        yield case, random.Random(f"{SEED}:{case}")


def replay(case: int) -> str:
    """Say how to run one case alone."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
    return f"replay: RELIABILITY_SEED={SEED} RELIABILITY_CASE={case} pytest '{test}'"
