"""What the harnesses let real ranks do: a whole run, without starting processes for it."""

from __future__ import annotations

import contextlib
import hashlib
import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.reliability import lab
from trainer.checkpoint.lock import hold
from trainer.core.errors import TrainError
from trainer.core.signals import StopFlag
from trainer.core.world import World
from trainer.launch.session import run_rank
from trainer.report.run_status import recorded
from trainer.training import loop


def run_as_rank(
    world: World, lines: tuple[str, ...], folder: Path, how: dict[str, Any]
) -> dict[str, Any]:
    """Run a config as one rank.

    Args:
        how: `resume` goes on; `stop_after` asks the last rank to stop after that step;
            `digests` tells what this rank's parameters, moments and buffers were after each step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stop, answer = StopFlag(), dict[str, Any]()
    try:
        config = lab.config(*lines)
    except TrainError as error:
        return {"code": error.exit_code, "error": str(error)}
    if how.get("resume"):
        config = config.model_copy(update={"resume": str(folder)})
    step = loop.train_step

    def watched(kit: Any, batch: Any, replanner: Any) -> Any:
        report = step(kit, batch, replanner)
        stop.is_set |= world.rank == world.size - 1 and batch.step == how.get("stop_after")
        if how.get("digests"):
            answer.setdefault("digests", {})[batch.step] = _digest(kit)
        return report

    loop.train_step = watched
    try:
        with contextlib.ExitStack() as owned, contextlib.redirect_stdout(io.StringIO()):
            if world.is_main:
                owned.enter_context(hold(folder))
                owned.enter_context(recorded(folder))
            run_rank(config, folder, world, stop)
    except TrainError as error:
        return answer | {"code": error.exit_code, "error": str(error)}
    finally:
        loop.train_step = step
    return answer | {"code": 0}


def _digest(kit: Any) -> str:
    """Hash the bits that a step may change, as this rank holds them."""
    found = hashlib.sha256()
    moments = [
        value
        for state in kit.optimizer.state_dict()["state"].values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    module = kit.model.module
    for tensor in [*module.parameters(), *module.buffers(), *moments]:
        whole = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(lab.bits(whole)[2])
    return found.hexdigest()
