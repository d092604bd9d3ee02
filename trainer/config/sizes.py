"""Work out sizes of which some give the others: the batch of `accum=fixed`, the mesh of `hsdp`.

Plain Python: it runs while the command line is checked, before numpy or torch are imported.
"""

from __future__ import annotations

from trainer.core.errors import ConfigError


def complete_sizes(
    global_batch: int | None, micro: int | None, steps: int | None, world_size: int
) -> int:
    """Give the global batch of `accum=fixed`, where two of its three sizes give the third.

    Ranks share the global batch as evenly as they can, so the busiest holds
    `ceil(global_batch / world_size)` samples. With `micro`, the last micro-batch may be short; with
    `steps`, micro-batches are as even as they can be. A global batch smaller than the number of
    ranks leaves some without a sample.

    Args:
        global_batch: `batch.global`; None where `micro` and `steps` give it.
        micro: `accum.micro`, samples of the largest micro-batch on one rank.
        steps: `accum.steps`, micro-batches per optimizer step on the busiest rank.
        world_size: data-parallel ranks.

    Raises:
        ConfigError: the global batch neither is given nor follows, `steps` micro-batches cannot be
            cut from the samples of a rank, or all three contradict each other; the text names the
            nearest sizes that agree.
    """
    if global_batch is None:
        if micro is None or steps is None:
            raise ConfigError(
                "batch.global: needed, unless accum.micro and accum.steps are both given"
            )
        return micro * steps * world_size
    share = -(-global_batch // world_size)
    if micro is None and steps is not None and steps > share:
        raise ConfigError(
            f"accum.steps: {steps} micro-batches cannot be cut from batch.global={global_batch}, "
            f"{_count(share, 'sample')} on each of {_count(world_size, 'rank')}. The nearest sizes "
            f"that agree: accum.steps={share}, or batch.global={steps * world_size}"
        )
    if micro is not None and steps is not None and steps != -(-share // micro):
        raise ConfigError(_contradiction(global_batch, micro, steps, world_size))
    return global_batch


def _contradiction(global_batch: int, micro: int, steps: int, world_size: int) -> str:
    """Name for each of the three sizes the nearest value that agrees with the other two."""
    share = -(-global_batch // world_size)
    # `steps` micro-batches of up to `micro` hold from `fewest` to `most` samples.
    fewest, most = ((steps - 1) * micro) * world_size + 1, steps * micro * world_size
    fixes = [f"batch.global={most if global_batch > most else fewest}"]
    if fixes[0] != f"batch.global={most}":
        fixes.append(f"batch.global={most} (no short micro-batch)")
    fixes.append(f"accum.steps={-(-share // micro)}")
    even = -(-share // steps)
    if -(-share // even) == steps:
        fixes.append(f"accum.micro={even}")
    return (
        f"accum.steps: {steps} micro-batches of {_count(micro, 'sample')} on "
        f"{_count(world_size, 'rank')} hold {most} samples, not batch.global={global_batch}. "
        f"The nearest sizes that agree: {', or '.join(fixes)}"
    )


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def num_replicas(world_size: int, local_size: int, shard: object, replicate: object) -> int:
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
