"""Decide how ranks are used: where parameters live, and which sync policy reduces gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Self, final

import torch
from torch import nn

from trainer.core import gpu
from trainer.core.format import size
from trainer.core.rows import Described, Row, RunFacts, row
from trainer.core.tensors import gradient_dtype
from trainer.core.world import World
from trainer.models.first_weights import FirstWeights
from trainer.models.frozen import frozen_of
from trainer.models.norms import has_running_norm
from trainer.models.recompute import separable_blocks
from trainer.objectives.base import ModelCall
from trainer.parallel.base import BUCKET_BYTES, Parallel, Replicated, trained_parameters
from trainer.parallel.deterministic import Ordered
from trainer.parallel.sync import (
    Deferred,
    Hierarchical,
    Immediate,
    Overlapped,
    SyncPolicy,
    reduction_of,
)
from trainer.plan import traffic
from trainer.plan.traffic import Collectives, ModelBytes, Traffic

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SHARDED = {"fsdp", "hsdp"}
# What `sync=auto` chooses from, the one that sends least first
POLICIES: tuple[SyncPolicy, ...] = (Deferred(), Overlapped(), Hierarchical(), Immediate())


@final
@dataclass(frozen=True, kw_only=True)
class ParallelSetup(Described):
    """How a run uses its ranks."""

    mode: str  # where parameters and gradients live: `none`, `ddp`, `fsdp` or `hsdp`
    replicas: int  # copies of the model
    sync: SyncPolicy
    mesh: DeviceMesh | None = None  # of real ranks; None where no rank holds shards
    dtype: torch.dtype | None = None  # that shards are gathered in; None as they are
    sizes: ModelBytes | None = None  # what sync policies move; None without a choice of them
    is_ordered: bool = False  # `deterministic=layout`: sums in the same bits for every layout
    is_open: bool = False  # `sync=auto`
    is_begun: bool = False  # the policy that `sync=auto` is, is the one that the run began with
    rows: tuple[Traffic, ...] = ()  # of the table of policies; none before there is a plan
    why: str | None = None  # a line that says what `sync=auto` is; None where it was not asked
    why_mode: str | None = None  # a line that says what `parallel=auto` weighed; likewise

    def describe(self, facts: RunFacts) -> Sequence[Row]:
        """See the base class."""
        sync = self.why or f"{self.sync.name}, parallel {self.mode}"
        if facts.world_size == 1:
            sync = "one rank, which sends nothing"
        table = [*map(asdict, self.rows)]
        return [
            row("parallel", self.why_mode, parallel=self.mode),
            row("sync", sync, sync=self.sync.name, sync_table=table),
            row(parallel_why=self.why_mode, sync_why=self.why),
        ]

    def counted(self, micro_batches: float) -> Self:
        """Work out what each policy sends in a step of so many micro-batches of a rank."""
        if self.sizes is None:
            return self
        policies = {policy.name: policy for policy in (*POLICIES, self.sync)}
        rows = list[Traffic]()
        for policy in policies.values():
            if sync_fault(policy, self.mode) is None:
                rows.append(self._row(policy, micro_batches))
        if not self.is_open:
            return replace(self, rows=tuple(rows))
        words = list[str]()
        for each in sorted(rows, key=lambda row: row.policy != self.sync.name):
            words.append(f"{each.policy} sends {size(each.sent)} per step")
            if not each.fits:
                words[-1] += f", and its {size(each.unsharded_bytes)} of gradients do not fit"
        why = f"sync=auto takes {self.sync.name}{' as before' * self.is_begun}: {'; '.join(words)}"
        return replace(self, rows=tuple(rows), why=why)

    def _row(self, policy: SyncPolicy, micro_batches: float = 1) -> Traffic:
        """Count what a policy sends; in lockstep blocks are gathered for forward and backward."""
        assert self.sizes is not None
        found, count = Collectives(gathers=1, reductions=1, across=1), max(1, round(micro_batches))
        if policy.lockstep:
            answers = [reduction_of(policy, i, is_last=i == count - 1) for i in range(count)]
            reductions = count - answers.count("none")
            across = answers.count("across")
            found = Collectives(gathers=2 * count, reductions=reductions, across=across)
        return traffic.traffic_of(policy.name, found, self.sizes, lockstep=policy.lockstep)

    @property
    def deferred_fits(self) -> bool:
        """Whether whole parameters and gradients leave room for activations."""
        return self.sizes is None or self._row(Deferred()).fits

    def chosen(self, begun: str | None, *, overlaps: bool) -> Self:
        """Choose what `sync=auto` is.

        One reduction a step sends least, and a step can be repeated; so it is taken wherever it
        fits, sent during the last backward where that `overlaps`. Else shards stay shards. What the
        run took before, on as many ranks (`begun`), stays while it fits. `overlaps` is whether
        collectives travel while the device computes the last backward.
        """
        known = {policy.name: policy for policy in POLICIES}
        best: SyncPolicy = Deferred()
        if self.mode == "ddp" and overlaps:
            best = Overlapped()
        elif self.mode == "hsdp" and not self.deferred_fits:
            best = Hierarchical()
        elif self.mode != "ddp" and not self.deferred_fits:
            best = Immediate()
        if begun in known and (known[begun].lockstep or not best.lockstep):
            return replace(self, sync=known[begun], is_begun=True)
        return replace(self, sync=best)

    def lay_out(
        self,
        module: nn.Module,
        call: ModelCall,
        world: World,
        weights: FirstWeights | None = None,
        mesh: DeviceMesh | None = None,
    ) -> Parallel:
        """Lay a model out over the ranks; its parameters may be replaced.

        A `mesh` of None is that of the run; `weights` of None leave open what parameters on the
        meta device begin with.
        """
        mesh = mesh or self.mesh
        parameters = trained_parameters(module)
        if self.is_ordered:
            return Ordered(module, call, parameters, world)
        # Also where this process works out what several ranks would do
        if mesh is None:
            bucket_bytes = BUCKET_BYTES[gpu.kind_of(world.device)]
            return Replicated(module, call, parameters, world, bucket_bytes)
        from trainer.parallel.fsdp import Sharded  # noqa: PLC0415 - half a second

        blocks = separable_blocks(module)
        if (frozen := frozen_of(module)) is not None:
            # A unit of its own, which is called from outside of the model's forward.
            blocks = (*blocks, *separable_blocks(frozen), frozen)
        return Sharded(module, call, blocks, world, mesh, dtype=self.dtype, weights=weights)

    @contextmanager
    def fake_ranks(
        self, world_size: int, call_of: Callable[[nn.Module], ModelCall], device: torch.device
    ) -> Iterator[Callable[[nn.Module], Parallel]]:
        """Pretend ranks that are not there; yields what lays a model out in place, as the first."""
        world = World(size=world_size, local_size=world_size, device=device)
        if self.mode not in SHARDED:
            yield lambda model: self.lay_out(model, call_of(model), world)
            return
        from trainer.parallel.fsdp import fake_mesh  # noqa: PLC0415 - half a second

        with fake_mesh(world_size, self.replicas, device.type) as mesh:
            yield lambda model: self.lay_out(model, call_of(model), world, mesh=mesh)


def gradient_bytes(parameter: nn.Parameter) -> int:
    """Count what the gradient of a parameter takes."""
    return parameter.numel() * gradient_dtype(parameter).itemsize


def training_bytes(parameter: nn.Parameter) -> int:
    """Count what training adds to a weight: its gradient, two moments, perhaps a master copy."""
    has_copy = gradient_dtype(parameter) != parameter.dtype
    return parameter.requires_grad * gradient_bytes(parameter) * (3 + has_copy)


def sync_fault(policy: SyncPolicy, mode: str) -> str | None:
    """Say why a mode has nothing for a policy to do, and what to type; None where it has."""
    if policy.needs_copies and mode != "hsdp":
        return f"needs shards and replicas, which {mode} does not have; use parallel=hsdp"
    if policy.overlaps and mode != "ddp":
        return "needs whole copies; use parallel=ddp"
    return None


def may_cast(module: nn.Module, device: torch.device) -> bool:
    """Whether parameters in fp32 may be gathered in half of it, without their inputs and buffers.

    Norms with running statistics take no mixed dtypes; others neither, on a CPU, where autocast
    leaves them alone.
    """
    is_fp32 = {p.dtype for p in module.parameters()} == {torch.float32}
    return gpu.is_gpu(device) and is_fp32 and not has_running_norm(module)
