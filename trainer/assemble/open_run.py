"""Open a run that is planned: the step, what has state, the records, the checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from trainer.assemble.reporter import open_reporter
from trainer.assemble.run_plan import RunPlan
from trainer.assemble.saved import LiveCut, Saved, Terms
from trainer.assemble.step import MAY_BEGIN_ANEW, SIZES, followed_metrics, step_context
from trainer.checkpoint.state import GeneratorsPart, OptimizerPart, refuse_unsavable, restore
from trainer.checkpoint.store import MODEL, OPTIMIZER, CheckpointStore, CheckpointWriter, Loaded
from trainer.checkpoint.weights import ModelPart
from trainer.config.run_config import contract_diff
from trainer.core.errors import NoCheckpointError
from trainer.core.stateful import Stateful, as_part
from trainer.report.metrics import evaluation_at
from trainer.report.records import PlanRecord
from trainer.training.checkpointing import Checkpointer
from trainer.training.failed_allocation import FailedAllocation
from trainer.training.loop import OpenRun, Progress


@contextmanager
def open_run(
    run_plan: RunPlan,
    plan: PlanRecord,
    store: CheckpointStore,
    saved: Saved,
    terms: Terms,
    own: dict[str, Stateful],
    stop: Callable[[], bool],
) -> Iterator[OpenRun]:
    """Give every part of a run the state it begins, or goes on, with; close it all. Collective.

    `plan` is as plan.json is to have it, `store` of the run's checkpoints, in its folder. `saved`
    is what the checkpoint says that it goes on from, and `terms` are those of the run now; `own`
    are the parts with state that the config asks for.
    """
    run, config = run_plan.run, run_plan.run.config
    world, module, folder = run.world, run.model.module, store.folder.parent

    # The step, and all of it that has state.
    expected = plan["predicted_peak_bytes"], plan["memory_limit_bytes"]
    failed = FailedAllocation(folder, world, *expected)
    measured: dict[str, Stateful] = {}  # by features; any of it may begin anew
    for feature in run.features:
        measured |= feature.saved_parts()
    # Behind those of the user, which may change weights that these look at
    own |= measured
    if isinstance(sizes := run.data.order.sizes, Stateful):
        own = {**own, SIZES: as_part(sizes)}
    context = step_context(run, on_out_of_memory=failed, parts=[*own.values()])
    feed, progress, loss_scale = run.feed(world), Progress(), context.loss_scale
    # More steps change no setting of the optimizer, whose groups may hold state.
    changed = contract_diff(saved.terms.contract, terms.contract, ("steps", "epochs"))
    is_set_anew = saved.loaded is None or bool(changed)
    live: dict[str, Stateful] = {
        OPTIMIZER: OptimizerPart(module, context.optimizer, keeps_settings=is_set_anew),
        "rng": GeneratorsPart(),
        "data": feed,
        "progress": progress,
    }
    if loss_scale is not None:
        live["loss_scale"] = loss_scale
    live |= own

    # As it begins, or as the checkpoint has it; the model was built with its state.
    for part in own.values():
        part.begin(module)
    refuse_unsavable(own)
    if saved.loaded is not None:
        may_lack = MAY_BEGIN_ANEW | measured.keys()
        if "parts" in config.resume_allow:
            may_lack |= own.keys()
        restore(saved.loaded, live, may_lack=may_lack)

    # What is written: records, and checkpoints of all that is live, with what those go on by.
    model, cut = ModelPart.of(module, saved.stored), LiveCut(run_plan.saved_cut, feed)
    reporter = open_reporter(run, plan, folder, saved.loaded)
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
        metrics = followed_metrics(config, own)
        open_run = OpenRun(
            context=context,
            feed=feed,
            reporter=reporter,
            checkpointer=checkpointer,
            was_asked=stop,
            flops=run_plan.flops,
            progress=progress,
            evaluating=run.features.evaluating,
            further_means=run.features.further_means,
            after_evaluation=run.features.after_evaluation,
            save_every=config.checkpoint.every,
            evaluate_every=config.eval.every,
            evaluate_first=config.eval.at_start,
            most_failures=config.nonfinite.limit,
            metrics=metrics,
        )
        _recall(open_run, folder, saved.loaded)
        yield open_run


def _recall(run: OpenRun, folder: Path, loaded: Loaded | None) -> None:
    """Note how far the run came before this process, and what it evaluated there. Collective."""
    step, progress = run.feed.cursor.step, run.progress
    if loaded is not None and loaded.step != step:
        text = f"stands at step {step} of the data: choose another with step=N"
        raise NoCheckpointError(f"{loaded.path}: {text}")
    evaluation = run.context.world.on_main(lambda: evaluation_at(folder, step))
    progress.step, progress.has_terms = step, step > 0
    if run.feed.data.order.sizes.reads_tokens:  # which the checkpoint of another size has not
        tokens = max(progress.total_tokens, run.feed.cursor.tokens)  # it counts passed ones, too
        run.feed.cursor = replace(run.feed.cursor, tokens=tokens)
    if loaded is not None:
        progress.saved_at = step
    if evaluation is not None:
        progress.evaluation, progress.evaluated_at = evaluation, step
