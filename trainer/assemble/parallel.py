"""Resolve how a run uses its ranks: the parallel mode, the copies, the sync policy, the memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self, final

import torch
from torch import nn

from trainer.assemble.instantiate import construct
from trainer.config.cards import card_of
from trainer.config.rules import num_replicas
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.format import size
from trainer.core.norms import has_running_norm
from trainer.core.rows import Described, Row, RunFacts, row
from trainer.core.world import World
from trainer.models.first_weights import FirstWeights
from trainer.models.recompute import blocks_of, separable_blocks
from trainer.objectives.base import ModelCall
from trainer.parallel.base import BUCKET_BYTES, Parallel, Replicated
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
from trainer.tune.memory_limit import MEBI, MemoryLimit, memory_limit

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

    @property
    def reasons(self) -> tuple[str | None, str | None]:
        """What `parallel=auto` and `sync=auto` weighed."""
        return self.why_mode, self.why

    def describe(self, facts: RunFacts) -> Sequence[Row]:
        """See the base class."""
        sync = self.why or f"{self.sync.name}, parallel {self.mode}"
        if facts.world_size == 1:
            sync = "one rank, which sends nothing"
        table = [asdict(each) for each in self.rows]
        return [
            row("parallel", self.why_mode, in_plan=True, parallel=self.mode),
            row("sync", sync, in_plan=True, sync=self.sync.name, sync_table=table),
            row(parallel_why=self.why_mode, sync_why=self.why),
        ]

    def counted(self, micro_batches: float) -> Self:
        """Work out what each policy sends in a step of so many micro-batches of a rank."""
        if self.sizes is None:
            return self
        policies = {policy.name: policy for policy in (*POLICIES, self.sync)}
        rows = tuple(
            self._row(policy, micro_batches)
            for policy in policies.values()
            if _fault(policy, self.mode) is None
        )
        if not self.is_open:
            return replace(self, rows=rows)
        words = [
            f"{row.policy} sends {size(row.sent)} per step"
            + ("" if row.fits else f", and its {size(row.unsharded_bytes)} of gradients do not fit")
            for row in sorted(rows, key=lambda row: row.policy != self.sync.name)
        ]
        why = f"sync=auto takes {self.sync.name}{' as before' * self.is_begun}: {'; '.join(words)}"
        return replace(self, rows=rows, why=why)

    def _row(self, policy: SyncPolicy, micro_batches: float = 1) -> Traffic:
        """Count what a policy sends; in lockstep blocks are gathered for forward and backward."""
        assert self.sizes is not None
        found, count = Collectives(gathers=1, reductions=1, across=1), max(1, round(micro_batches))
        if policy.lockstep:
            answers = [reduction_of(policy, i, is_last=i == count - 1) for i in range(count)]
            reductions = count - answers.count("none")
            across = answers.count("across")
            found = Collectives(gathers=2 * count, reductions=reductions, across=across)
        return traffic.row(policy.name, found, self.sizes, lockstep=policy.lockstep)

    @property
    def deferred_fits(self) -> bool:
        """Whether whole parameters and gradients leave room for activations."""
        return self.sizes is None or self._row(Deferred()).fits

    def chosen(self, begun: str | None, *, overlaps: bool) -> Self:
        """Choose what `sync=auto` is.

        One reduction a step sends least, and a step can be repeated; so it is taken wherever it
        fits, sent during the last backward where that `overlaps`. Else shards stay shards.

        Args:
            begun: what the run took before, in this mode on as many ranks; it stays while it fits.
            overlaps: whether collectives travel while the device computes the last backward.
        """
        known = {policy.name: policy for policy in POLICIES}
        best: SyncPolicy = Overlapped() if overlaps and self.mode == "ddp" else Deferred()
        if self.mode != "ddp" and not self.deferred_fits:
            best = Hierarchical() if self.mode == "hsdp" else Immediate()
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

        Args:
            module: the model on the rank's device, or on the meta device.
            call: the same, bound to the run's precision.
            world: the ranks.
            weights: what parameters on the meta device begin with; None leaves that open.
            mesh: of the ranks; None is that of the run.
        """
        mesh = mesh or self.mesh
        parameters = [p for p in module.parameters() if p.requires_grad]
        if self.is_ordered:
            return Ordered(module, call, parameters, world)
        if mesh is None:  # also where this process works out what several ranks would do
            return Replicated(module, call, parameters, world, BUCKET_BYTES[world.device.type])
        from trainer.parallel.fsdp import Sharded  # noqa: PLC0415 - half a second

        blocks = separable_blocks(module)
        return Sharded(module, call, blocks, world, mesh, dtype=self.dtype, weights=weights)

    @contextmanager
    def fake_ranks(
        self, world_size: int, call_of: Callable[[nn.Module], ModelCall], device: torch.device
    ) -> Iterator[Callable[[nn.Module], Parallel]]:
        """Pretend ranks that are not there, on a device that is.

        Yields:
            Lays a model out, in place, as the first of the ranks.
        """
        world = World(size=world_size, local_size=world_size, device=device)
        if self.mode not in SHARDED:
            yield lambda model: self.lay_out(model, call_of(model), world)
            return
        from trainer.parallel.fsdp import fake_mesh  # noqa: PLC0415 - half a second

        with fake_mesh(world_size, self.replicas, device.type) as mesh:
            yield lambda model: self.lay_out(model, call_of(model), world, mesh=mesh)


