"""Open a run that is planned: the step, what has state, the records, the checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from trainer.assemble.parts import SIZES, may_begin_anew, refuse_unsavable
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
from trainer.report.records import PlanRecord
from trainer.training.checkpointing import Checkpointer
from trainer.training.failed_allocation import FailedAllocation
from trainer.training.run import Progress, Run

MEMORY_FIGURES = ("predicted_peak_bytes", "memory_limit_bytes")  # of plan.json


@contextmanager
def open_run(
    run_plan: RunPlan,
    plan: PlanRecord,
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
    components, config = run_plan.components, run_plan.components.config
    world, module, folder = components.world, components.module, store.folder.parent

    # The step, and all of it that has state.
    failed = FailedAllocation(folder, world, *(plan[name] for name in MEMORY_FIGURES))
    if isinstance(sizes := components.source.order.sizes, Stateful):
        own = {**own, SIZES: MainDecides(as_part(sizes), world)}
    context = step_context(components, on_out_of_memory=failed, parts=[*own.values()])
    feed, progress, loss_scale = components.feed(world), Progress(), context.loss_scale
    # More steps change no setting of the optimizer, and its groups may hold state.
    is_same = saved.loaded is not None and not contract_diff(
        saved.terms.contract, terms.contract, allow=("steps", "epochs")
    )
    live: dict[str, Stateful] = {
        OPTIMIZER: OptimizerPart(module, context.optimizer, keeps_settings=not is_same),
        "rng": GeneratorsPart(),
        "data": feed,
        "progress": progress,
        **({} if loss_scale is None else {"loss_scale": loss_scale}),
        **own,
    }

    # As it begins, or as the checkpoint has it; the model was built with its state.
    for part in own.values():
        part.begin(module)
    refuse_unsavable(own)
    if saved.loaded is not None:
        restore(saved.loaded, live, may_lack=may_begin_anew(config, own))

    # What is written: records, and checkpoints of all that is live, with what those go on by.
    model, cut = ModelPart.of(module, saved.stored), run_plan.saved_cut.following(feed)
    reporter = open_reporter(components, plan, folder, saved.loaded)
    with closing(reporter), ExitStack() as opened:
        checkpointer = Checkpointer(
            world=world,
            module=module,
            parts={MODEL: model, **live, "terms": terms, "cut": cut},
            writer=CheckpointWriter(store, world, asynchronous=config.checkpoint.asynchronous),
            reporter=reporter,
            on_full=config.checkpoint.on_full,
            every_s=config.checkpoint.every_s,
        )
        opened.callback(checkpointer.release)
        opened.callback(feed.close)
        run = Run(
            config=config,
            context=context,
            feed=feed,
            held_out=components.held_out,
            reporter=reporter,
            checkpointer=checkpointer,
            was_asked=stop,
            flops=run_plan.flops,
            progress=progress,
            evaluating=components.features.evaluating,
            after_evaluation=components.features.after_evaluation,
            own=own,
        )
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
