"""Refuse micro-batches of one sample where a layer normalises over the samples of each."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.assemble.batch_norm import step_sizes
from trainer.assemble.components import Components
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import to_device
from trainer.data.loader import Request
from trainer.models.batch_norm import layers_of
from trainer.models.first_weights import is_on_meta
from trainer.tune.workload import restoring


def check_lone_samples(components: Components) -> None:
    """Refuse a cut that leaves a sample by itself in a step, as the last of an epoch may be.

    Images may have many values of a channel in one sample; then it is no fault.
    """
    source, config = components.source, components.config
    is_ragged = config.batch.unit == "tokens" and not source.lengths.is_constant
    layers = layers_of(components.module)
    if is_ragged or all(x.coupling.kind != "micro_batch" or x.coupling.joins_ranks for x in layers):
        return
    counts = step_sizes(source.order, components.total_steps)
    lone = [count for count in counts if _has_lone_sample(components, count)]
    if lone and _has_one_value(components):
        raise ConfigError(
            f"batchnorm={config.batchnorm.name or config.batchnorm.target}: a step of {max(lone)} "
            "samples leaves a micro-batch of one sample, which has one value of each channel: type "
            "another accum.micro or size of steps, or, for the end of an epoch, batch.tail=drop"
        )


def _has_lone_sample(components: Components, count: int) -> bool:
    lengths = np.full(count, components.source.lengths.max())
    plan = components.cut.cut(lengths, components.layout)
    return any(len(slot) == 1 for rank in plan.ranks for slot in rank)


def _has_one_value(components: Components) -> bool:
    """Run one sample in training; tells whether a layer gets one value of each channel."""
    module, loader, found = components.module, components.source.loader, list[bool]()

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        found.append(args[0].numel() == args[0].shape[1])

    hooks = [layer.register_forward_pre_hook(note) for layer in layers_of(module)]
    fields = loader.load(Request((0,), 0, int(components.source.lengths[0])))
    device = torch.device("meta") if is_on_meta(module) else components.world.device
    # What fails here fails again, in full, in the step.
    with suppress(Exception), restoring(module, components.objective), torch.no_grad():
        module.train()
        components.call(to_device(fields, device))
    for hook in hooks:
        hook.remove()
    return any(found)
