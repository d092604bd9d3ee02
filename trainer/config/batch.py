"""The arithmetic of `accum=fixed`: global batch, micro-batch and accumulation steps.

Plain Python: it runs while the command line is checked, before numpy or torch are imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from trainer.core.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSizes:
    """Sizes that agree.

    Attributes:
        global_size: samples behind one optimizer step, over all ranks.
        micro: samples of the largest micro-batch on one rank.
        steps: micro-batches per optimizer step on the busiest rank.
    """

    global_size: int
    micro: int
    steps: int


def resolve_fixed(
    global_size: int | None, micro: int | None, steps: int | None, world_size: int
) -> FixedSizes:
    """Complete the sizes of `accum=fixed` from those that are given.

    Ranks share the global batch as evenly as they can, so the busiest holds
    `ceil(global_size / world_size)` samples. With `micro`, the last micro-batch may be short; with
    `steps`, micro-batches are as even as they can be; with neither, each rank computes its share
    in one piece. A global batch smaller than the number of ranks leaves some without a sample.

    Args:
        global_size: `batch.global`; `None` when `micro` and `steps` decide it.
        micro: `accum.micro`.
        steps: `accum.steps`.
        world_size: data-parallel ranks.

    Returns:
        All three.

    Raises:
        ConfigError: if a size is below 1, if the global batch is neither given nor follows, if
            `steps` micro-batches cannot be cut from the samples of a rank, or if all three are
            given and contradict each other; the text names the nearest sizes that agree.
    """
    _require_positive(("batch.global", global_size), ("accum.micro", micro), ("accum.steps", steps))
    if global_size is None:
        if micro is None or steps is None:
            raise ConfigError(
                "batch.global: needed, unless accum.micro and accum.steps are both given"
            )
        return FixedSizes(global_size=micro * steps * world_size, micro=micro, steps=steps)
    share = -(-global_size // world_size)
    if micro is None:
        steps = steps or 1
        if steps > share:
            raise ConfigError(_too_many_steps(global_size, steps, share, world_size))
        return FixedSizes(global_size=global_size, micro=-(-share // steps), steps=steps)
    if steps is not None and steps != -(-share // micro):
        raise ConfigError(_contradiction(global_size, micro, steps, world_size))
    return FixedSizes(global_size=global_size, micro=micro, steps=-(-share // micro))


def _require_positive(*sizes: tuple[str, int | None]) -> None:
    faults = [
        f"{key}: must be at least 1, got {size}. The nearest valid value is {key}=1"
        for key, size in sizes
        if size is not None and size < 1
    ]
    if faults:
        raise ConfigError(*faults)


def _too_many_steps(global_size: int, steps: int, share: int, world_size: int) -> str:
    return (
        f"accum.steps: {steps} micro-batches cannot be cut from batch.global={global_size}, "
        f"{_samples(share)} on each of {_ranks(world_size)}. The nearest sizes that agree: "
        f"accum.steps={share}, or batch.global={steps * world_size}"
    )


def _contradiction(global_size: int, micro: int, steps: int, world_size: int) -> str:
    """Name for each of the three sizes the nearest value that agrees with the other two."""
    share = -(-global_size // world_size)
    # `steps` micro-batches of up to `micro` hold from `fewest` to `most` samples.
    fewest, most = ((steps - 1) * micro) * world_size + 1, steps * micro * world_size
    fixes = [f"batch.global={most if global_size > most else fewest}"]
    if fixes[0] != f"batch.global={most}":
        fixes.append(f"batch.global={most} (no short micro-batch)")
    fixes.append(f"accum.steps={-(-share // micro)}")
    even = -(-share // steps)
    if -(-share // even) == steps:
        fixes.append(f"accum.micro={even}")
    return (
        f"accum.steps: {steps} micro-batches of {_samples(micro)} on {_ranks(world_size)} "
        f"hold {most} samples, not batch.global={global_size}. The nearest sizes that agree: "
        + ", or ".join(fixes)
    )


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
