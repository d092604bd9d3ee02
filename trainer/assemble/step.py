"""Lay a run out over its ranks, with the optimizer and what else a step needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.accumulate.loss_scale import LossScale
from trainer.assemble.run import Run
from trainer.core.stateful import Stateful
from trainer.models.compilation import COMPILED_SHAPES, compile_model
from trainer.objectives.base import weights_of
from trainer.optim.optimizers import HalfLives
from trainer.training.batches import PlannedBatch
from trainer.training.context import StepContext, StepState
from trainer.training.parameter_norms import ParameterNorms


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
    if config.compile and config.command != "verify":  # which runs copies, in float64
        compile_model(model.module, COMPILED_SHAPES)
    parallel = model.setup.lay_out(model.module, model.call, world, model.weights)
    optimizer = model.spec.build(model.module)
    half_lives = None
    if model.schedule.keep_half_life and run.data.stages:
        half_lives = HalfLives(
            spec=model.spec,
            optimizer=optimizer,
            reference_batch=model.schedule.reference_batch or 1,
            decays=tuple(group["weight_decay"] for group in optimizer.param_groups),
        )
    scale = LossScale() if model.precision == "fp16" else None
    # What is the model's own moves before what follows the model.
    first: list[Stateful] = [] if scale is None else [scale]
    if (every := config.log.parameters) is not None:
        first.append(ParameterNorms(parallel, optimizer, every))
    for feature in run.features:
        first += feature.parts(model.module, world)
    return StepContext(
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
        parts=[*first, *parts],
        measuring=run.features.measuring,
        on_out_of_memory=on_out_of_memory,
    )
