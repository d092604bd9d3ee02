"""How a run is spread over its ranks: the parallel mode, the copies, the sync policy, the cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from torch import nn

from trainer.config import RunConfig
from trainer.errors import ConfigError
from trainer.models.recompute import blocks_of
from trainer.objectives.base import ModelCall
from trainer.parallel import Parallel, Replicated
from trainer.parallel.ordered import Ordered
from trainer.plan import traffic
from trainer.plan.cut import Cut
from trainer.plan.cuts import Fixed
from trainer.plan.leaves import Leaves
from trainer.sync import Deferred, Exact, Hierarchical, Immediate, SyncPolicy
from trainer.tune.limit import memory_limit
from trainer.world import World

if TYPE_CHECKING:
    from trainer.plan.traffic import Mode

MEBI = 2**20


@final
@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a run is spread over its ranks.

    Attributes:
        mode: where parameters and gradients live: `none`, `ddp`, `fsdp` or `hsdp`.
        replicas: copies of the model.
        sync: when gradients are reduced.
        is_ordered: sums do not depend on the order of micro-batches and ranks.
        why: a line that says what `sync=auto` weighed; None where it was not asked.
    """

    mode: str
    replicas: int
    sync: SyncPolicy
    is_ordered: bool = False
    why: str | None = None

    def lay_out(
        self, module: nn.Module, call: ModelCall, world: World, most_micro_batches: int
    ) -> Parallel:
        """Lay a model out over the ranks; its parameters may be replaced.

        Args:
            module: whole, with the same weights on every rank.
            call: runs it.
            world: all ranks.
            most_micro_batches: of a step, over all ranks.
        """
        parameters = [p for p in module.parameters() if p.requires_grad]
        if self.is_ordered:
            return Ordered(module, call, parameters, world, most=most_micro_batches)
        if self.mode in ("none", "ddp") or world.patient is None:  # or it only imagines ranks
            return Replicated(module, call, parameters, world)
        from trainer.parallel.sharded import Sharded  # noqa: PLC0415 - half a second

        return Sharded(module, call, blocks_of(module), world, replicas=self.replicas)


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
    if config.sync.name != "auto":
        return Spread(mode=mode, replicas=replicas, sync=policy)
    chosen, why = _weighed(config, world, module, mode, replicas)
    return Spread(mode=mode, replicas=replicas, sync=chosen, why=why)


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
    typed, part = config.parallel.replicate, config.parallel.shard
    whole = max(1, world.size // typed) if isinstance(typed, int) else world.local_size
    shard = part if isinstance(part, int) else whole
    copies = typed if isinstance(typed, int) else max(1, world.size // shard)
    if copies * shard != world.size:
        fitting = [n for n in range(1, world.size + 1) if world.size % n == 0]
        nearest = min(fitting, key=lambda n: abs(n - shard))
        raise ConfigError(
            f"parallel.shard={shard}: times parallel.replicate={copies} is not the {world.size} "
            f"ranks there are; e.g. parallel.shard={nearest} "
            f"parallel.replicate={world.size // nearest}"
        )
    return copies


def _weighed(
    config: RunConfig, world: World, module: nn.Module, mode: Mode | str, replicas: int
) -> tuple[SyncPolicy, str]:
    """Choose by the table of traffic and memory; the same on every rank."""
    model_bytes = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    limit = world.on_main(lambda: memory_limit(world.device, local_ranks=world.local_size).bytes)
    rows = traffic.table(
        mode,  # type: ignore[arg-type] # none is one rank
        model_bytes=model_bytes,
        num_micro_batches=int(config.accum.params.get("steps") or 8),
        shard=world.size // replicas,
        replicas=replicas,
        limit_bytes=limit,
    )
    best = traffic.cheapest(rows)
    listed = "; ".join(
        f"{row.policy} sends {(row.within + row.across) / MEBI:,.1f} MiB, holds "
        f"{row.held / MEBI:,.1f} MiB{'' if row.fits else ', which does not fit'}"
        for row in rows
    )
    chosen: dict[str, SyncPolicy] = {
        "deferred": Deferred(),
        "immediate": Immediate(),
        "hierarchical": Hierarchical(),
    }
    return chosen[best.policy], f"sync=auto takes {best.policy}: {listed} (8 micro-batches)"
