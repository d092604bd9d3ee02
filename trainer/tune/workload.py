"""Compute what one rank of a run does, as far as time and memory are concerned.

Samples of any shape are made out of real ones, whose dimensions either follow the length of their
sequence, or have a length of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainer.accumulate.base import sum_of
from trainer.accumulate.rollback import Snapshot
from trainer.core.micro_batch import Fields, to_device
from trainer.core.world import World
from trainer.data.collate import PACKING
from trainer.data.samples import preserve_generators
from trainer.models.bind import Casts
from trainer.models.first_weights import drawn, is_on_meta
from trainer.models.recompute import with_checkpointing
from trainer.objectives.base import ModelCall, sums_of
from trainer.parallel.base import Parallel, Replicated, trained_parameters
from trainer.plan.cut import IntArray
from trainer.training.model import ONE_RANK, Model
from trainer.tune.peak_bytes import MemoryEstimate, PeakBytes

LayOut = Callable[[nn.Module], Parallel]
"""Lays a copy of the model out over ranks, in place, and binds a call to it."""
Dim = tuple[str, int]
"""A field's name, and which of its dimensions."""

SAMPLES = 16  # looked at, to tell which dimensions follow the length


@final
@dataclass(frozen=True, kw_only=True)
class Workload:
    """One rank's model, loss, optimizer and data."""

    model: Model  # as it is before it is compiled or wrapped for several ranks
    make_fields: Tiled  # draws nothing from global generators
    ema_decay: float | None = None  # of the average of the weights; None where there is none
    # Whether the model is timed compiled, and its memory predicted so; where it recomputes, whose
    # graphs cannot run fake, memory is predicted uncompiled
    compiled: bool = False
    # Lends a way to lay copies out over ranks that are not there, as the run does over real ones;
    # None is one rank
    fake_ranks: Callable[[], AbstractContextManager[LayOut]] | None = None
    shards: tuple[int, int] = (
        1,
        1,
    )  # of the model, over the ranks that run fake and over the run's

    @property
    def resident_bytes(self) -> int:
        """Bytes of the model's own tensors that are in memory already."""
        module, sizes = self.model.module, dict[int, int]()
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                # Tied weights and views share a storage, which counts once.
                storage = tensor.untyped_storage()
                sizes[id(storage)] = storage.nbytes()
        return sum(sizes.values())

    def fields(self, num_samples: int, length: int) -> Fields:
        """Make a micro-batch where the model computes."""
        return to_device(self.make_fields(num_samples, length), self.model.device)

    def backward(self, fields: Fields, call: ModelCall | None = None) -> None:
        """Add the gradient of one micro-batch to `.grad`; `call` is that of a model laid out."""
        losses = sums_of(self.model.objective, call or self.model.call, fields, None).losses
        sum_of([*losses.values()]).backward()  # type: ignore[no-untyped-call] # untyped in torch

    def filled(self) -> AbstractContextManager[None]:
        """Have the model whole inside the block, wherever its parameters are outside of it."""
        module, weights = self.model.module, self.model.weights
        if weights is not None and is_on_meta(module):
            return drawn(module, weights, self.model.device)
        return nullcontext()

    def on_one_rank(self, module: nn.Module) -> Parallel:
        """Lay a copy of the model out on one rank."""
        call, world = self.model.bind(module), World(device=self.model.device)
        return Replicated(module, call, trained_parameters(module), world)

    @contextmanager
    def live(self, *, recompute: bool) -> Iterator[None]:
        """Lend the model itself to be run inside the block, and leave it bit for bit as it was."""
        with restoring(self.model.module, self.model.objective), self.variant(recompute=recompute):
            yield

    @contextmanager
    def variant(self, *, recompute: bool) -> Iterator[None]:
        """Compute with or without activation checkpointing inside the block."""
        checkpointing: AbstractContextManager[object] = nullcontext()
        if recompute:
            checkpointing = with_checkpointing(self.model.module)
        with checkpointing:
            self.model.module.train()
            yield

    def count(self, peak: PeakBytes, fields: Fields) -> None:
        """Count what is there before a forward."""
        peak.assign("parameters", self.model.module.parameters())
        peak.assign("buffers", self.model.module.buffers())
        peak.assign("activations", fields.values())


