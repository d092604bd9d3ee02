"""How many copies of the model the ranks of `parallel=hsdp` hold: plain arithmetic."""

from __future__ import annotations

from trainer.core.errors import ConfigError


def copies_of(world_size: int, local_size: int, shard: object, replicate: object) -> int:
    """Resolve `parallel.shard` and `parallel.replicate`; by default a machine holds one copy.

    Args:
        world_size: ranks in all.
        local_size: ranks of one machine.
        shard: ranks that share one copy, or `auto`.
        replicate: number of copies, or `auto`.

    Returns:
        The number of copies.

    Raises:
        ConfigError: they do not give the number of ranks; the line names the nearest that do.
    """
    whole = max(1, world_size // replicate) if isinstance(replicate, int) else local_size
    part = shard if isinstance(shard, int) else whole
    copies = replicate if isinstance(replicate, int) else max(1, world_size // part)
    if copies * part == world_size:
        return copies
    fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
    nearest = min(fitting, key=lambda n: abs(n - part))
    raise ConfigError(
        f"parallel.shard={part}: times parallel.replicate={copies} is not the {world_size} "
        f"ranks there are; e.g. parallel.shard={nearest} "
        f"parallel.replicate={world_size // nearest}"
    )
