"""Lay a run out over its ranks: with its optimizer, and the parts that follow every update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from trainer.accumulate.loss_scale import LossScale
from trainer.assemble.instantiate import construct
from trainer.assemble.run import Run
from trainer.config.metric_mode import stop_mode
from trainer.config.run_config import RunConfig
from trainer.core.stateful import Stateful, as_part
from trainer.models.compilation import COMPILED_SHAPES, compile_model
from trainer.objectives.base import weights_of
from trainer.optim.optimizers import HalfLives
from trainer.training.batches import PlannedBatch
from trainer.training.best_metric import BEST, STOP, BestMetric
from trainer.training.context import Measuring, StepContext, StepState

SIZES = "batch"  # the part that sizes of steps are, where they depend on what a run decides
MAY_BEGIN_ANEW = {"loss_scale", SIZES, BEST, STOP}  # what a checkpoint need not have


def step_context(
    run: Run,
    *,
    on_out_of_memory: Callable[[PlannedBatch, BaseException], None] | None = None,
    parts: Sequence[Stateful] = (),
) -> StepContext:
    """Lay the model out, and build the optimizer; the model may not be replaced after it.

    `parts` are the user's, which follow every update.
    """
    config, world, model = run.config, run.world, run.model
    # `train verify` runs copies in float64, each of which would be compiled anew.
    if config.compile and config.command != "verify":
        compile_model(model.module, COMPILED_SHAPES)
    parallel = model.setup.lay_out(model.module, model.call, world, model.weights)
    optimizer = model.spec.build(model.module)
    if hasattr(optimizer, "note_waits"):
        optimizer.note_waits(world.rank_progress.waiting)
    half_lives = None
    if model.schedule.keep_half_life and run.data.stages:
        half_lives = HalfLives(
            spec=model.spec,
            optimizer=optimizer,
            reference_batch=model.schedule.reference_batch or 1,
            decays=tuple(group["weight_decay"] for group in optimizer.param_groups),
        )
    # What is the model's own moves before what follows the model.
    followers, measuring, scale = list[Stateful](), list[Measuring](), None
    if model.precision == "fp16":
        scale = LossScale()
        followers.append(scale)
    for feature in run.features:
        measuring += feature.measuring()
    context = StepContext(
        data=run.data,
        model=model,
        world=world,
        parallel=parallel,
        state=StepState.of(parallel, model.objective, world),
        terms=tuple(sorted(weights_of(model.objective, run.example))),
        optimizer=optimizer,
        base_lrs=tuple(group["lr"] for group in optimizer.param_groups),
        loss_scale=scale,
        follow_batch=half_lives,
        measuring=measuring,
        figures=[feature.figures for feature in run.features],
        on_out_of_memory=on_out_of_memory,
    )
    for feature in run.features:
        followers += feature.parts(context)
    return replace(context, parts=[*followers, *parts])


def own_parts(config: RunConfig) -> dict[str, Stateful]:
    """Build the parts with state that the config asks for, each with its name in a checkpoint."""
    parts: dict[str, Stateful] = {}
    for index, component in enumerate(config.parts):
        part = construct(component, f"parts[{index}]", Stateful, config.trust)
        name = f"parts.{component.target}"
        if name in parts:
            name += f"-{index + 1}"
        parts[name] = as_part(part)
    for name, key, metric, min_delta in (
        (BEST, "checkpoint.best", config.checkpoint.best, 0.0),
        (STOP, "stop.metric", config.stop.metric, config.stop.min_delta),
    ):
        if metric is not None:
            mode = stop_mode(config.checkpoint.best, metric, config.checkpoint.mode)
            parts[name] = BestMetric.of(key, metric, mode, min_delta, config.stop.patience)
    return parts


def followed_metrics(config: RunConfig, own: Mapping[str, Stateful]) -> dict[str, BestMetric]:
    """Give every metric that evaluations have to give: for the best checkpoint, and for stopping.

    A sweep ranks its jobs by one, too. Its default is in every config, in no sweep too.
    """
    found = dict[str, BestMetric]()
    for name, part in own.items():
        if isinstance(part, BestMetric):
            found[name] = part
    metric = config.sweep.metric
    if metric != "eval_loss":
        found["sweep"] = BestMetric(key="sweep.metric", metric=metric, mode="min")
    return found
