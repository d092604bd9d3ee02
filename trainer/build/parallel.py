"""Resolve how a run uses its ranks: the parallel mode, the copies, the sync policy, the cut."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self, final

import torch
from torch import Tensor, nn

from trainer.config.run_config import RunConfig
from trainer.config.sizes import num_replicas
from trainer.core.errors import ConfigError
from trainer.core.format import duration, size
from trainer.core.world import World
from trainer.models.recompute import separable_blocks
from trainer.objectives.base import ModelCall
from trainer.parallel.base import Parallel, Replicated, num_buckets
from trainer.parallel.deterministic import Ordered
from trainer.parallel.sync import POLICIES, Deferred, Exact, SyncPolicy
from trainer.plan import traffic
from trainer.plan.cut import Cut
from trainer.plan.cuts import Fixed, LayoutInvariant
from trainer.plan.traffic import Bulk, Network, Traffic, Work
from trainer.tune.memory_limit import memory_limit


@final
@dataclass(frozen=True, kw_only=True)
class ParallelSetup:
    """How a run uses its ranks.

    Attributes:
        mode: where parameters and gradients live: `none`, `ddp`, `fsdp` or `hsdp`.
        replicas: copies of the model.
        sync: when gradients are reduced.
        is_ordered: sums do not depend on the order of micro-batches and ranks.
        bulk: what sync policies move; None where there is no choice of them.
        is_open: `sync=auto`: the table says which policy it is.
        rows: of the table of policies.
        network: between the ranks; None until it is measured.
        why: a line that says what `sync=auto` weighed; None where it was not asked.
        why_mode: a line that says what `parallel=auto` weighed; likewise.
        retry_with: the setting of a policy that fits and can replay a step, where this one cannot.
    """

    mode: str
    replicas: int
    sync: SyncPolicy
    is_ordered: bool = False
    bulk: Bulk | None = None
    is_open: bool = False
    rows: tuple[Traffic, ...] = ()
    network: Network | None = None
    why: str | None = None
    why_mode: str | None = None
    retry_with: str | None = None

    def weighed(self, work: Work, network: Network | None = None) -> Self:
        """Work the table of policies out, and under `sync=auto` take its best row.

        Args:
            work: what a rank computes in a step.
            network: between the ranks, the same numbers on every rank.
        """
        if self.bulk is None:
            return self
        known = {policy.name: policy for policy in (*POLICIES, self.sync)}
        moves = {name: policy.moves(work.micro_batches) for name, policy in known.items()}
        rows = tuple(
            traffic.row(name, each, self.bulk, work, network, lockstep=known[name].lockstep)
            for name, each in moves.items()
            if each is not None and (self.mode == "hsdp" or not each.needs_copies)
        )
        found = replace(self, rows=rows, network=network)
        if not self.is_open:
            return found
        best = traffic.cheapest(rows, {name: policy.lockstep for name, policy in known.items()})
        why = _why(best, rows, known[best.policy].summary, self.bulk.limit_bytes)
        return replace(found, sync=known[best.policy], why=why)

    def lay_out(
        self,
        module: nn.Module,
        call: ModelCall,
        world: World,
        draw: Callable[[str], Tensor] | None = None,
    ) -> Parallel:
        """Lay a model out over the ranks; its parameters may be replaced.

        Args:
            module: the same on every rank; whole, or to be sharded with its parameters on the
                meta device.
            call: runs it.
            world: all ranks.
            draw: gives a weight by its name, whole, where parameters are on the meta device; None
                leaves them to be loaded.
        """
        parameters = [p for p in module.parameters() if p.requires_grad]
        if self.is_ordered:
            return Ordered(module, call, parameters, world)
        if self.mode in ("none", "ddp") or world.long_timeout_group is None:
            # No group: this process works out what several ranks would do.
            return Replicated(module, call, parameters, world)
        from trainer.parallel.fsdp import Sharded  # noqa: PLC0415 - half a second

        blocks = separable_blocks(module)
        return Sharded(module, call, blocks, world, replicas=self.replicas, draw=draw)

    @contextmanager
    def fake_ranks(
        self, world_size: int, call_of: Callable[[nn.Module], ModelCall]
    ) -> Iterator[Callable[[nn.Module], Parallel]]:
        """Lend a way to lay models out in shards over ranks that are not there.

        Args:
            world_size: ranks to pretend.
            call_of: binds a call to a model.

        Yields:
            Lays a model out in place, as the first of the ranks.
        """
        from trainer.parallel.fake_mesh import fake_mesh  # noqa: PLC0415 - half a second
        from trainer.parallel.fsdp import Sharded  # noqa: PLC0415 - likewise

        world = World(size=world_size, local_size=world_size)
        with fake_mesh(world_size, self.replicas) as mesh:
            yield lambda model: Sharded(
                model,
                call_of(model),
                separable_blocks(model),
                world,
                replicas=self.replicas,
                mesh=mesh,
            )


def parallel_setup(
    config: RunConfig, world: World, module: nn.Module, policy: SyncPolicy
) -> ParallelSetup:
    """Resolve `parallel`, `sync` and `deterministic=layout`. Collective.

    Args:
        config: the run's.
        world: all ranks.
        module: the model, whole.
        policy: what `sync` names; not looked at under `auto`.

    Raises:
        ConfigError: they do not fit together, or not the number of ranks.
    """
    mode = parallel_mode(config, world)
    asked, replicas = config.parallel, world.size if mode == "ddp" else 1
    if mode == "hsdp":
        replicas = num_replicas(world.size, world.local_size, asked.shard, asked.replicate)
    if config.deterministic == "layout":
        if mode not in ("none", "ddp"):
            raise ConfigError(
                f"deterministic=layout: sums whole gradients; use parallel=ddp, not {mode}"
            )
        return ParallelSetup(mode=mode, replicas=replicas, sync=Exact(), is_ordered=True)
    if mode == "none":
        sync = Deferred() if policy in POLICIES else policy  # one rank has nothing to reduce
        return ParallelSetup(mode=mode, replicas=1, sync=sync)
    moves = policy.moves(1)
    if moves is not None and moves.needs_copies and mode != "hsdp":
        raise ConfigError(f"sync={policy.name}: {mode} has one level; use parallel=hsdp")
    parameters = [p for p in module.parameters() if p.requires_grad]
    bulk = Bulk(
        mode=mode,
        model_bytes=sum(p.nbytes for p in parameters),
        shard=world.size // replicas,
        replicas=replicas,
        limit_bytes=world.on_main(lambda: _limit_bytes(config, world)),
        groups=num_buckets(parameters) if mode == "ddp" else len(separable_blocks(module)) + 1,
    )
    is_open = config.sync.name == "auto"
    found = ParallelSetup(mode=mode, replicas=replicas, sync=policy, bulk=bulk, is_open=is_open)
    return found.weighed(Work(micro_batches=1))


def planned_device(config: RunConfig, world: World) -> torch.device:
    """Tell where the plan is to run: `train plan` may ask for a GPU that is not here."""
    typed = config.device != "auto"
    return torch.device(config.device) if typed and config.command == "plan" else world.device


def is_sharded(config: RunConfig, world: World) -> bool:
    """Whether no rank holds the model whole: it is laid out, or planned, in shards.

    `train verify` computes in one process what the ranks would, and needs all of the model there.
    """
    sharded = parallel_mode(config, world) in {"fsdp", "hsdp"}
    return sharded and config.command in {"train", "plan"}


def is_undecided(config: RunConfig, world: World) -> bool:
    """Whether memory is yet to say which mode `parallel=auto` is.

    Other commands than these compute in one process; ordered sums are those of whole gradients.
    """
    is_open = config.parallel.mode == "auto" and config.deterministic != "layout"
    return is_open and world.size > 1 and config.command in {"train", "plan"}


def with_mode(config: RunConfig, mode: str) -> RunConfig:
    """Give a config whose parallel mode is decided."""
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"mode": mode})})


def parallel_mode(config: RunConfig, world: World) -> str:
    """Resolve `parallel`; on one rank there is nothing to lay out.

    Raises:
        ConfigError: the mode knows one rank only.
    """
    if config.parallel.mode == "none" and world.size > 1:
        raise ConfigError(
            f"parallel=none: is one rank, and there are {world.size}; use parallel=ddp"
        )
    if world.size == 1:
        return "none"
    return "ddp" if config.parallel.mode == "auto" else config.parallel.mode


def layout_invariant_cut(cut: Cut, config: RunConfig) -> Cut:
    """Take the cut whose micro-batches stay the same for every number of ranks, where asked for.

    Raises:
        ConfigError: the micro-batches are not fixed.
    """
    if config.deterministic != "layout":
        return cut
    if not isinstance(cut, Fixed) or cut.micro is None:
        raise ConfigError(
            "deterministic=layout: needs micro-batches that stay the same for every layout; "
            "say accum=fixed accum.micro=8"
        )
    return LayoutInvariant(micro=cut.micro)


def _limit_bytes(config: RunConfig, world: World) -> int:
    """Find the memory of one rank; that of a machine which is not here is what was typed.

    A run weighs what was typed as its plan does, but cannot have more than there is.
    """
    device, asked = planned_device(config, world), config.accum.params.get("memory")
    typed = sys.maxsize if asked is None else memory_limit(device, asked=asked).bytes
    is_here = device.type == world.device.type
    if not is_here or (asked is not None and config.command == "plan"):
        return typed
    return min(typed, memory_limit(device, local_ranks=world.local_size).bytes)


def _why(best: Traffic, rows: Sequence[Traffic], summary: str, limit_bytes: int) -> str:
    """Say in one line which policy `sync=auto` takes, and what speaks for it."""
    others = [row for row in rows if row is not best]
    parts = [f"sync=auto takes {best.policy}: {summary}, {_costs(best)}"]
    parts += [f"{row.policy} would be {_costs(row)}" for row in others if row.fits]
    room = f"{traffic.MOST_OF_MEMORY:.0%} of {size(limit_bytes)}, for activations need the rest"
    parts += [
        f"{row.policy} would hold {size(row.unsharded_bytes)}, and may hold {room}"
        for row in others
        if not row.fits
    ]
    return "; ".join(parts)


def _costs(row: Traffic) -> str:
    """Say what a policy sends, and how long that takes."""
    sent = f"{size(row.sent)} sent per step"
    if row.seconds is None or row.exposed is None:
        return sent
    hidden = "" if row.exposed == row.seconds else f", {duration(row.exposed)} of it not hidden"
    return f"{sent} in about {duration(row.seconds)}{hidden}"
