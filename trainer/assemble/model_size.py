"""Count what a model takes before it takes it, and refuse one that is too large.

One that turns out to be large while it is built is counted on the meta device first.
"""

from __future__ import annotations

import torch
from torch import nn

from trainer.assemble.hardware import may_shard, rank_memory
from trainer.config.run_config import RunConfig
from trainer.core.errors import DoesNotFitError
from trainer.core.format import plural, size
from trainer.core.world import World
from trainer.objectives.next_token import NextToken
from trainer.optim.optimizers import OptimizerSpec
from trainer.training.model import Model
from trainer.tune.memory_limit import MemoryLimit, memory_limit
from trainer.tune.predict import resting
from trainer.tune.workload import Tiled, Workload

STATE = 4  # weights, gradients and two moments: what training needs at the most, as a rule


def refuse_too_large(
    config: RunConfig, world: World, module: nn.Module, spec: OptimizerSpec | None
) -> None:
    """Refuse a model on the meta device whose weights, or what training adds, exceed the memory."""
    weights = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
    is_trained = spec is not None and config.command in {"train", "plan"}
    limit, is_here = rank_memory(config, world)
    ranks = world.size if spec is not None and may_shard(config, world) else 1
    needed, what = weights, "weights need"
    is_large = limit is not None and STATE * weights > limit.bytes * ranks
    if spec is not None and is_trained and is_large:
        # Any objective will do: no sample is computed.
        model = Model(module=module, objective=NextToken(), spec=spec, device=world.device)
        work = Workload(model=model, make_fields=Tiled({}, 1))
        needed, what = resting(work).peak_bytes, "weights, gradients and optimizer state need"
    if limit is not None and needed > limit.bytes * ranks:
        raise _refusal(module, f"{what} {size(needed)}", limit, ranks)
    # Wherever the model is to go, it is built in the memory of this machine first.
    host = memory_limit(torch.device("cpu"), local_ranks=world.local_size)
    if is_here and weights > host.bytes:
        raise _refusal(module, f"weights need {size(weights)} to be built", host, 1)


def _refusal(module: nn.Module, what: str, limit: MemoryLimit, ranks: int) -> DoesNotFitError:
    count = plural(sum(map(torch.numel, module.parameters())), "parameter")
    there = f"{size(limit.bytes)} are available{' on each rank' * (ranks > 1)} ({limit.source})"
    return DoesNotFitError(
        f"model: {type(module).__name__} has {count}, whose {what}, and {there}: use a smaller "
        "model, or more memory; train plan device=h100 parallel.ranks=8 shows what fits elsewhere"
    )
