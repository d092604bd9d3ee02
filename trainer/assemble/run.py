"""Open a run that is planned: the step, what has state, the records, the checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from trainer.assemble.parts import SIZES, may_begin_anew, refuse_unsavable
from trainer.assemble.prompts import prompts_of
from trainer.assemble.reporter import open_reporter
from trainer.assemble.run_plan import RunPlan
from trainer.assemble.saved import Saved, Terms
from trainer.assemble.step import step_context
from trainer.checkpoint.state import GeneratorsPart, OptimizerPart, restore
from trainer.checkpoint.store import MODEL, OPTIMIZER, CheckpointStore, CheckpointWriter
from trainer.checkpoint.weights import ModelPart
from trainer.config.run_config import contract_diff
from trainer.core.stateful import MainDecides, Stateful, as_part
from trainer.report.metrics import evaluation_at
from trainer.report.records import Record
from trainer.training.checkpointing import Checkpointer
from trainer.training.failed_allocation import FailedAllocation
from trainer.training.run import Progress, Run

MEMORY_FIGURES = ("predicted_peak_bytes", "memory_limit_bytes")  # of plan.json


@contextmanager
def open_run(
    run_plan: RunPlan,
    plan: Record,
    store: CheckpointStore,
    saved: Saved,
    terms: Terms,
    own: Mapping[str, Stateful],
    stop: Callable[[], bool],
) -> Iterator[Run]:
    """Give every part of a run the state it begins, or goes on, with. Collective.

    Args:
        run_plan: of the run.
        plan: the same, as plan.json is to have it.
        store: of its checkpoints, in its folder.
        saved: what the checkpoint says that it goes on from, and what its model began with.
        terms: those of the run now.
        own: the parts with state that the config asks for.
        stop: whether a signal asked this rank to stop.

    Yields:
        The run; it is closed in the end, however that comes.
    """
    components, world = run_plan.components, run_plan.components.world
    folder = store.folder.parent
    failed = FailedAllocation(folder, world, *(plan[name] for name in MEMORY_FIGURES))
    if isinstance(sizes := components.source.order.sizes, Stateful):
        own = {**own, SIZES: MainDecides(as_part(sizes), world)}
    context = step_context(components, on_out_of_memory=failed, parts=[*own.values()])
    feed = components.feed(world)
    # More steps change no setting of the optimizer, and its groups may hold state.
    is_same = saved.loaded is not None and not contract_diff(
        saved.terms.contract, terms.contract, allow=("steps", "epochs")
    )
    progress, optimizer = Progress(), context.optimizer
    live: dict[str, Stateful] = {
        OPTIMIZER: OptimizerPart(components.module, optimizer, keeps_settings=not is_same),
        "rng": GeneratorsPart(),
        "data": feed,
        "progress": progress,
        **({} if context.loss_scale is None else {"loss_scale": context.loss_scale}),
        **own,
    }
    for part in own.values():
        part.begin(components.module)
    refuse_unsavable(own)
    if saved.loaded is not None:  # the model has its state already
        restore(saved.loaded, live, may_lack=may_begin_anew(components.config, own))
    prompts = prompts_of(components)
    reporter = open_reporter(components, plan, folder, saved.loaded)
    with closing(reporter), ExitStack() as opened:
        how = components.config.checkpoint
        checkpointer = Checkpointer(
            world=world,
            module=components.module,
            parts={
                MODEL: ModelPart.of(components.module, saved.stored),
                **live,
                "terms": terms,
                "cut": run_plan.saved_cut.following(feed),
            },
            writer=CheckpointWriter(store, world, asynchronous=how.asynchronous),
            reporter=reporter,
            on_full=how.on_full,
            every_s=how.every_s,
        )
        run = Run(
            config=components.config,
            context=context,
            feed=feed,
            held_out=components.held_out,
            reporter=reporter,
            checkpointer=checkpointer,
            was_asked=stop,
            flops=run_plan.flops,
            progress=progress,
            prompts=prompts,
            own=own,
        )
        opened.callback(checkpointer.release)
        opened.callback(feed.close)
        _recall(run, folder, is_saved=saved.loaded is not None)
        yield run


def _recall(run: Run, folder: Path, *, is_saved: bool) -> None:
    """Note how far the run came before this process, and what it evaluated there. Collective."""
    step, progress = run.feed.cursor.step, run.progress
    evaluation = run.context.world.on_main(lambda: evaluation_at(folder, step))
    progress.step, progress.has_terms = step, step > 0
    if run.feed.source.order.sizes.reads_tokens:  # which the checkpoint of another size has not
        run.feed.cursor = replace(run.feed.cursor, tokens=progress.total_tokens)
    progress.saved_at = step if is_saved else None
    if evaluation is not None:
        progress.evaluation, progress.evaluated_at = evaluation, step
