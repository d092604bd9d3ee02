"""`train verify`: proves that the planned step is the whole-batch step, or names what breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trainer.build.parts import Parts, assemble
from trainer.build.prepare import Prepared, prepare
from trainer.checkpoint.state import load_model
from trainer.checkpoint.store import CHECKPOINTS, CheckpointStore
from trainer.checkpoint.weights import load_weights
from trainer.config.run_config import RunConfig
from trainer.core.durable import write_record
from trainer.core.errors import NotExactError
from trainer.core.world import World
from trainer.report.blocks import verify_block
from trainer.report.console import Screen
from trainer.training.batches import Feed, PlannedBatch
from trainer.training.window import Kit
from trainer.verify.proof import verify

VERIFY_FILE = "verify.json"
DOUBLE = 2
"""The comparison is in float64: twice the bytes of fp32."""


def verify_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Compare the gradient of the first step, as planned, with the whole batch's.

    Args:
        config: composed and checked.
        folder: the run folder; gets verify.json.
        world: all ranks.
        stop: not asked.

    Raises:
        NotExactError: they differ, or cannot be compared; verify.json names the culprits.
    """
    parts = assemble(config, world)
    prepared = prepare(parts)
    batch, feed = _of_all_ranks(prepared)
    with feed.naming_samples(batch):
        report = verify(_kit(parts), batch, feed, whole_fits=_whole_fits(prepared))
    asides = []
    if world.size > 1:
        asides.append(
            f"the micro-batches of all {world.size} ranks were computed one after another in one "
            "process: how gradients are sent between ranks is not a part of this"
        )
    if config.precision != "fp32":
        asides.append(f"precision={config.precision} rounds the run's own step; that is left aside")
    report = replace(report, notes=(*asides, *report.notes))
    write_record(folder / VERIFY_FILE, report.to_json())
    screen = Screen(folder)
    screen.show(verify_block(report))
    screen.close()
    culprits = ", ".join(dict.fromkeys(name for name, _ in report.culprits))
    if report.verdict == "not_proven":
        text = "not proven that the planned step is the whole-batch step"
        raise NotExactError(f"{text}: {culprits} cannot be compared; see {folder / VERIFY_FILE}")
    if report.verdict == "not_exact":
        chance = " but by accident" if report.max_relative_error <= report.limit else ""
        raise NotExactError(
            f"the planned step is not the whole-batch step{chance}: relative error "
            f"{report.max_relative_error:.2g}, by {culprits}; see {folder / VERIFY_FILE}"
        )
    return 0


def _kit(parts: Parts) -> Kit:
    """Compose the step with the weights that the run begins, or goes on, with."""
    config, here = parts.config, World(device=parts.world.device)  # one process holds all ranks
    kit = parts.kit(is_fresh=config.init is None and config.resume is None)
    if config.resume is not None:
        store = CheckpointStore(Path(config.resume) / CHECKPOINTS)
        loaded = store.load(config.checkpoint_step, set_aside=False, world=here)
        load_model(parts.module, loaded.weights, loaded.path)
    elif config.init is not None:
        load_weights(parts.module, Path(config.init), here, config.checkpoint_step)
    return kit


def _of_all_ranks(prepared: Prepared) -> tuple[PlannedBatch, Feed]:
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
    micro_batches = tuple(m for batch in batches for m in batch.micro_batches)
    return replace(batches[0], micro_batches=micro_batches), feed


def _whole_fits(prepared: Prepared) -> bool:
    """Scale the predicted activations up to the whole batch in float64; no prediction is a no."""
    estimate, plan = prepared.predicted, prepared.plans[0]
    if estimate is None or prepared.limit_bytes is None:
        return False
    whole = len(plan.lengths) * int(plan.lengths.max())
    growth = DOUBLE * whole / max(1, plan.max_positions)
    resting = DOUBLE * (estimate.parameters + estimate.gradients) + estimate.buffers
    return resting + estimate.activations * growth <= prepared.limit_bytes / DOUBLE
