"""Build everything a run is made of: data, model, objective, optimizer, order, cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import nn

from trainer.accumulate.base import GradientStrategy
from trainer.assemble import data_sets
from trainer.assemble.features import Features, StepShape
from trainer.assemble.instantiate import check_components, construct
from trainer.assemble.layout import find_layout, longest
from trainer.assemble.loaders import held_out_loader, loader_of, prepare_with
from trainer.assemble.model import build_model
from trainer.assemble.objective import Chosen, fitting_objective, typed_objective
from trainer.assemble.optimizer import (
    ChosenOptimizer,
    fitting_optimizer,
    typed_optimizer,
    with_half_lives,
)
from trainer.assemble.parallel import (
    auto_mode,
    may_shard,
    parallel_mode,
    parallel_setup,
)
from trainer.assemble.precision import bind_run, resolve_precision, set_matmul_precision
from trainer.assemble.saved import Saved
from trainer.assemble.schedule import typed_schedule, with_length_steps
from trainer.assemble.tokenizer import RunTokenizer
from trainer.config.run_config import RunConfig, stated_coupling
from trainer.core.coupling import Coupling, model_coupling, strictest
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import Fields
from trainer.core.world import World
from trainer.data.loader import Loader
from trainer.data.split import OWN_PART, Split
from trainer.data.view import DataView
from trainer.models.first_weights import FirstWeights, any_values
from trainer.objectives.base import ModelCall, Objective
from trainer.optim.optimizers import OptimizerSpec
from trainer.optim.schedules import Schedule
from trainer.parallel.setup import SHARDED, ParallelSetup
from trainer.plan.batch_size import BatchSize
from trainer.plan.cut import Cut, Layout
from trainer.plan.order import Cursor, Order, Stage
from trainer.training.batches import Feed, Source
from trainer.training.evaluation import HeldOut
from trainer.verify.case import hooked


@final
@dataclass(frozen=True, kw_only=True)
class Components:
    """What a run is made of."""

    config: RunConfig
    world: World
    split: Split  # how they and the held-out ones were parted
    source: Source  # the same as steps take them: in order, with their lengths, collated
    held_out: Mapping[str, HeldOut]  # what is evaluated on, by name; the run's own part has none
    # The model on its device, neither compiled nor wrapped. To be sharded, its parameters are on
    # the meta device.
    module: nn.Module
    weights: FirstWeights | None  # what parameters on the meta device begin with
    precision: str  # the word that `precision` became
    call: ModelCall  # the module, bound to that precision
    chosen: Chosen  # the objective, as it was typed or as the model is made for
    # Builds the optimizer, once the model is laid out; as it was typed or as the model asks for
    chosen_optimizer: ChosenOptimizer
    schedule: Schedule  # factor of every learning rate, by step
    strategy: GradientStrategy  # how the gradients of micro-batches become the step's
    coupling: Coupling  # of the samples of a step, by model, objective and normalizer
    features: Features
    # How ranks are used; under `sync=auto` with a policy that the plan may change
    parallel: ParallelSetup
    cut: Cut  # as typed; `prepare` tunes it, or takes it from the checkpoint
    layout: Layout  # what hardware, model and data ask of every cut
    total_steps: int  # of the whole run, those before a resumption included
    stages: tuple[Stage, ...]  # of those steps; none where all have one size
    # One collated micro-batch of a single sample, the longest; packed under packing
    example: Fields
    # What the model's constructor may take from the data, such as their vocabulary
    given: Mapping[str, Any]
    tokenizer: Any  # None where no part takes one
    noise_every: int | None = None  # steps between measurements; `prepare` finds it

    @property
    def train_set(self) -> DataView:
        """The samples that are trained on."""
        return self.source.loader.dataset

    @property
    def objective(self) -> Objective:
        """What turns the model's outputs into loss sums."""
        return self.chosen.objective

    @property
    def spec(self) -> OptimizerSpec:
        """What builds the optimizer."""
        return self.chosen_optimizer.spec

    @property
    def is_sharded(self) -> bool:
        """Whether the model is laid out in shards; other commands compute in one process."""
        return self.parallel.mode in SHARDED and self.config.command in {"train", "plan"}

    @property
    def own_part(self) -> HeldOut | None:
        """The run's own held-out part; None where the data leave nothing to evaluate on."""
        return self.held_out.get(OWN_PART)

    @property
    def data_views(self) -> list[DataView]:
        """What is trained and evaluated on."""
        return [self.train_set, *(each.loader.dataset for each in self.held_out.values())]

    @property
    def adds_up(self) -> bool:
        """Whether a micro-batch has one backward, by which it adds its own samples' gradient."""
        strategy = self.strategy
        is_single = strategy.single_backward and not strategy.before
        return is_single and self.coupling.kind != "batch" and not self.coupling.joins_ranks

    def lr_scale(self, at: Cursor) -> float:
        """What the size of the step that begins at a position multiplies every rate by."""
        order = self.source.order
        own = order.sizes.lr_factor(order.position(at))
        return self.schedule.batch_factor(order.size_of(at)) * own

    def bind(self, module: nn.Module) -> ModelCall:
        """Bind a module, such as a copy of the run's, to the run's precision."""
        return bind_run(module, self.precision, self.world)

    def trial_values(self) -> AbstractContextManager[None]:
        """Lend the main rank values for a trial, where the model has none yet."""
        return _trial_values(self.module, self.weights, self.world)

    def feed(self, world: World) -> Feed:
        """Begin to give the micro-batches of a rank."""
        start, seed = self.source.order.start, self.config.seed
        return Feed(self.source, self.cut, self.layout, world, seed, start, self.noise_every)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer over the parameters that a model has now, real or fake."""
        before, optimizer = hooked(model), self.spec.build(model)
        if new := set(hooked(model)) - set(before):
            raise ConfigError(
                f"optimizer._target_={self.config.optimizer.target}: steps within backward (a hook "
                f"on {min(new)}), so every micro-batch would be a step of its own; use one that "
                "waits for step()"
            )
        return optimizer


def assemble(
    config: RunConfig,
    world: World,
    saved: Saved | None = None,
    *,
    with_values: bool = False,
) -> Components:
    """Build everything a run is made of. Collective.

    `saved` is what the checkpoint says that is read, where there is one. A plan for a machine that
    is not here builds the model without weights, unless `with_values`.
    """
    saved = saved or Saved()
    batch, terms = config.batch, saved.terms

    # Reading data may take minutes: what can be refused without them is refused before.
    check_components(config)
    tokenizer = RunTokenizer(config)
    typed, spec = typed_objective(config, tokenizer), typed_optimizer(config)
    schedule, cut, features = typed_schedule(config), _cut(config), Features.of(config)
    features.check_cut(config, cut)
    sizes = _sizes(config)

    # The data, and which of them each step takes.
    data = data_sets.open_data(config, world, tokenizer, terms.given.get("label_names"))
    train_set, lengths = data.train, data.train.lengths
    if sizes.is_constant:
        config, sizes = _fitting_sizes(config, typed, len(lengths), terms.contract)
    order = Order(len(lengths), config.seed, sizes, batch.unit, batch.tail, lengths)
    total_steps = config.steps or order.num_steps(config.total_epochs or 1)
    schedule = with_length_steps(schedule, order, lengths, total_steps)

    # The model, as its data, its ranks and its features ask for it.
    given = data_sets.arguments_from_data(config, train_set, terms.given)
    shape = StepShape(
        largest=order.most_samples,
        is_stated="micro_batch" in cut.couplings,
        is_padded=not lengths.is_constant,
    )
    build = partial(
        build_model,
        config,
        world,
        given,
        spec,
        stored=saved.stored,
        adjust=partial(features.adjust, shape=shape),
        with_values=with_values,
    )
    module, weights, mode, why = _build_in_mode(config, world, build)
    precision = resolve_precision(config, world, module, terms.contract)
    set_matmul_precision(precision, world.device)

    # What follows from data and model together: the loss, and what samples share.
    loader = loader_of(config, world, train_set, module)
    # What a model does with padding and documents follows from its layers, whatever it has learnt.
    with _trial_values(module, weights, world):
        chosen = _choose(config, typed, module, loader, tokenizer)
        tokenizer.refuse_unused()
        strategy = construct(
            *(config.accum.gradient, "accum.gradient", GradientStrategy, config.trust),
            given={"objective": chosen.objective},
        )
        coupling = _coupling(config, features, module, chosen.objective)
        layout, example = find_layout(config, world, loader, coupling, module, precision)
    setup = parallel_setup(
        *(config, world, module, mode, precision),
        single_backward=strategy.single_backward,
        begun=terms.sync,
    )
    return Components(
        config=config,
        world=world,
        split=data.split,
        source=Source(order=order, lengths=lengths, loader=loader, objective=chosen.objective),
        held_out={
            name: held_out_loader(config, name, each, loader, layout, module)
            for name, each in data.held_out.items()
        },
        module=module,
        weights=weights,
        precision=precision,
        call=bind_run(module, precision, world),
        chosen=chosen,
        chosen_optimizer=with_half_lives(
            fitting_optimizer(config, module, terms.contract), schedule, sizes
        ),
        schedule=schedule,
        strategy=strategy,
        coupling=coupling,
        features=features,
        parallel=replace(setup, why_mode=why),
        cut=_whole(cut, order, config, world, coupling),
        layout=replace(
            layout, lockstep=(setup.sync.lockstep or coupling.joins_ranks) and world.size > 1
        ),
        total_steps=total_steps,
        stages=order.stages(total_steps),
        example=example,
        given=given,
        tokenizer=tokenizer.built,
    )


def _trial_values(
    module: nn.Module, weights: FirstWeights | None, world: World
) -> AbstractContextManager[None]:
    """Lend the main rank values for a model in shards whose own are not read yet."""
    is_tried = weights is not None and world.is_main
    return any_values(module, world.device) if is_tried else nullcontext()


def _build_in_mode(
    config: RunConfig, world: World, build: Callable[..., tuple[nn.Module, FirstWeights | None]]
) -> tuple[nn.Module, FirstWeights | None, str, str | None]:
    """Build the model as the mode of its ranks needs it; gives that mode, and why it is that."""
    mode, why = parallel_mode(config, world), None
    module, weights = build(in_shards=may_shard(config, world))
    if mode == "auto":
        mode, why = world.on_main(lambda: auto_mode(config, world, module))
        if mode == "ddp" and weights is not None:
            # A copy needs the weights themselves, not shards of them.
            module, weights = build()
    return module, weights, mode, why


def _choose(
    config: RunConfig,
    typed: Chosen | None,
    module: nn.Module,
    loader: Loader,
    tokenizer: RunTokenizer,
) -> Chosen:
    """Take the objective that was typed, or the one for the model; samples are prepared for it."""

    def load(objective: Objective | None) -> Fields:
        prepare_with(loader, objective)
        return loader.load(longest(loader.dataset))

    chosen = typed or fitting_objective(config, module, load, tokenizer)
    prepare_with(loader, chosen.objective)
    return chosen


def _sizes(config: RunConfig) -> BatchSize:
    """Build what sizes the steps; accum.micro and accum.steps give a `batch.global` of null."""
    size = {"global_batch": config.batch.global_batch, "unit": config.batch.unit}
    return construct(config.batch, "batch", BatchSize, config.trust, size)


def _fitting_sizes(
    config: RunConfig, typed: Chosen | None, num_samples: int, recorded: Mapping[str, Any]
) -> tuple[RunConfig, BatchSize]:
    """Choose the size that nobody typed by the model's weights and its data."""
    compares = typed is not None and typed.objective.coupling.kind == "batch"
    config = data_sets.with_fine_tuning_batch(config, num_samples, recorded, compares=compares)
    return config, _sizes(config)


