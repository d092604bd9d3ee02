"""Estimate the running statistics of BatchNorm again, for the weights that are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer.accumulate.rollback import Snapshot
from trainer.core.micro_batch import to_device
from trainer.features.batch_norm.layers import BatchNormLayer, layers_of, taken_sums
from trainer.models.bind import Casts
from trainer.parallel.base import Parallel
from trainer.training.batches import Feed
from trainer.training.evaluation import evaluating


@contextmanager
def precise_statistics(model: Parallel, feed: Feed, most: int) -> Iterator[None]:
    """Normalise by statistics of the model as it is now, over `most` samples or some more, inside.

    Running statistics lag behind the weights, and an average of weights has none of its own. These
    are of the first samples of the first epoch, cut as steps are, without dropout: their mean and
    population variance ("precise BatchNorm", Wu and Johnson 2021). Afterwards the model is as it
    was. Collective.
    """
    layers = [each for each in layers_of(model.module) if each.running_mean is not None]
    buffers = [buffer for layer in layers for buffer in layer.buffers()]
    before = [buffer.clone() for buffer in buffers]
    if layers:
        sums = _estimated(model, feed, most, layers)
        for layer, own in zip(layers, sums, strict=True):
            layer.take(own)
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


@torch.no_grad()
def _estimated(
    model: Parallel, feed: Feed, most: int, layers: Sequence[BatchNormLayer]
) -> tuple[Tensor, ...]:
    """Give the sums of each layer's values over the first samples of the training data."""
    loader, cursor, device = feed.data.loader, feed.data.order.start, model.world.device
    ways, snapshot = [(layer.mode, layer.joins_ranks) for layer in layers], Snapshot(model.module)
    snapshot.take()
    model.gather()
    with evaluating(model.module), Casts(model.module).once(device.type):
        for layer in layers:
            assert layer.mode.estimating is not None
            layer.mode, layer.joins_ranks, layer.training = layer.mode.estimating, False, True
        while cursor.samples < most and not cursor.epoch:
            samples, plan = feed.plan(cursor)
            for request in feed.requests(samples, plan):
                if request.ids:
                    model.call(to_device(loader.load(request), device))
            cursor = samples.after
    model.release()
    for layer, (mode, joins_ranks) in zip(layers, ways, strict=True):
        layer.mode, layer.joins_ranks = mode, joins_ranks
    sums = taken_sums(layers, model.world)
    snapshot.restore()  # what else these forwards wrote
    return sums