@contextmanager
def restoring(model: nn.Module, *others: object) -> Iterator[None]:
    """Run a live model, and put its declared state and the random generators back in the end.

    Covers `.grad`, whether modules train, what a step's `Snapshot` does of the model and `others`
    such as its objective, and the random state of torch on the CPU and the model's GPU, of Python
    and NumPy. Weights are not copied: no pass changes them. The model is not wrapped; a rank may
    do it alone.
    """
    snapshot = Snapshot(model, *others)
    snapshot.take()
    trained = [(module, module.training) for module in model.modules()]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in grads:
        parameter.grad = None
    on_gpu = {p.device.index for p, _ in grads} - {None}
    try:
        with preserve_generators(), torch.random.fork_rng(devices=sorted(on_gpu)):
            yield
    finally:
        snapshot.restore()
        for module, is_training in trained:
            module.training = is_training
        for parameter, gradient in grads:
            parameter.grad = gradient


def fullest_steps(work: Workload, model: Parallel, fields: Fields | None = None) -> MemoryEstimate:
    """Take two steps on one rank, from gathering to the update, and give the second's peak.

    Once the first has made the optimizer's state, and an earlier micro-batch the gradients, no
    later moment needs more than one more micro-batch and the update after it. In the first,
    gradients of zero make that state, unless backward sends them. In lockstep each step has two
    micro-batches, as what is reduced waits beside the second. Changes the weights, so it is for
    fake tensors or copies, laid out. Without `fields` it updates alone.
    """
    module = model.module
    sync = ONE_RANK.sync
    if work.fake_ranks is not None:
        sync = work.model.setup.sync
    # Where backward sends gradients, a step without one would have none for the optimizer.
    first_fields = fields if sync.lockstep or sync.overlaps else None
    work, peak = replace(work, model=replace(work.model, module=module)), PeakBytes()
    with peak:
        optimizer, snapshot = work.model.spec.build(module), Snapshot(module)
        # The weights, which count as such, but for copies that it steps in place of them.
        for group in optimizer.param_groups:
            peak.assign("optimizer_state", group["params"])
        work.count(peak, fields or {})
        peak.follow_average(work.ema_decay, module, optimizer)
        for given in (first_fields, fields):
            peak.reset()
            snapshot.take()
            model.begin(sync)
            peak.assign("parameters", module.parameters())
            peak.assign("buffers", model.staging.values())
            if not sync.lockstep:
                _add_zero_gradients(module)
            peak.assign("gradients", gradients(module))
            if given is not None:
                _accumulate(work, model, given, peak, in_lockstep=sync.lockstep)
            used = model.used()
            model.make_room()
            model.reduce(used)
            peak.assign("gradients", gradients(module))
            # A norm takes next to nothing; a fake one of a large model, minutes.
            model.scale_gradients(torch.ones((), device=work.model.device))
            optimizer.step()
            state = tree_leaves([*optimizer.state.values()])
            peak.assign("optimizer_state", filter(torch.is_tensor, state))
            optimizer.zero_grad(set_to_none=True)
    return peak.estimate


def _accumulate(
    work: Workload, model: Parallel, fields: Fields, peak: PeakBytes, *, in_lockstep: bool
) -> None:
    """Add up the gradients of the micro-batches that a step has at its peak."""
    are_last = [True]
    if in_lockstep:
        are_last = [False, True]
    for is_last in are_last:
        with ExitStack() as modes:
            # In lockstep a block's weights may leave once they are used; their casts would stay.
            if not in_lockstep:
                modes.enter_context(Casts(model.module).once(work.model.device.type))
            modes.enter_context(model.micro_batch(is_last=is_last))
            work.backward(fields, model.call)
        peak.assign("gradients", [*gradients(model.module), *model.gradients()])


def _add_zero_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def gradients(model: nn.Module) -> list[Tensor]:
    """List the gradients a model holds."""
    found = list[Tensor]()
    for parameter in model.parameters():
        if parameter.grad is not None:
            found.append(parameter.grad)
    return found


@final
@dataclass(frozen=True, slots=True)
class Dims:
    """The dimensions, but the first, that are not the same in every sample."""

    # Those with one entry per token; None where samples of one length cannot tell
    sequence: tuple[Dim, ...] | None = None
    # Those with a length of their own: the most entries of the samples that were looked at
    own: Mapping[Dim, int] = field(default_factory=dict)
    # What was looked at, by its length
    samples: Mapping[int, Fields] = field(default_factory=dict, repr=False)