def _cut(config: RunConfig) -> Cut:
    """Build the cut; that of `deterministic=layout` is fixed, the same for all numbers of ranks."""
    cut = construct(config.accum, "accum", Cut, config.trust)
    if config.activation_checkpointing == "auto" and not cut.is_tunable:
        raise ConfigError("activation_checkpointing=auto: needs accum=auto")
    if config.deterministic != "layout":
        return cut
    if (same := cut.for_any_ranks) is None:
        text = "needs fixed micro-batches; type accum=fixed accum.micro=8"
        raise ConfigError(f"deterministic=layout: {text}")
    return same


def _coupling(
    config: RunConfig, features: Features, module: nn.Module, objective: Objective
) -> Coupling:
    """Say how far the samples of a step depend on each other, by all that couples them."""
    found = model_coupling(module)
    if any(feature.accepts_cut for feature in features):
        found = replace(found, warning="")
    return strictest(found, stated_coupling(config), objective.coupling)


def _whole(cut: Cut, order: Order, config: RunConfig, world: World, coupling: Coupling) -> Cut:
    """Take a bound of the size of the step for the cut that leaves it whole, where it counts."""
    is_whole = config.batch.unit == "samples" and world.size == 1
    is_whole &= (config.accum.params.get("micro") or 0) >= order.sizes.largest
    return (cut.in_order if is_whole and coupling.fixes_cut else None) or cut
