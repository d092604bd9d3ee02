"""Compose the step of what a run is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainer.accumulate.loss_scale import LossScale
from trainer.assemble.components import Components
from trainer.core.stateful import Stateful
from trainer.models.compilation import COMPILED_SHAPES, compile_model
from trainer.objectives.base import weights_of
from trainer.optim.optimizers import HalfLives
from trainer.training.batches import PlannedBatch
from trainer.training.parameter_norms import ParameterNorms
from trainer.training.window import StepContext


def step_context(
    components: Components,
    *,
    on_out_of_memory: Callable[[PlannedBatch, BaseException], None] | None = None,
    parts: Sequence[Stateful] = (),
) -> StepContext:
    """Compose the step, and build the optimizer; the model may not be replaced after it.

    `parts` are the user's, which follow every update.
    """
    config, module, world = components.config, components.module, components.world
    if config.compile and config.command != "verify":  # which runs copies, in float64
        compile_model(module, COMPILED_SHAPES)
    model = components.parallel.lay_out(module, components.call, world, components.weights)
    optimizer = components.make_optimizer(module)
    norms, every = dict[str, Any](), config.log.parameters
    if every is not None:
        norms["before_update"] = ParameterNorms(model, optimizer, every).begin
    half_lives = None
    if components.schedule.keep_half_life and components.stages:
        half_lives = HalfLives(
            spec=components.spec,
            optimizer=optimizer,
            reference_batch=components.schedule.reference_batch or 1,
            decays=tuple(group["weight_decay"] for group in optimizer.param_groups),
        )
    scale = LossScale() if components.precision == "fp16" else None
    # What is the model's own moves before what follows the model.
    first: list[Stateful] = [] if scale is None else [scale]
    for feature in components.features:
        first += feature.parts(module, world)
    return StepContext(
        model=model,
        objective=components.objective,
        terms=tuple(sorted(weights_of(components.objective, components.example))),
        strategy=components.strategy,
        sync=components.parallel.sync,
        deferred_fits=components.parallel.deferred_fits,
        normalizer=config.batch.normalizer,
        coupling=components.coupling,
        optimizer=optimizer,
        lr=components.spec.lr,
        base_lrs=tuple(group["lr"] for group in optimizer.param_groups),
        lr_scale=components.lr_scale,
        follow_batch=half_lives,
        schedule=components.schedule,
        total_steps=components.total_steps,
        clip_norm=config.clip_norm,
        loss_scale=scale,
        parts=[*first, *parts],
        world=world,
        on_out_of_memory=on_out_of_memory,
        **norms,
    )
