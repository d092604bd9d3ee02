"""Refuse runs whose BatchNorm layers cannot normalise as was typed."""

from __future__ import annotations

from contextlib import suppress
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from trainer.assemble.run import Run
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import to_device
from trainer.data.loader import Request
from trainer.features.batch_norm.layers import layers_of
from trainer.models.first_weights import is_on_meta
from trainer.plan.order import Order
from trainer.tune.workload import restoring

if TYPE_CHECKING:
    from trainer.features.batch_norm.mode import BatchNormMode


def check_layers(mode: BatchNormMode, run: Run) -> None:
    """Refuse a mode that does not fit the model, or the sizes of the steps."""
    config, module = run.config, run.model.module
    layers = layers_of(module)
    if not layers and mode.needs_layers:
        text = f"{type(module).__name__} has no BatchNorm that normalises in training"
        remedy = "leave it out, or type batchnorm=auto"
        raise ConfigError(f"batchnorm={typed_name(run)}: {text}: {remedy}")
    if mode.precise is not None:
        _check_precise(mode.precise, run)
    if not layers:
        return
    coupling = layers[0].coupling
    if config.deterministic == "layout" and coupling.kind != "none":
        raise ConfigError(
            "deterministic=layout: the running statistics of BatchNorm are sums over ranks, of "
            "other bits for other numbers of them: type batchnorm=frozen or deterministic=true"
        )
    # In tokens too: where groups are normalised, all samples have as many.
    counts = step_sizes(run.data.order, run.data.total_steps) if coupling.kind == "group" else ()
    if lone := [count for count in counts if count % coupling.size == 1]:
        raise ConfigError(
            f"batchnorm.group={coupling.size}: a step of {max(lone)} samples leaves a group of one "
            "sample, which has no variance: type another batchnorm.group or size of steps, or, for "
            "the end of an epoch, batch.tail=drop"
        )


def typed_name(run: Run) -> str:
    """Name the option that was typed, or the class."""
    return run.config.features["batchnorm"].label


def _check_precise(precise: int, run: Run) -> None:
    """Refuse an estimate where there is nothing to estimate, or nothing to estimate it from."""
    why = None
    tracked = [each for each in layers_of(run.model.module) if each.running_mean is not None]
    if run.config.reads_all:
        why = "estimates over the training data of the run, which are not read"
    elif not tracked:
        why = "the model has no BatchNorm with running statistics"
    elif tracked[0].mode.estimating is None:
        why = f"batchnorm={typed_name(run)} estimates none again"
    if why is not None:
        raise ConfigError(f"batchnorm.precise={precise}: {why}: type batchnorm.precise=null")


def step_sizes(order: Order, total_steps: int) -> set[int]:
    """Count the samples of all steps; where tokens are counted, as if samples had as many."""
    if not order.sizes.is_constant:
        return {b.samples - a.samples for a, b in pairwise(order.walk(total_steps))}
    counts = {whole := len(order.batch_of(order.sizes.largest))}
    if order.keeps_tail and total_steps >= order.steps_per_epoch:
        counts.add(order.num_samples % whole or whole)
    return counts


def check_lone_samples(run: Run) -> None:
    """Refuse a cut that leaves a sample by itself in a step, as the last of an epoch may be.

    Images may have many values of a channel in one sample; then it is no fault.
    """
    source, config = run.data, run.config
    is_ragged = config.batch.unit == "tokens" and not source.lengths.is_constant
    layers, cut = layers_of(run.model.module), run.cut
    if run.model.coupling.kind not in cut.couplings:
        # The cut itself is refused.
        return
    if is_ragged or all(x.coupling.kind != "micro_batch" or x.coupling.joins_ranks for x in layers):
        return
    lone = []
    for count in step_sizes(source.order, source.total_steps):
        plan = cut.cut(np.full(count, source.lengths.max()), run.layout)
        if any(len(slot) == 1 for slot in chain.from_iterable(plan.ranks)):
            lone.append(count)
    if lone and _has_one_value(run):
        raise ConfigError(
            f"batchnorm={typed_name(run)}: a step of {max(lone)} samples leaves a "
            "micro-batch of one sample, which has one value of each channel: type another "
            "accum.micro or size of steps, or, for the end of an epoch, batch.tail=drop"
        )


def _has_one_value(run: Run) -> bool:
    """Run one sample in training; tells whether a layer gets one value of each channel."""
    module, loader, found = run.model.module, run.data.loader, list[bool]()

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        found.append(args[0].numel() == args[0].shape[1])

    hooks = [layer.register_forward_pre_hook(note) for layer in layers_of(module)]
    fields = loader.load(Request((0,), 0, int(run.data.lengths[0])))
    device = torch.device("meta") if is_on_meta(module) else run.world.device
    # What fails here fails again, in full, in the step.
    with suppress(Exception), restoring(module, run.model.objective), torch.no_grad():
        module.train()
        run.model.call(to_device(fields, device))
    for hook in hooks:
        hook.remove()
    return any(found)