def _refuse_unordered(policy: SyncPolicy) -> None:
    """Refuse a policy that is not one reduction a step, which `deterministic=layout` orders."""
    if policy.lockstep or policy.overlaps:
        text = "reduces within micro-batches, and deterministic=layout once, in a fixed order"
        raise ConfigError(f"sync={policy.name}: {text}: type sync=auto")


def parallel_setup(
    config: RunConfig,
    world: World,
    module: nn.Module,
    mode: str,
    dtype: torch.dtype | None,
    *,
    single_backward: bool = False,
    begun: Sequence[Any] | None = None,
) -> ParallelSetup:
    """Resolve `sync`, the copies, and `deterministic=layout` under a resolved mode. Collective.

    `dtype` is what the run's matrix products compute in, where it is not what weights are in;
    `single_backward` whether a micro-batch has one alone; `begun` mode, ranks and policy that
    `sync=auto` was where the run goes on.

    Raises:
        ConfigError: they do not fit together, or not the number of ranks.
    """
    policy = construct(config.sync, "sync", SyncPolicy, config.trust)
    reduction_of(policy, 0, is_last=False)  # refuses an answer that no micro-batch may have
    replicas, asked = world.size if mode == "ddp" else 1, config.parallel
    if mode == "hsdp":
        replicas = num_replicas(world.size, world.local_size, asked.shard, asked.replicate)
    if config.deterministic == "layout":  # which a config of shards may not ask for
        _refuse_unordered(policy)
        return ParallelSetup(mode=mode, replicas=replicas, sync=Deferred(), is_ordered=True)
    if mode == "none":
        # One rank has nothing to reduce.
        return ParallelSetup(mode=mode, replicas=1, sync=Deferred())
    if (fault := _fault(policy, mode)) is not None:
        raise ConfigError(f"sync={policy.name}: {fault}")
    mesh = None
    if mode in SHARDED and world.long_timeout_group is not None:
        from trainer.parallel.fsdp import make_mesh  # noqa: PLC0415 - half a second

        mesh = make_mesh(world, replicas)
    limit, _ = rank_memory(config, world)
    parameters = [p for p in module.parameters() if p.requires_grad]
    if mode not in SHARDED or not _may_cast(module, planned_device(config, world)):
        dtype = None
    itemsize = None if dtype is None else dtype.itemsize
    sizes = ModelBytes(
        mode=mode,
        model_bytes=sum(p.nbytes for p in parameters),
        gathered_bytes=itemsize and itemsize * sum(p.numel() for p in parameters),
        shard=world.size // replicas,
        replicas=replicas,
        limit_bytes=world.on_main(lambda: sys.maxsize if limit is None else limit.bytes),
        scatters_whole=world.device.type == "cpu",
    )
    is_open = config.sync.name == "auto"
    found = ParallelSetup(mode=mode, replicas=replicas, sync=policy, sizes=sizes, is_open=is_open)
    found = replace(found, mesh=mesh, dtype=dtype)
    if not is_open:
        return found
    *layout, name = begun or (None,)
    # Buckets in another order round otherwise; of a model compiled as a whole, all gradients come
    # at the end.
    in_parts = not config.compile or bool(blocks_of(module))
    overlaps = single_backward and in_parts and not config.deterministic
    return found.chosen(
        name if layout == [mode, world.size] else None,
        overlaps=overlaps and planned_device(config, world).type == "cuda",
    )