def measured_dims(lengths: IntArray, load: Callable[[int], Fields | None]) -> Dims:
    """Look at a few samples, from the shortest to the longest.

    `lengths` are those of all data; `load` gives one sample, collated alone, or None for a bad one.
    """
    ascending = lengths.argsort(kind="stable")
    places = np.unique(np.linspace(0, len(ascending) - 1, SAMPLES).round().astype(np.int64))
    seen = list[tuple[int, Fields]]()
    for place in ascending[places].tolist():
        fields = load(place)
        if fields is not None:
            seen.append((int(lengths[place]), fields))
    return _dims_of(seen)


def _dims_of(seen: Sequence[tuple[int, Fields]]) -> Dims:
    """Tell the dimensions apart by samples, each with its length."""
    tokens = tuple(length for length, _ in seen)
    sequence, own, samples = list[Dim](), dict[Dim, int](), dict[int, Fields]()
    names = set[str]()
    if seen:
        names = set.intersection(*(set(fields) for _, fields in seen))
    # In order, since the tuning cache goes by what this prints as.
    for name in sorted(names):
        shapes = [tuple(fields[name].shape) for _, fields in seen]
        for dim, sizes in enumerate(zip(*shapes, strict=False)):
            if dim and sizes == tokens:
                sequence.append((name, dim))
            elif dim and len(set(sizes)) > 1:
                own[name, dim] = max(sizes)
    for length, fields in seen:
        if fields.keys() == names:
            samples[length] = fields
    # In samples of one length every dimension of that many entries would look like the tokens.
    if len(set(tokens)) <= 1:
        return Dims(None, own, samples)
    return Dims(tuple(sequence), own, samples)


@final
@dataclass(frozen=True)
class Tiled:
    """Makes micro-batches of any shape out of real samples, repeating them and their last token.

    Of what was looked at it takes the longest sample that is no longer than what is asked for:
    without the end of its text, a model may not take the image that belongs to it. One is cut only
    for less than `shortest`.

    The first dimension of a field is the samples. Samples without tokens have length 1 and no
    sequence. An example that says where packed documents begin is one row, and so is what is made
    of it. Where it is not known which dimensions have one entry per token, as in data whose samples
    are all of one length, it is every one of `length` entries. What has a length of its own gets
    the most that was seen.
    """

    example: Fields  # collated, at least one sample
    length: int  # what its samples are padded to
    dims: Dims = field(default_factory=Dims)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest sample that is whole; of packed documents any part is one."""
        if "cu_seqlens" in self.example:
            return 1
        return min(self.dims.samples, default=1)

    def __call__(self, num_samples: int, length: int) -> Fields:
        """Give collated fields of `num_samples` samples, each padded to `length` tokens."""
        if "cu_seqlens" not in self.example:
            known = {**self.dims.samples, self.length: self.example}
            size = min(known)
            for each in known:
                if size < each <= length:
                    size = each
            sample = known[size]
            return {name: self._tiled(sample, size, name, num_samples, length) for name in sample}
        # Documents of `length` tokens, end to end in one row.
        ends = torch.arange(num_samples + 1, dtype=torch.int32) * length
        index = torch.arange(length).repeat(num_samples)
        row = dict[str, Tensor]()
        for name, values in self.example.items():
            if name not in PACKING:
                row[name] = values.index_select(1, index % self.length)
        packing = {"position_ids": index[None], "cu_seqlens": ends}
        return {**row, **packing, "max_seqlen": torch.empty(length, 0)}

    def _tiled(self, sample: Fields, size: int, name: str, num_samples: int, length: int) -> Tensor:
        field = sample[name]
        for dim, entries in enumerate(field.shape):
            wanted = num_samples
            if dim:
                wanted = self._entries(name, dim, entries, size, length)
            if not entries and wanted:
                field = field.new_zeros([*field.shape[:dim], wanted, *field.shape[dim + 1 :]])
            elif wanted != entries:
                # Samples come again from the first; of a sequence the last entry comes again.
                index = torch.arange(wanted)
                if dim:
                    index = index.clamp(max=entries - 1)
                else:
                    index %= entries
                field = field.index_select(dim, index)
        return field

    def _entries(self, name: str, dim: int, entries: int, size: int, length: int) -> int:
        """Count what a dimension has in samples of up to `length` tokens."""
        sequence = self.dims.sequence
        if (name, dim) in self.dims.own:
            return self.dims.own[name, dim]
        follows = entries == size > 1
        if sequence is not None:
            follows = (name, dim) in sequence
        return length if follows else entries
