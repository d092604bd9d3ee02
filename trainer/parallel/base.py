"""Lay a model out over ranks: where parameters and gradients live, and how they are reduced.

Each rank computes the gradient of its own micro-batches, and every loss in it is divided by the
weight of the whole *global* batch. So the gradient of a step is the plain sum of what the ranks
have: everything here sums, and undoes the division that a reducer makes on its own. A step is

    begin(policy)          bring parameters here: nothing to do for whole copies
    micro_batch(is_last)   around each forward and backward; in a window no collective runs inside,
                           so counts may differ
    used(), make_room()    then ranks agree that all succeeded, and who has which gradient
    reduce(used)           sum `.grad` over ranks: all-reduces (whole copies), or one
                           reduce-scatter per block that leaves each rank its shard (FSDP2)

A sync policy (`sync.py`) says *when* to reduce; this room knows *how*, and keeps account of what is
reduced. In lockstep `.grad` holds what is not, between micro-batches, and `reduce` sends nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.core.errors import ConfigError
from trainer.core.micro_batch import Fields
from trainer.core.tensors import as_real, gradient_dtype
from trainer.core.world import World
from trainer.parallel.overlap import Overlap
from trainer.parallel.sync import Deferred, Reduction, SyncPolicy, reduction_of

BUCKET_BYTES = {"cpu": 2**23, "gpu": 2**25}
"""Small gradients are packed into buckets of this size, since each all-reduce costs a latency."""

IN_FLIGHT = 2
"""Buckets that travel at a time: one is packed or unpacked while another is on its way."""

# Elements of a gradient whose norm is taken at once, 2 MiB in fp64
NORM_PIECE = 1 << 18

# Its older name is deprecated where the newer one is.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(eq=False, repr=False)
class Parallel(ABC):
    """A model laid out over the ranks."""

    module: nn.Module  # the user's; its parameters are the ones the optimizer steps
    call: Callable[[Fields], Any]  # runs the model on the fields of a micro-batch
    parameters: Sequence[nn.Parameter]  # those that are trained, in one order on every rank
    world: World  # all ranks
    is_ordered: ClassVar[bool] = False  # whether sums have the same bits for every number of ranks
    # Of the step: its policy, how many micro-batches began, and whether there was a last one
    _sync: SyncPolicy = field(default=Deferred(), init=False)
    _index: int = field(default=0, init=False)
    _is_complete: bool = field(default=False, init=False)
    # Which parameters micro-batches gave a gradient in lockstep.
    _live: set[int] = field(default_factory=set, init=False)
    # Memory for buckets on their way, by dtype and slot.
    staging: dict[tuple[torch.dtype, int], Tensor] = field(default_factory=dict, init=False)

    @abstractmethod
    def gather(self) -> None:
        """Bring the parameters of the window to this rank. Collective."""

    def release(self) -> None:
        """Let go of what `gather` brought, when no gradient is to be reduced."""
        return

    @abstractmethod
    def used(self) -> Sequence[bool]:
        """Tell which parameters have a gradient from this rank's micro-batches."""

    @abstractmethod
    def make_room(self) -> None:
        """Take the memory that `reduce` needs while the step can still be repeated."""

    @abstractmethod
    def reduce(self, used: Sequence[bool]) -> None:
        """Sum the gradients over all ranks, and end the step's window. Collective.

        `used` are parameters that have a gradient on any rank; that of the others stays None.
        """

    def begin(self, sync: SyncPolicy) -> None:
        """Begin a step whose gradients are reduced as a policy says. Collective."""
        self._sync, self._index, self._is_complete = sync, 0, False
        self._live.clear()
        self._open()

    def _open(self) -> None:
        self.gather()

    @property
    def num_begun(self) -> int:
        """Micro-batches of this rank that began in this step."""
        return self._index

    @property
    def computed_with(self) -> Sequence[nn.Parameter]:
        """What forwards compute with, one for each of `parameters`: each whole, in its order."""
        return self.parameters

    @property
    def _in_lockstep(self) -> bool:
        return self._sync.lockstep and self.world.size > 1

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Wrap the forward and backward of one micro-batch, the last of this rank's step or not.

        Collective in lockstep. `ConfigError` where the policy gives no answer that it may.
        """
        self.world.rank_progress.next_micro_batch()
        reduction = reduction_of(self._sync, self._index, is_last=is_last)
        self._index, self._is_complete = self._index + 1, is_last
        return self._computing("none" if self.world.size == 1 else reduction, is_last=is_last)

    @abstractmethod
    def _computing(self, reduction: Reduction, *, is_last: bool) -> AbstractContextManager[None]:
        """Wrap a forward and backward, and reduce what it and those before it left."""

    def _refuse_rest(self, *, is_left: bool = False) -> None:
        """Refuse a step in lockstep with a gradient that no micro-batch reduced."""
        if is_left or not self._is_complete:
            raise ConfigError(
                f"accum.gradient: under sync={self._sync.name} a part of the gradient is not "
                "reduced: call every backward() in `micro_batch` of the strategy's last pass"
            )

    def gradients(self) -> list[Tensor]:
        """List the gradients that are here."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def gradient_norm(self) -> Tensor:
        """Compute the 2-norm of the whole gradient, a 0-d tensor. Collective.

        In fp32 at least: in bf16 it would be off by 4e-3, and in fp16 overflow beyond 65504. On a
        CPU in fp64: its kernel adds in order, which in fp32 is off by 3e-3 at 40M elements.
        """
        grads = self.gradients()
        if self.world.device.type == "cpu":
            return norm_in_double(grads)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(_norms(grads)))
        return norm

    def sum_over_shards(self, totals: Tensor) -> Tensor:
        """Add up, in place, what each rank computed of its part of the parameters. Collective."""
        return totals

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by a 0-d tensor."""
        torch._foreach_mul_(self.gradients(), factor)

    def drop_gradients(self) -> None:
        """Forget every gradient of a step that is to be replayed or skipped."""
        self._live.clear()
        for parameter in self.parameters:
            parameter.grad = None


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    """List the parameters of a model that are trained."""
    return [*filter(attrgetter("requires_grad"), module.parameters())]


@final
@dataclass(eq=False, repr=False)
class Replicated(Parallel):
    """Every rank has the whole model; all-reduces of its gradients end the window.

    Unlike PyTorch's DDP, no reducer hooks the backward, so ranks may differ in their number of
    micro-batches and in the parameters they use, and nothing is left half-finished when memory
    runs out. Weights must be the same on every rank.
    """

    bucket_bytes: int = BUCKET_BYTES["cpu"]  # larger gradients are reduced where they lie
    _overlap: Overlap | None = field(default=None, init=False)
    # In lockstep what is summed over ranks already, a second gradient in memory
    _reduced: list[Tensor | None] = field(default_factory=list, init=False)

    def gather(self) -> None:
        """Set memory aside for the reduction, so that it cannot run out once ranks have agreed."""
        if self.world.size == 1:
            return
        for bucket in buckets(self.parameters, self.bucket_bytes):
            if len(bucket) > 1 or not bucket[0].is_contiguous():
                for slot in range(IN_FLIGHT):
                    self._stage(bucket, slot)

    def _open(self) -> None:
        # What overlaps has all buckets at once, in place of gradients.
        if self._sync.overlaps and self.world.size > 1:
            # Backward reaches the last parameters first.
            reverse = [*buckets(self.parameters[::-1], self.bucket_bytes)]
            self._overlap = self._overlap or Overlap(self.parameters, reverse, self.world)
            self._overlap.begin()
        else:
            self.gather()

    def used(self) -> Sequence[bool]:
        """See the base class."""
        if self._overlap is not None and self._overlap.is_open:
            return self._overlap.used()
        if self._in_lockstep:
            self._refuse_rest(is_left=any(p.grad is not None for p in self.parameters))
            return [index in self._live for index in range(len(self.parameters))]
        return [p.grad is not None for p in self.parameters]

    def make_room(self) -> None:
        """See the base class: this rank may lack a gradient that another one has."""
        if self._overlap is not None and self._overlap.is_open:
            self._overlap.finish()
        elif self.world.size > 1 and not self._in_lockstep:
            self._fill()

    def _fill(self) -> None:
        """Have zeros for what another rank may have a gradient of."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))

    def reduce(self, used: Sequence[bool]) -> None:
        """See the base class."""
        if self.world.size == 1:
            return
        if self._in_lockstep:
            for parameter, gradient in zip(self.parameters, self._reduced, strict=True):
                parameter.grad = gradient
            self._reduced = []
        elif not self._sync.overlaps:
            self._fill()
            to_sum = list[nn.Parameter]()
            for parameter, is_used in zip(self.parameters, used, strict=True):
                if is_used:
                    to_sum.append(parameter)
            self._sum(to_sum)
        drop_unused(self.parameters, used)

    def _sum(self, parameters: Sequence[nn.Parameter]) -> None:
        """All-reduce gradients bucket by bucket, while the one before is on its way."""
        flying: deque[Callable[[], None]] = deque()
        for index, bucket in enumerate(buckets(parameters, self.bucket_bytes)):
            if len(flying) == IN_FLIGHT:
                flying.popleft()()
            flying.append(self._send(bucket, index % IN_FLIGHT))
        for land in flying:
            land()

    def _send(self, bucket: Sequence[nn.Parameter], slot: int) -> Callable[[], None]:
        """Begin to sum the gradients of a bucket; what is returned waits and puts them back."""
        grads = [p.grad for p in bucket if p.grad is not None]
        if len(grads) == 1 and grads[0].is_contiguous():
            return self.world.begin_sum(grads[0])
        flat = self._stage(bucket, slot)
        pieces = torch.split(flat, [*map(torch.numel, grads)])
        views = [piece.view(g.shape) for piece, g in zip(pieces, grads, strict=True)]
        torch._foreach_copy_(views, grads)
        wait = self.world.begin_sum(flat)

        def land() -> None:
            wait()
            torch._foreach_copy_(grads, views)

        return land

    def _stage(self, bucket: Sequence[nn.Parameter], slot: int) -> Tensor:
        """Give memory for the gradients of a bucket; buckets of a dtype share that of a slot."""
        size, dtype = sum(map(torch.numel, bucket)), gradient_dtype(bucket[0])
        memory = self.staging.get((dtype, slot))
        if memory is None or memory.numel() < size:
            memory = torch.empty(size, dtype=dtype, device=self.world.device)
            self.staging[dtype, slot] = memory
        return memory[:size]

    def gradients(self) -> list[Tensor]:
        """See the base class."""
        found = super().gradients()
        for gradient in self._reduced:
            if gradient is not None:
                found.append(gradient)
        return found

    def drop_gradients(self) -> None:
        """See the base class."""
        if self._overlap is not None and self._overlap.is_open:
            self._overlap.finish()  # which the other ranks wait for
        self._reduced = []
        super().drop_gradients()

    @contextmanager
    def _computing(self, reduction: Reduction, *, is_last: bool) -> Iterator[None]:
        # A copy is whole, so that within it nothing is to be sent.
        if self._overlap is not None:
            self._overlap.is_last = is_last
        yield
        if reduction != "across":
            return
        # Which parameters took part is asked now: `_fill` gives all of them a gradient.
        self._live |= {i for i, p in enumerate(self.parameters) if p.grad is not None}
        self._fill()
        phase_before = self.world.times.enter("reduce")
        self._sum(self.parameters)
        self.world.times.enter(phase_before)
        before = self._reduced or [None] * len(self.parameters)
        for parameter, total in zip(self.parameters, before, strict=True):
            if total is not None and parameter.grad is not None:
                parameter.grad += total
        self._reduced = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Compute the 2-norm of each tensor, in fp32 at least."""
    norms, by_dtype = list[Tensor](), dict[torch.dtype, list[Tensor]]()
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    # The fast kernels take tensors of one dtype at a time.
    for dtype, same in by_dtype.items():
        norms += torch._foreach_norm(same, 2.0, dtype=torch.promote_types(dtype, torch.float32))
    return norms


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Compute the square of the 2-norm of tensors on a device, whole or local, in fp64, 0-d."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cpu":
        return norm_in_double(tensors).square()
    return torch.stack(_norms(tensors)).double().square().sum()


def norm_in_double(grads: Sequence[Tensor]) -> Tensor:
    """Compute a 2-norm in fp64, 0-d: off by 4e-13 at 40M elements, at twice the time of fp32.

    Piece by piece, since a copy of the whole in fp64 takes 15 times as long.
    """
    pieces = list[Tensor]()
    for grad in grads:
        pieces += torch.split(as_real(grad).reshape(-1), NORM_PIECE)
    norms = torch._foreach_norm(pieces, 2.0, dtype=torch.float64)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def drop_unused(parameters: Sequence[nn.Parameter], used: Sequence[bool]) -> None:
    """Drop the zeros that were reduced for parameters that no rank used."""
    for parameter, flag in zip(parameters, used, strict=True):
        if not flag:
            parameter.grad = None


def buckets(
    parameters: Sequence[nn.Parameter], most: int = BUCKET_BYTES["cpu"]
) -> Iterator[list[nn.Parameter]]:
    """Group parameters whose gradients are reduced together, the same on every rank.

    Those of one dtype, with gradients of one, in order, of up to `most` bytes; a larger one alone.
    """
    for dtypes in dict.fromkeys((p.dtype, gradient_dtype(p)) for p in parameters):
        bucket: list[nn.Parameter] = []
        room = most
        for parameter in parameters:
            if (parameter.dtype, gradient_dtype(parameter)) != dtypes:
                continue
            if bucket and parameter.nbytes > room:
                yield bucket
                bucket, room = [], most
            bucket.append(parameter)
            room -= parameter.nbytes
        yield bucket
