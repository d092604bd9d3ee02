"""`train verify`: proves that the planned step is the whole-batch step, or names what breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trainer import durable
from trainer.assemble import assemble
from trainer.commands.prepare import Prepared, prepare
from trainer.config import RunConfig
from trainer.errors import NotExactError
from trainer.feed import Feed, PlannedBatch
from trainer.report.blocks import verify_block
from trainer.report.console import Screen
from trainer.verify import verify
from trainer.world import World

VERIFY_FILE = "verify.json"
DOUBLE = 2
"""The comparison is in float64: twice the bytes of fp32."""


def verify_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Compare the gradient of the first step, as planned, with the whole batch's.

    Args:
        config: composed and settled.
        folder: the run folder; gets verify.json.
        world: all ranks.
        stop: not asked.

    Raises:
        NotExactError: they differ; the culprits are on the screen and in verify.json.
    """
    parts = assemble(config, world)
    prepared = prepare(parts)
    batch, loader = _of_all_ranks(prepared), parts.source.loader
    report = verify(parts.kit(), batch, loader, whole_fits=_whole_fits(prepared))
    durable.write_json(folder / VERIFY_FILE, report.to_json())
    screen = Screen(folder)
    screen.show(verify_block(report))
    screen.close()
    if not report.exact:
        raise NotExactError(
            f"the planned step is not the whole-batch step: relative error "
            f"{report.max_relative_error:.2g}; the culprits are in {folder / VERIFY_FILE}"
        )
    return 0


def _of_all_ranks(prepared: Prepared) -> PlannedBatch:
    """Take the first step with the micro-batches of every rank, for one process to compute."""
    parts = prepared.parts
    batches = []
    for rank in range(parts.world.size):
        feed = Feed(
            parts.source,
            cut=prepared.cut,
            layout=parts.layout,
            world=replace(parts.world, rank=rank),
            seed=parts.config.seed,
            cursor=parts.source.order.start,
        )
        try:
            batches.append(feed.next())
        finally:
            feed.close()
    return replace(batches[0], micro_batches=tuple(m for b in batches for m in b.micro_batches))


def _whole_fits(prepared: Prepared) -> bool:
    """Scale the predicted activations up to the whole batch in float64; no prediction is a no."""
    estimate, plan = prepared.predicted, prepared.plans[0]
    if estimate is None:
        return False
    whole = len(plan.lengths) * int(plan.lengths.max())
    growth = DOUBLE * whole / max(1, plan.max_positions)
    resting = DOUBLE * (estimate.parameters + estimate.gradients) + estimate.buffers
    return resting + estimate.activations * growth <= prepared.limit_bytes / DOUBLE
