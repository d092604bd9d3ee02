"""Let BatchNorm layers normalise as a mode says, and move their running statistics once a step.

A layer keeps its weights, buffers and names: what is saved and exported is PyTorch's BatchNorm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.accumulate.rollback import Snapshot
from trainer.core.coupling import Coupling
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import to_device
from trainer.core.stateful import State, Stateful
from trainer.core.world import World
from trainer.models.bind import Casts
from trainer.models.frozen import evaluating
from trainer.models.norms import normalizes_batch
from trainer.parallel.base import Parallel
from trainer.training.batches import Feed

if TYPE_CHECKING:
    from trainer.features.batch_norm.mode import BatchNormMode


@final
class SampleCount:
    """Notes how many samples the forward that runs has: the first dimension of what it takes."""

    def __init__(self) -> None:
        self.samples = 0

    def note(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """See the class; a hook before the forward of the whole model."""
        given = [*args, *kwargs.values()]
        self.samples = next((len(x) for x in given if isinstance(x, Tensor) and x.dim()), 0)


class BatchNormLayer(_BatchNorm):
    """A BatchNorm layer whose mode normalises for it in training."""

    mode: BatchNormMode
    count: SampleCount
    coupling: Coupling
    # `(3, channels)` in float64, of the step's forwards up to now: how many values, their sum, and
    # that of their squares. Between two steps None. No checkpoint has it; a replay puts it back.
    step_sums: Tensor | None
    # Adds in place over all ranks while the step runs; None on one rank, and outside of steps
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; see `BatchNormMode.normalize`. An evaluation's is PyTorch's own."""
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call] # untyped in torch
        return self.mode.normalize(self, input)

    def rows_of(self, samples: int, values: Tensor) -> int:
        """Count the rows of so many samples, which may have several each: their tokens, say."""
        rows, count = len(values), self.count.samples
        return samples * (rows // count if count and rows % count == 0 else 1)

    def in_pieces(self, values: Tensor, rows: int | None = None) -> Tensor:
        """Normalise pieces of `rows` rows, each over itself, and note their statistics.

        A piece is computed alone, so that its bits do not depend on what else is there; the last
        may be short. None takes all rows as one.
        """
        found: Tensor = _in_pieces(self, values, rows or max(1, len(values)))
        return found

    @torch.no_grad()
    def note_sums(self, sums: Tensor) -> None:
        """Add sums of a forward, as of `step_sums`, to the step's; not when it is recomputed."""
        # Within backward the task has an id: there this forward is a recomputation.
        if self.running_mean is not None and torch._C._current_graph_task_id() == -1:
            self.step_sums = sums if self.step_sums is None else self.step_sums + sums

    @torch.no_grad()
    def move(self, sums: Tensor) -> None:
        """Move the running statistics by those of a whole step; without a value they stay."""
        assert self.num_batches_tracked is not None
        count, is_used = sums[0].clamp(min=2), sums[0] > 0
        mean, variance = _moments(sums)
        # Running statistics have the unbiased variance, as those of PyTorch.
        variance = variance * count / (count - 1)
        self.num_batches_tracked += is_used[0]
        weight: Tensor | float | None = self.momentum
        # A plain mean over all steps.
        if weight is None:
            weight = 1 / self.num_batches_tracked.double().clamp(min=1)
        self._approach(mean, variance, is_used.double() * weight)

    @torch.no_grad()
    def take(self, sums: Tensor) -> None:
        """Take the mean and the population variance of many steps for running statistics."""
        self._approach(*_moments(sums), (sums[0] > 0).double())

    def _approach(self, mean: Tensor, variance: Tensor, weight: Tensor) -> None:
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            # In fp64, so that a step rounds once.
            running.copy_(running.double().lerp(value, weight))


def _moments(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Give the mean of values and their population variance."""
    count = sums[0].clamp(min=1)
    mean = sums[1] / count
    # Rounding can put the difference of two squares below zero.
    return mean, (sums[2] / count - mean**2).clamp(min=0)


# A compiler would make a graph for each number of pieces.
@torch.compiler.disable  # type: ignore[untyped-decorator] # untyped in torch
def _in_pieces(layer: BatchNormLayer, values: Tensor, rows: int) -> Tensor:
    pieces, shape = torch.split(values, rows), (-(-len(values) // rows) or 1, values.shape[1])
    # Under autocast values are in half precision, and statistics are not.
    like = next(t for t in (layer.running_mean, layer.weight, values) if t is not None)
    found = torch.zeros((2, *shape), dtype=like.dtype, device=values.device)
    how = (True, 1.0, layer.eps, torch.backends.cudnn.enabled)
    # With a momentum of 1 running statistics become those of the piece.
    parts = [
        torch.batch_norm(piece, layer.weight, layer.bias, found[0, i], found[1, i], *how)
        for i, piece in enumerate(pieces)
    ]
    if len(values):
        counts = found.new_full(shape, pieces[0].numel() // shape[1], dtype=torch.float64)
        counts[-1] = pieces[-1].numel() // shape[1]
        mean, variance = found.double()
        # Back from the unbiased variance, which one value has none of.
        squares = torch.where(counts > 1, variance * (counts - 1), 0.0) + counts * mean**2
        layer.note_sums(torch.stack([counts, counts * mean, squares]).sum(1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def taken_sums(layers: Sequence[BatchNormLayer], world: World) -> tuple[Tensor, ...]:
    """Take what each layer has summed up, over all ranks: see `step_sums`. Collective."""
    each = []
    for layer in layers:
        own, layer.step_sums = layer.step_sums, None
        shape = (3, layer.num_features)
        zeros = torch.zeros(shape, dtype=torch.float64, device=world.device)
        each.append(zeros if own is None else own)
    # One message for all layers.
    sizes = [layer.num_features for layer in layers]
    return torch.split(world.sum(torch.cat(each, dim=1)), sizes, dim=1)


def layers_of(model: nn.Module) -> list[BatchNormLayer]:
    """List the layers that a mode normalises for."""
    return [part for part in model.modules() if isinstance(part, BatchNormLayer)]


def use_mode(model: nn.Module, mode: BatchNormMode) -> None:
    """Let a mode normalise for every layer that normalises over samples, in place."""
    count, found = SampleCount(), False
    for name, part in model.named_modules():
        if not isinstance(part, _BatchNorm) or not normalizes_batch(part):
            continue
        kind, coupling, found = type(part), mode.coupling(name), True
        # Evaluations would need them: their micro-batches may differ in number between ranks.
        if part.running_mean is None and (coupling.kind == "none" or coupling.joins_ranks):
            text = "keeps no running statistics (track_running_stats=False) to normalise by"
            mine = type(mode).__name__.lower()
            raise ConfigError(f"batchnorm={mine}: {name} {text}: type batchnorm=ghost")
        # Behind its own class, which may have a forward of its own around PyTorch's; SyncBatchNorm
        # has PyTorch's other one.
        is_other = kind is nn.SyncBatchNorm
        bases = (BatchNormLayer, kind) if is_other else (kind, BatchNormLayer)
        part.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__})
        vars(part).update(mode=mode, count=count, coupling=coupling)
        part.register_buffer("step_sums", None, persistent=False)
    if found:
        model.register_forward_pre_hook(count.note, with_kwargs=True)


@final
class RunningStatistics(Stateful):
    """Moves the running statistics of a model once a step, by the statistics of the whole step."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._layers = [
            each
            for each in layers_of(model)
            if each.mode.moves_once and each.running_mean is not None
        ]

        # Not `world.sum`, with which a copy of a layer would copy the world.
        def sum_over_ranks(values: Tensor) -> Tensor:
            return world.sum(values)

        for layer in self._layers:
            if world.size > 1:
                layer.sum_over_ranks = sum_over_ranks
        is_grouped = any(layer.coupling.kind == "group" for layer in self._layers)
        self._others = _saved_buffers(model) if is_grouped else {}
        self._model = model

    def state(self) -> State:
        """See the base class: between two steps there is none but the model's own buffers."""
        return {}

    def load(self, state: State) -> None:
        """See the base class."""

    def after_update(self, step: int) -> None:
        """See the base class."""
        if not self._layers:
            return
        # Refused once: a model of which forwards move more than its BatchNorm layers.
        now = _saved_buffers(self._model) if self._others else {}
        for name, before in self._others.items():
            if name in now and not torch.equal(before, now[name]):
                raise ConfigError(
                    f"batchnorm=ghost: {name} moves in each forward, so that the step depends on "
                    "the cut: type accum=fixed accum.micro=N batchnorm=micro, or let it move once "
                    "a step"
                )
        self._others = {}
        sums = taken_sums(self._layers, self._world)
        for layer, own in zip(self._layers, sums, strict=True):
            layer.move(own)


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copy the buffers that checkpoints hold, but those of the layers that a mode normalises for.

    Others are caches.
    """
    found = {}
    for prefix, part in model.named_modules():
        if isinstance(part, BatchNormLayer):
            continue
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                found[f"{prefix}.{name}".lstrip(".")] = buffer.clone()
    return found


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
    before = [*map(torch.clone, buffers)]
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
    ways = [(layer.mode, layer.sum_over_ranks) for layer in layers]
    snapshot = Snapshot(model.module)
    snapshot.take()
    model.gather()
    with evaluating(model.module), Casts(model.module).once(device.type):
        for layer in layers:
            assert layer.mode.estimating is not None
            # In training mode alone: dropout and all else is as in evaluation.
            layer.mode, layer.sum_over_ranks = layer.mode.estimating, None
            layer.training = True
        while cursor.samples < most and not cursor.epoch:
            samples, plan = feed.plan(cursor)
            for request in feed.requests(samples, plan):
                if request.ids:
                    model.call(to_device(loader.load(request), device))
            cursor = samples.after
    model.release()
    for layer, (mode, sum_over_ranks) in zip(layers, ways, strict=True):
        layer.mode, layer.sum_over_ranks = mode, sum_over_ranks
    sums = taken_sums(layers, model.world)
    # What else these forwards wrote.
    snapshot.restore()
    return sums
