"""Refuse micro-batches of one sample where a layer normalises over the samples of each."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.assemble.batch_norm import step_sizes
from trainer.assemble.components import Components
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import to_device
from trainer.data.loader import Request
from trainer.models.batch_norm import layers_of
from trainer.models.first_weights import is_on_meta
from trainer.plan.cut import Cut
from trainer.plan.cuts import Fixed
from trainer.tune.workload import restoring


def check_lone_samples(components: Components) -> None:
    """Refuse a cut that leaves a sample alone in a step, as the last of an epoch may be.

    Images may have many values of a channel in one sample; then it is no fault.

    Raises:
        ConfigError: a layer gets one value of a channel, which has no variance.
    """
    source, cut, config = components.source, components.cut, components.config
    is_ragged = config.batch.unit == "tokens" and not source.lengths.is_constant
    couplings = [layer.coupling for layer in layers_of(components.module)]
    if is_ragged or not any(c.kind == "micro_batch" and not c.joins_ranks for c in couplings):
        return
    counts = step_sizes(source.order, components.total_steps)
    lone = [count for count in counts if _leaves_one(cut, count, components)]
    if not lone or (name := _single_valued(components)) is None:
        return
    remedies = list[str]()
    if isinstance(cut, Fixed) and cut.micro is not None:
        others = (replace(cut, micro=n) for n in range(cut.micro + 1, max(counts) + 1))
        fitting = (o for o in others if not any(_leaves_one(o, n, components) for n in counts))
        remedies += [f"accum.micro={each.micro}" for each in [*fitting][:1]]
    remedies += ["batch.tail=drop"] * (source.order.keeps_tail and max(lone) < max(counts))
    raise ConfigError(
        f"batchnorm={config.batchnorm.name or config.batchnorm.target}: a step of {max(lone)} "
        f"samples leaves a micro-batch of one sample, of which {name} gets one value of each "
        f"channel: type {' or '.join(remedies) or 'another size of steps'}"
    )


def _leaves_one(cut: Cut, count: int, components: Components) -> bool:
    lengths = np.full(count, components.source.lengths.max())
    return any(len(ids) == 1 for own in cut.cut(lengths, components.layout).ranks for ids in own)


def _single_valued(components: Components) -> str | None:
    """Run one sample in training; names a layer that gets one value of each channel, if any."""
    module, loader, found = components.module, components.source.loader, list[str]()
    names = {layer: name for name, layer in module.named_modules()}

    def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(values := args[0], Tensor) and values.numel() == values.shape[1]:
            found.append(names[layer])

    hooks = [layer.register_forward_pre_hook(note) for layer in layers_of(module)]
    fields = loader.load(Request((0,), 0, int(components.source.lengths[0])))
    device = torch.device("meta") if is_on_meta(module) else components.world.device
    # What fails here fails again, in full, in the step.
    with suppress(Exception), restoring(module, components.objective), torch.no_grad():
        module.train()
        components.call(to_device(fields, device))
    for hook in hooks:
        hook.remove()
    return next(iter(found), None)
