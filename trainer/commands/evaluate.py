"""`train evaluate`: compute the held-out loss of a checkpoint, or that of other data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from trainer.assemble.build import assemble_on_all
from trainer.assemble.run import Run
from trainer.assemble.run_plan import prepare_on_main
from trainer.assemble.saved import Saved, Terms, refuse_changed_data
from trainer.assemble.shown_samples import predict_parts, worst_samples
from trainer.assemble.step import step_context
from trainer.checkpoint.weights import load_step
from trainer.config.messages import show
from trainer.config.run_config import RunConfig, contract, evaluation_file, to_plain
from trainer.core.errors import DataError
from trainer.core.world import World
from trainer.report.evaluated import report_evaluation
from trainer.training.context import StepContext
from trainer.training.data import HeldOut
from trainer.training.evaluation import evaluate_parts


@contextmanager
def open_evaluation(
    config: RunConfig, saved: Saved, world: World
) -> Iterator[tuple[Run, StepContext]]:
    """Build a run of a checkpoint, whose model is inside the block as evaluations have it.

    Collective.
    """
    run = assemble_on_all(config, world, saved)
    if config.command == "evaluate" and not run.data.held_out:
        # Whatever was held out now would have been trained on.
        raise DataError(
            "data.holdout: nothing is held out to evaluate on: type data.path=OTHER "
            "data.holdout=all"
        )
    # Where all are evaluated, no split is asked which samples were trained on.
    if not config.reads_all:
        refuse_changed_data(run, saved.terms)
    run = prepare_on_main(run).run
    context = step_context(run)
    with closing(run.feed(world)) as feed, run.features.evaluating(context, feed):
        yield run, context


def evaluate_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Evaluate a checkpoint on the run's held-out data, or on all of other data.

    Prints, and writes what `evaluation_file` names into the run. The config is the run's own with
    what was typed now on top.
    """
    loaded = load_step(folder, config.step, world)
    saved = Saved.read(config, loaded, world)
    terms = saved.terms
    if config.reads_all:
        # Data of any size are enough: they are cut and evaluated, and no step is taken.
        batch = config.batch.model_copy(update={"tail": "keep"})
        steps = terms.total_steps or config.steps
        config = config.model_copy(update={"batch": batch, "steps": steps, "epochs": None})
    predicted: dict[str, list[dict[str, Any]]] = {}
    with open_evaluation(config, saved, world) as (run, context):
        parts = run.data.held_out
        means = evaluate_parts(context, parts)
        if config.eval.predictions:
            predicted = predict_parts(run, context.parallel)
    file = folder / evaluation_file(config)
    pictures = folder / file.stem.replace("evaluate", "worst")
    facts = {name: _described(config, terms, name, part) for name, part in parts.items()}
    world.on_main(
        lambda: report_evaluation(
            loaded, file, means, facts, predicted, lambda: worst_samples(run, predicted, pictures)
        )
    )
    return 0


def _described(
    config: RunConfig, terms: Terms, name: str, data: HeldOut
) -> tuple[str, dict[str, Any]]:
    """Say which samples are evaluated, for the screen and for the record."""
    plain, before = to_plain(config), terms.contract
    # What is of one source has no settings but those of the data.
    section = plain["data"]
    if name:
        section = plain["eval"]["sets"].get(name, {})
    is_own = True
    for key, value in contract(config).items():
        # The share is typed as `all` to evaluate here, so that it always differs.
        if key.startswith("data.") and key != "data.holdout":
            is_own &= before.get(key) == value
    count, most = data.num_samples, len(data.lengths)
    what = f"{name or 'held out'} ({count} samples)"
    if config.reads_all and not name:
        whose = f"other data, {show(section.get('path') or section['_target_'])}"
        if is_own:
            whose = "the run's own data, those it trained on among them"
        share = f"all {most}"
        # `eval.samples` takes some of them.
        if count != most:
            share = f"{count} of {most}"
        what = f"{share} samples of {whose}"
    fingerprint = data.loader.dataset.fingerprint
    return what, {"samples": count, "data": {**section, "fingerprint": fingerprint}}
