"""Make the second stage of a run: the module, and what fits it of precision, loss and rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from trainer.accumulate.base import GradientStrategy
from trainer.assemble import hardware
from trainer.assemble.instantiate import construct
from trainer.assemble.loaders import fit_loader
from trainer.assemble.module import build_model
from trainer.assemble.objective import Chosen, choose_objective, frozen_model, trained_objective
from trainer.assemble.saved import Saved
from trainer.assemble.typed import ChosenOptimizer, TypedParts, fitting_optimizer, with_half_lives
from trainer.config.run_config import RunConfig, stated_coupling
from trainer.core.coupling import model_coupling, strictest
from trainer.core.world import World
from trainer.models.frozen import add_frozen
from trainer.optim.schedules import with_length_steps
from trainer.training.data import Data
from trainer.training.model import Model


def make_model(
    config: RunConfig,
    world: World,
    typed: TypedParts,
    data: Data,
    given: Mapping[str, Any],
    saved: Saved,
    *,
    with_values: bool,
) -> tuple[Model, Chosen, ChosenOptimizer]:
    """Build the model, and choose what fits it: precision, loss, optimizer, ranks. Collective."""
    features, terms = typed.features, saved.terms
    stored = saved.stored
    goes_on = stored is not None and stored.is_resumed
    if stored is not None and goes_on:
        known = typed.objective and typed.objective.objective
        if known is None:  # nobody typed it
            known = trained_objective(config, terms.contract, typed.tokenizer)
        stored = replace(stored, make_frozen=partial(frozen_model, config, known))
    build = partial(
        build_model,
        *(config, world, given, typed.spec),
        stored=stored,
        adjust=typed.adjusting(data.order.most_samples, is_padded=not data.lengths.is_constant),
        with_values=with_values,
    )
    mode, why_mode = hardware.parallel_mode(config, world), None
    module, weights = build(in_shards=hardware.may_shard(config, world))
    if mode == "auto":
        mode, why_mode = world.on_main(lambda: hardware.auto_mode(config, world, module))
        if mode == "ddp" and weights is not None:
            # A copy needs the weights themselves, not shards of them.
            module, weights = build()

    # What its hardware computes in, and what its samples are to it.
    precision = hardware.resolve_precision(config, world, module, terms.contract)
    fit_loader(data.loader, module)

    # The loss, and how gradients of micro-batches and of ranks become the step's.
    chosen = choose_objective(
        *(config, typed.objective, module, data.loader, typed.tokenizer),
        *(features, terms.contract),
    )
    objective = chosen.objective
    if not goes_on:
        make = partial(frozen_model, config, objective)
        added = add_frozen(module, make, weights or {}, world.device)
        weights = weights and {**weights, **added}
    strategy = construct(
        *(config.accum.gradient, "accum.gradient", GradientStrategy, config.trust),
        given={"objective": objective},
    )
    setup = hardware.parallel_setup(
        *(config, world, module, mode, precision),
        single_backward=strategy.single_backward,
        begun=terms.sync,
        why_mode=why_mode,
    )

    # The update: lengths of the schedule become steps, and half-lives follow the global batch.
    schedule = with_length_steps(typed.schedule, data.order, data.lengths, data.total_steps)
    optimizer = fitting_optimizer(config, module, terms.contract, objective)
    optimizer = with_half_lives(optimizer, schedule, data.order.sizes)
    # How far the samples of a step depend on each other, by all that couples them.
    coupling = model_coupling(module)
    if any(feature.accepts_cut for feature in features):  # whoever typed it knows
        coupling = replace(coupling, warning="")
    coupling = strictest(coupling, stated_coupling(config), objective.coupling)
    model = Model(
        module=module,
        weights=weights,
        precision=precision,
        device=world.device,
        objective=objective,
        normalizer=config.batch.normalizer,
        strategy=strategy,
        coupling=coupling,
        setup=setup,
        spec=optimizer.spec,
        schedule=schedule,
        clip_norm=config.clip_norm,
    )
    return model, chosen, optimizer
