"""Work out steps of shares and times, and sizes of which some give the others.

Plain Python: it runs while the command line is checked, before numpy or torch are imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from trainer.core.errors import ConfigError

_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_SECONDS = {"s": 1, "min": 60, "h": 3600}


def parse_time(text: str) -> float | None:
    """Turn `"10min"`, `"2h"` or `"90s"` into seconds; None where it is no time above 0."""
    match = _TIME.fullmatch(text)
    return float(match[1]) * _SECONDS[match[2]] or None if match else None


def warmup_steps(warmup: float, total_steps: int) -> int:
    """Resolve a warm-up; below 1 it is a share of the run, to the nearest step."""
    return round(warmup * total_steps) if warmup < 1 else int(warmup)


def cadence_steps(every: float, total_steps: int) -> int:
    """Resolve a cadence; below 1 it is a share of the run, in steps rounded up.

    A share of 0.1 comes due ten times at most, the last time at the end or close to it.
    """
    # 0.1 * 30 is above 3 by the last bit.
    return math.ceil(round(every * total_steps, 6)) if every < 1 else int(every)


def nearest(number: float, candidates: Iterable[int]) -> int:
    """Choose the candidate that is nearest to a number, the smaller of two."""
    return min(candidates, key=lambda each: (abs(each - number), each))


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
    share = -(-global_batch // world_size)  # rounded up: samples of the busiest rank
    if steps is None or (steps <= share if micro is None else steps == -(-share // micro)):
        return global_batch
    # `steps` micro-batches of up to `largest` samples hold from `fewest` to `most` of them.
    largest, even = micro or 1, -(-share // steps)
    fewest, most = (steps - 1) * largest * world_size + 1, steps * largest * world_size
    fixes = [f"batch.global={most if micro is None or global_batch > most else fewest}"]
    fixes.append(f"accum.steps={-(-share // largest)}")
    if micro is not None and -(-share // even) == steps:
        fixes.append(f"accum.micro={even}")
    raise ConfigError(
        f"accum.steps={steps}: batch.global={global_batch} gives each of {world_size} rank"
        f"{'s' * (world_size > 1)} {share} samples, which are not {steps} micro-batches"
        f"{'' if micro is None else f' of accum.micro={micro}'}. The nearest sizes that agree: "
        f"{', or '.join(fixes)}"
    )


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
    fitting = nearest(part, (n for n in range(1, world_size + 1) if world_size % n == 0))
    raise ConfigError(
        f"parallel.shard={part}: times parallel.replicate={copies} is not the {world_size} ranks "
        f"there are; e.g. parallel.shard={fitting} parallel.replicate={world_size // fitting}"
    )
