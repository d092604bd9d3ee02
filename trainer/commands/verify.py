"""`train verify`: prove that the planned step is the whole-batch step, or name what breaks it.

It needs no run, but any config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path

from rich.console import Group

from trainer.assemble.build import assemble_resumed
from trainer.assemble.run import Run
from trainer.assemble.run_plan import RunPlan, prepare
from trainer.assemble.step import step_context
from trainer.checkpoint.store import Loaded
from trainer.config.run_config import RunConfig
from trainer.core.durable import write_record
from trainer.core.errors import NotExactError
from trainer.core.run_folder import RunFolder
from trainer.core.world import World
from trainer.report.console import Screen
from trainer.training.batches import Feed, PlannedBatch
from trainer.verify.proof import verify
from trainer.verify.report import Added, VerifyReport, verify_block

FLOAT64_FACTOR = 2  # the comparison is in float64: twice the bytes of fp32


def verify_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Compare the gradient of the first step, as planned, with the whole batch's.

    One process computes the micro-batches of every rank. verify.json and the screen have the
    verdict before an error says it with the exit code.
    """
    run, saved = assemble_resumed(config, world)
    run_plan = prepare(run, saved.cut)
    batch, feed = _of_all_ranks(run_plan)
    context = step_context(run)
    report = verify(context, batch, feed, whole_fits=_whole_fits(run_plan))
    added = list[Added]()
    for feature in run.features:
        if (more := feature.verified(context, batch, feed, report, folder)) is not None:
            added.append(more)
    notes = [*chain.from_iterable(each.notes(run_plan) for each in run.features)]
    # Features that look further say it better.
    if not added:
        notes += _asides(run)
    report = replace(report, notes=(*notes, *report.notes))
    write_verdict(report, folder, saved.stored and saved.stored.loaded, added)
    for fault in filter(None, (each.fault for each in added)):
        raise NotExactError(f"{fault}; see {folder / RunFolder.VERIFY}")
    culprits = ", ".join(dict.fromkeys(name for name, _ in report.culprits))
    if report.verdict == "not_proven":
        text = "not proven that the planned step is the whole-batch step"
        raise NotExactError(
            f"{text}: {culprits} cannot be compared; see {folder / RunFolder.VERIFY}"
        )
    if report.verdict == "not_exact":
        chance = ""
        # Named by how it computes, though its figures came out equal here.
        if report.max_relative_error <= report.limit:
            chance = " except by coincidence"
        raise NotExactError(
            f"the planned step is not the whole-batch step{chance}: relative error "
            f"{report.max_relative_error:.2g}, caused by {culprits}; "
            f"see {folder / RunFolder.VERIFY}"
        )
    return 0


def write_verdict(
    report: VerifyReport, folder: Path, loaded: Loaded | None = None, added: Sequence[Added] = ()
) -> None:
    """Show what was found, and write it into verify.json; `loaded` is the checkpoint behind it."""
    values = report.to_json()
    for more in added:
        values |= more.values
    write_record(folder / RunFolder.VERIFY, values)
    screen = Screen(folder)
    screen.name_checkpoint(loaded)
    screen.show(Group(verify_block(report), *(more.block for more in added)))
    screen.close()


def _asides(run: Run) -> Iterator[str]:
    """Say what of the run's own step is not computed here."""
    config, world = run.config, run.world
    if world.size > 1:
        together = f"the micro-batches of all {world.size} ranks were computed one after another"
        sync = f"sync={run.model.setup.sync.name}"
        yield f"{together}; {sync} was compared on two ranks, with a few samples"
    if config.compile:
        yield "compile=true compiles the run's own step, which is not checked here"
    if run.model.precision != "fp32":
        rounding = f"precision={run.model.precision} adds rounding to the run's own step"
        yield f"{rounding}, which is not checked here"


def _of_all_ranks(run_plan: RunPlan) -> tuple[PlannedBatch, Feed]:
    """Take the first step with the micro-batches of every rank, for one process to compute."""
    run, batches = run_plan.run, []
    for rank in range(run.world.size):
        world = replace(run.world, rank=rank)
        with closing(run.feed(world)) as feed:
            batches.append(feed.next())
    micro_batches = chain.from_iterable(batch.micro_batches for batch in batches)
    return replace(batches[0], micro_batches=tuple(micro_batches)), feed


def _whole_fits(run_plan: RunPlan) -> bool:
    """Scale the predicted activations up to the whole batch in float64; no prediction is a no."""
    estimate, plan = run_plan.predicted, run_plan.plans[0]
    if estimate is None or run_plan.limit_bytes is None:
        return False
    whole = len(plan.lengths) * int(plan.lengths.max())
    growth = FLOAT64_FACTOR * whole / max(1, plan.max_positions)
    resting = FLOAT64_FACTOR * (estimate.parameters + estimate.gradients) + estimate.buffers
    return resting + estimate.activations * growth <= run_plan.limit_bytes / FLOAT64_FACTOR
