"""How a run is spread over its ranks: the parallel mode, the copies, the sync policy, the cut."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, cast, final

import torch
from torch import Tensor, nn

from trainer.config.mesh import copies_of
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.format import duration, size
from trainer.core.world import World
from trainer.models.recompute import separable_blocks
from trainer.objectives.base import ModelCall
from trainer.parallel.base import Parallel, Replicated, num_buckets
from trainer.parallel.deterministic import Ordered
from trainer.parallel.sync import Deferred, Exact, Hierarchical, Immediate, SyncPolicy
from trainer.plan import traffic
from trainer.plan.cut import Cut
from trainer.plan.cuts import Fixed
from trainer.plan.layout_invariant import Leaves
from trainer.plan.traffic import Network, Traffic, Work
from trainer.tune.memory_limit import memory_limit

if TYPE_CHECKING:
    from trainer.plan.traffic import Mode

Draw = Callable[[str], Tensor]
"""Gives a parameter's first value by its name, whole."""

POLICIES: Mapping[str, SyncPolicy] = {
    "deferred": Deferred(),
    "immediate": Immediate(),
    "hierarchical": Hierarchical(),
}

IN_WORDS = {
    "deferred": "one reduction a step",
    "immediate": "a reduction in every micro-batch",
    "hierarchical": "a reduction within each copy in every micro-batch, between copies once a step",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bulk:
    """What sync policies move and hold, whatever they are.

    Attributes:
        model_bytes: of the parameters that are trained.
        groups: parts of the model that are gathered and reduced each on its own.
        limit_bytes: memory of one rank.
    """

    model_bytes: int
    groups: int
    limit_bytes: int


@final
@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a run is spread over its ranks.

    Attributes:
        mode: where parameters and gradients live: `none`, `ddp`, `fsdp` or `hsdp`.
        replicas: copies of the model.
        sync: when gradients are reduced.
        is_ordered: sums do not depend on the order of micro-batches and ranks.
        bulk: what its policies move and hold; None where there is no choice of them.
        is_open: `sync=auto`: the table says which policy it is.
        rows: of the table of policies.
        network: between the ranks; None until it is measured.
        why: a line that says what `sync=auto` weighed; None where it was not asked.
        why_mode: a line that says what `parallel=auto` weighed; likewise.
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

    def weighed(self, world_size: int, work: Work, network: Network | None = None) -> Self:
        """Work the table of policies out, and under `sync=auto` take its best row.

        Args:
            world_size: ranks.
            work: what a rank computes in a step.
            network: between the ranks, the same numbers on every rank.
        """
        if self.bulk is None:
            return self
        rows = traffic.table(
            cast("Mode", self.mode),
            model_bytes=self.bulk.model_bytes,
            shard=world_size // self.replicas,
            replicas=self.replicas,
            limit_bytes=self.bulk.limit_bytes,
            work=replace(work, groups=self.bulk.groups),
            network=network,
        )
        found = replace(self, rows=rows, network=network)
        if not self.is_open:
            return found
        best = traffic.cheapest(rows, work)
        why = _why(best, rows, self.bulk.limit_bytes)
        return replace(found, sync=POLICIES[best.policy], why=why)

    def shard_of_copies(self, world_size: int) -> int | None:
        """Count the ranks that share one of several copies in shards; None where there are none."""
        is_both = self.mode == "hsdp" and 1 < self.replicas < world_size
        return world_size // self.replicas if is_both else None

    def lay_out(
        self,
        module: nn.Module,
        call: ModelCall,
        world: World,
        draw: Draw | None = None,
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
        if self.mode in ("none", "ddp") or world.patient is None:  # or it only imagines ranks
            return Replicated(module, call, parameters, world)
        from trainer.parallel.fsdp import Sharded  # noqa: PLC0415 - half a second

        blocks = separable_blocks(module)
        return Sharded(module, call, blocks, world, replicas=self.replicas, draw=draw)


@contextmanager
def imagined(
    found: Spread, size: int, call_of: Callable[[nn.Module], ModelCall]
) -> Iterator[Callable[[nn.Module], Parallel]]:
    """Lend a way to lay models out in shards over ranks that are not there.

    Args:
        found: how the run is spread.
        size: ranks to imagine.
        call_of: binds a call to a model.

    Yields:
        Lays a model out in place, as the first of the ranks.
    """
    from trainer.parallel.fsdp import Sharded  # noqa: PLC0415 - likewise
    from trainer.parallel.stand_ins import imagined_mesh  # noqa: PLC0415 - half a second

    world = World(size=size, local_size=size)
    with imagined_mesh(size, found.replicas) as mesh:
        yield lambda model: Sharded(
            model,
            call_of(model),
            separable_blocks(model),
            world,
            replicas=found.replicas,
            mesh=mesh,
        )


def spread(config: RunConfig, world: World, module: nn.Module, policy: SyncPolicy) -> Spread:
    """Resolve `parallel`, `sync` and `deterministic=layout`.

    Args:
        config: the run's.
        world: all ranks.
        module: the model, whole.
        policy: what `sync` names; not looked at under `auto`.

    Raises:
        ConfigError: they do not fit together, or not the number of ranks.
    """
    mode = parallel_mode(config, world)
    replicas = _replicas(config, world, mode)
    if config.deterministic == "layout":
        if mode not in ("none", "ddp"):
            raise ConfigError(
                f"deterministic=layout: sums whole gradients; use parallel=ddp, not {mode}"
            )
        return Spread(mode=mode, replicas=replicas, sync=Exact(), is_ordered=True)
    if mode == "none":
        known = isinstance(policy, Deferred | Immediate | Hierarchical)
        return Spread(mode=mode, replicas=1, sync=Deferred() if known else policy)
    if isinstance(policy, Hierarchical) and mode != "hsdp":
        raise ConfigError(f"sync=hierarchical: {mode} has one level; use parallel=hsdp")
    parameters = [p for p in module.parameters() if p.requires_grad]
    bulk = Bulk(
        model_bytes=sum(p.nbytes for p in parameters),
        groups=_groups(module, mode),
        limit_bytes=world.on_main(lambda: _limit_bytes(config, world)),
    )
    is_open = config.sync.name == "auto"
    found = Spread(mode=mode, replicas=replicas, sync=policy, bulk=bulk, is_open=is_open)
    return found.weighed(world.size, Work(micro_batches=1))


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


def dealt(cut: Cut, config: RunConfig) -> Cut:
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
    return Leaves(micro=cut.micro)


def _replicas(config: RunConfig, world: World, mode: str) -> int:
    """Resolve `parallel.replicate` and `parallel.shard`: by default a machine holds one copy.

    Raises:
        ConfigError: they do not give the number of ranks.
    """
    if mode != "hsdp":
        return world.size if mode == "ddp" else 1
    asked = config.parallel
    return copies_of(world.size, world.local_size, asked.shard, asked.replicate)


def _limit_bytes(config: RunConfig, world: World) -> int:
    """Find the memory of one rank; that of a machine which is not here is what was typed.

    A run weighs what was typed as its plan does, but cannot have more than there is.
    """
    device, asked = planned_device(config, world), config.accum.params.get("memory")
    typed = None if asked is None else memory_limit(device, asked=asked).bytes
    if device.type != world.device.type:
        return sys.maxsize if typed is None else typed
    if typed is not None and config.command == "plan":
        return typed
    there = memory_limit(device, local_ranks=world.local_size).bytes
    return there if typed is None else min(typed, there)


def _groups(module: nn.Module, mode: str) -> int:
    """Count the collectives that move all parameters or gradients once."""
    if mode != "ddp":
        return len(separable_blocks(module)) + 1
    return num_buckets([p for p in module.parameters() if p.requires_grad])


def _why(best: Traffic, rows: Sequence[Traffic], limit_bytes: int) -> str:
    """Say in one line which policy `sync=auto` takes, and what speaks for it."""
    others = [row for row in rows if row is not best]
    said = [f"sync=auto takes {best.policy}: {IN_WORDS[best.policy]}, {_costs(best)}"]
    said += [f"{row.policy} would be {_costs(row)}" for row in others if row.fits]
    room = f"{traffic.MOST_OF_MEMORY:.0%} of {size(limit_bytes)}, for activations need the rest"
    said += [
        f"{row.policy} would hold {size(row.held)}, and may hold {room}"
        for row in others
        if not row.fits
    ]
    return "; ".join(said)


def _costs(row: Traffic) -> str:
    """Say what a policy sends, and how long that takes."""
    sent = f"{size(row.sent)} sent per step"
    if row.seconds is None or row.exposed is None:
        return sent
    hidden = "" if row.exposed == row.seconds else f", {duration(row.exposed)} of it not hidden"
    return f"{sent} in about {duration(row.seconds)}{hidden}"