def _fault(policy: SyncPolicy, mode: str) -> str | None:
    """Say why a mode has nothing for a policy to do, and what to type; None where it has."""
    if policy.needs_copies and mode != "hsdp":
        return f"needs shards and replicas, which {mode} does not have; use parallel=hsdp"
    if policy.overlaps and mode != "ddp":
        return "needs whole copies; use parallel=ddp"
    return None


def _may_cast(module: nn.Module, device: torch.device) -> bool:
    """Whether parameters in fp32 may be gathered in half of it, without their inputs and buffers.

    Norms with running statistics take no mixed dtypes; others neither, on a CPU, where autocast
    leaves them alone.
    """
    is_fp32 = {p.dtype for p in module.parameters()} == {torch.float32}
    return device.type == "cuda" and is_fp32 and not has_running_norm(module)


def parallel_mode(config: RunConfig, world: World) -> str:
    """Resolve `parallel` as far as nothing is weighed; `auto` is for `auto_mode` to resolve.

    Other commands than `train` and `plan` compute in one process; ordered sums are of whole
    gradients; and on one rank there is nothing to lay out.

    Raises:
        ConfigError: the mode knows one rank only.
    """
    mode = config.parallel.mode
    if mode == "none" and world.size > 1:
        text = f"is one rank, and there are {world.size}; use parallel=ddp"
        raise ConfigError(f"parallel=none: {text}")
    if world.size == 1:
        return "none"
    is_open = config.deterministic != "layout" and config.command in {"train", "plan"}
    return "ddp" if mode == "auto" and not is_open else mode


def auto_mode(config: RunConfig, world: World, module: nn.Module) -> tuple[str, str]:
    """Choose what `parallel=auto` is, and say why: whole copies of the model, or shards of it.

    Whole copies need one reduction a step and nothing gathered, so they are taken wherever they
    leave room for activations; then shards within one machine, whose network is the faster; then
    shards over all ranks. The optimizer is taken for one that keeps two moments.
    """
    limit, _ = rank_memory(config, world)
    if limit is None:
        return "ddp", (
            "parallel=auto chose ddp without checking memory: set accum.memory=80GiB to check it"
        )
    shares = {"ddp": 1}
    if all(parameter.dim() for parameter in module.parameters()):  # FSDP2 shards no scalars
        shares |= {"hsdp": world.local_size} if 1 < world.local_size < world.size else {}
        shares["fsdp"] = world.size
    state = sum(p.nbytes * (4 if p.requires_grad else 1) for p in module.parameters())
    room = limit.bytes * traffic.MOST_OF_MEMORY
    mode = next((m for m, ranks in shares.items() if state / ranks <= room), [*shares][-1])
    each = [f"{name} {size(state // ranks)}" for name, ranks in shares.items()]
    return mode, (
        f"parallel=auto chose {mode}: memory limit {size(limit.bytes)} ({limit.source}), half of "
        "it reserved for activations; weights, gradients and optimizer state need "
        f"{', '.join(each)}"
    )


def planned_device(config: RunConfig, world: World) -> torch.device:
    """Give where the plan is to run: `train plan` may ask for a GPU that is not here."""
    if config.command != "plan" or config.device == "auto":
        return world.device
    return torch.device("cpu" if config.device == "cpu" else "cuda")


def rank_memory(
    config: RunConfig, world: World, resident_bytes: int = 0
) -> tuple[MemoryLimit | None, bool]:
    """Find the memory of one rank, if anyone knows it, and whether it is that of this machine.

    `train plan` takes `accum.memory` at its word, for a machine that is not here too; else a card
    that `device` names has what its driver reports. A run cannot have more than there is.
    `resident_bytes` are the model's tensors, which are there already.
    """
    device, asked = planned_device(config, world), config.accum.params.get("memory")
    typed = None if asked is None else memory_limit(device, asked=asked)
    if typed is None and (card := card_of(config.device)) is not None:
        typed = memory_limit(
            device, asked=card.memory_mib * MEBI, source=f"memory of {config.device}"
        )
    if device.type != world.device.type:
        return typed, False
    there = memory_limit(device, resident_bytes=resident_bytes, local_ranks=world.local_size)
    if typed is None or (typed.bytes > there.bytes and config.command != "plan"):
        return there, True
    return typed, typed.bytes <= there.bytes
