"""Work out the mesh of `parallel=hsdp`: how many copies of the model, of how many ranks each."""

from __future__ import annotations

from trainer.core.errors import ConfigError


def num_replicas(world_size: int, local_size: int, shard: object, replicate: object) -> int:
    """Give the number of copies of the model; by default a machine (`local_size` ranks) holds one.

    Sizes that do not give the number of ranks are a `ConfigError`, which names the nearest that do.
    """
    whole = max(1, world_size // replicate) if isinstance(replicate, int) else local_size
    part = shard if isinstance(shard, int) else whole
    copies = replicate if isinstance(replicate, int) else max(1, world_size // part)
    if copies * part == world_size:
        return copies
    divisors = (n for n in range(1, world_size + 1) if world_size % n == 0)
    fitting = min(divisors, key=lambda n: abs(n - part))
    raise ConfigError(
        f"parallel.shard={part}: times parallel.replicate={copies} must be the {world_size} ranks "
        f"of the run; e.g. parallel.shard={fitting} parallel.replicate={world_size // fitting}"
    )
