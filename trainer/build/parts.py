"""Build everything a run is made of: data, model, objective, optimizer, order, cut."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from torch import nn

from trainer.accumulate.base import GradientStrategy, seed_draws
from trainer.build.consistency import check_data, check_model
from trainer.build.data_sets import data_sets, held_out_of, limits_of_model, make_loader
from trainer.build.instantiate import Built, arguments_of, check_names, construct, look_up
from trainer.build.parallel import (
    ParallelSetup,
    is_sharded,
    is_undecided,
    layout_invariant_cut,
    parallel_setup,
    planned_device,
)
from trainer.config.durations import cadence_steps
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError, DataError
from trainer.core.micro_batch import Fields
from trainer.core.world import World, rng_key
from trainer.data.loader import Loader, Request
from trainer.data.samples import INPUT_IDS, preserve_generators
from trainer.data.view import DataView
from trainer.models.bind import bind
from trainer.models.check import check_unwrapped
from trainer.models.meta_start import Weights, build_on_meta
from trainer.models.recompute import checkpoint_blocks
from trainer.models.sparse import refuse_sparse
from trainer.models.statistics import batch_statistics
from trainer.objectives.base import ModelCall, Objective, weights_of
from trainer.optim.optimizers import OptimizerSpec, OwnOptimizer
from trainer.optim.schedules import Schedule
from trainer.parallel.sync import SyncPolicy
from trainer.plan.cut import Cut, IntArray, Layout
from trainer.plan.cuts import Budget
from trainer.plan.order import Order
from trainer.training.batches import Source
from trainer.training.evaluation import HeldOut
from trainer.training.kit import Kit
from trainer.tune.layout import layout_for, packs

OURS = "trainer."
SMALL_BYTES = 2**30
"""Parameters of a model that any rank can hold whole while `parallel=auto` is open."""


@final
@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of, before it is tuned.

    Attributes:
        module: the model on its device, neither compiled nor wrapped. To be sharded, its
            parameters are on the meta device.
        weights: what parameters on the meta device begin with.
        notes: lines to show when the run begins.
        num_workers: loading processes per rank.
        call: runs it on the fields it takes, under the run's precision.
        example: one collated micro-batch of a single sample, the longest; packed under packing.
        held_out: None where the data leave nothing to evaluate on.
    """

    config: RunConfig
    world: World
    train_set: DataView
    num_workers: int
    source: Source
    held_out: HeldOut | None
    module: nn.Module
    weights: Weights | None
    notes: tuple[str, ...]
    call: ModelCall
    objective: Objective
    spec: OptimizerSpec
    schedule: Schedule
    strategy: GradientStrategy
    parallel: ParallelSetup
    cut: Cut
    layout: Layout
    total_steps: int
    example: Fields

    @property
    def global_batch(self) -> int:
        """What `batch.global` came to."""
        return self.source.order.global_batch

    def every(self, cadence: float | None) -> int | None:
        """Resolve a cadence in steps, or as a share of the run; None is never."""
        return None if cadence is None else cadence_steps(cadence, self.total_steps)

    @property
    def lr_scale(self) -> float:
        """What `scheduler.scale` multiplies every learning rate by."""
        return self.schedule.batch_factor(self.global_batch)

    def kit(self, *, is_fresh: bool = True) -> Kit:
        """Compose the step. Builds the optimizer; the model may not be replaced after it.

        Args:
            is_fresh: whether a model on the meta device gets the weights it begins with; if not,
                they are to be loaded.
        """
        model = self.parallel.lay_out(
            self.module,
            self.call,
            self.world,
            self.weights.draw if self.weights is not None and is_fresh else None,
        )
        optimizer = self.spec.build(self.module)
        if self.config.compile:
            # In place: names, weights and checkpoints stay those of the bare module.
            self.module.compile(dynamic=True)
        return Kit(
            model=model,
            objective=self.objective,
            terms=tuple(sorted(weights_of(self.objective, self.example))),
            strategy=self.strategy,
            sync=self.parallel.sync,
            retry_with=self.parallel.retry_with,
            normalizer=self.config.batch.normalizer,
            optimizer=optimizer,
            lr=self.spec.lr * self.lr_scale,
            base_lrs=tuple(group["lr"] * self.lr_scale for group in optimizer.param_groups),
            schedule=self.schedule,
            total_steps=self.total_steps,
            clip_norm=self.config.clip_norm,
            world=self.world,
        )


def assemble(config: RunConfig, world: World) -> Parts:
    """Build everything a run is made of.

    Raises:
        ConfigError: parts do not fit together, or a class is not what its place needs.
        DataError: the data cannot be read, or do not fill a step.
    """
    train_set, eval_set = data_sets(config, world)
    lengths = train_set.lengths
    order = _order(config, lengths)
    build = partial(_component, config)
    objective = build("objective", Objective)
    module, weights, notes = build_model(config, world, train_set)
    limits = limits_of_model(module, objective)
    loader = make_loader(config, train_set, world, limits)
    layout, example = _layout(config, world, train_set, loader, objective, module)
    setup = parallel_setup(config, world, module, build("sync", SyncPolicy))
    parts = Parts(
        config=config,
        world=world,
        train_set=train_set,
        num_workers=loader.num_workers,
        source=Source(order=order, lengths=lengths, loader=loader, objective=objective),
        held_out=held_out_of(config, eval_set, layout, limits),
        module=module,
        weights=weights,
        notes=notes,
        call=bind_run(module, config, world),
        objective=objective,
        spec=_optimizer(config),
        schedule=build("scheduler", Schedule),
        strategy=_strategy(config, objective),
        parallel=setup,
        cut=layout_invariant_cut(build("accum", Cut), config),
        layout=replace(layout, lockstep=setup.sync.lockstep and world.size > 1),
        total_steps=config.steps or order.num_steps(config.total_epochs or 1),
        example=example,
    )
    parts.spec.freeze(module)
    _check(parts)
    return parts


def check_consistency(parts: Parts, *, begins: bool) -> None:
    """Refuse ranks that do not hold the same data and model. Collective.

    Args:
        parts: of this rank.
        begins: whether the model's values count; if not, they are to be loaded.

    Raises:
        ConfigError: the models differ.
        DataError: the data do.
    """
    evaluated = [] if parts.held_out is None else [parts.held_out.loader.dataset]
    check_data(parts.world, [parts.train_set, *evaluated])
    check_model(parts.world, parts.module, parts.weights, begins=begins)


def _layout(
    config: RunConfig,
    world: World,
    data: DataView,
    loader: Loader,
    objective: Objective,
    module: nn.Module,
) -> tuple[Layout, Fields]:
    """Find what hardware, model and data ask of every cut, and one micro-batch as it asks.

    Raises:
        ConfigError: `accum.packed=true`, and something cannot be packed.
        DataError: the longest sample cannot be read.
    """
    lengths = data.lengths
    longest = int(lengths.argmax())
    request = Request(ids=(longest,), epoch=0, pad_to=int(lengths[longest]))
    example, unfit = loader.load(request), None
    if config.accum.packed is not False:
        unfit = _unfit_to_pack(loader, replace(request, packed=True), data, objective)
    packed = packs(
        config.accum.packed,
        module,
        unfit=unfit,
        device=planned_device(config, world),
        precision=config.precision,
    )
    layout = layout_for(
        lengths,
        world_size=world.size,
        device_type=planned_device(config, world).type,
        packed=packed,
        compiled=config.compile,
        group_size=objective.group_size,
    )
    return layout, loader.load(replace(request, packed=True)) if packed else example


def _unfit_to_pack(
    loader: Loader, request: Request, data: DataView, objective: Objective
) -> str | None:
    """Say why documents cannot be laid end to end; None when they can."""
    if data.collate is not None:
        return f"{data.kind} collates samples itself"
    if objective.scope != "sample":
        return f"an objective of scope {objective.scope} needs samples apart"
    try:
        fields = loader.load(request)
    except DataError as error:
        return str(error)
    return None if INPUT_IDS in fields else f"the samples hold no {INPUT_IDS}"


def bind_run(module: nn.Module, config: RunConfig, world: World) -> ModelCall:
    """Bind a module to the run's precision."""
    autocast = torch.bfloat16 if config.precision == "bf16" else None
    return bind(module, autocast=autocast, device_type=world.device.type)


def build_model(
    config: RunConfig, world: World, data: DataView
) -> tuple[nn.Module, Weights | None, tuple[str, ...]]:
    """Build the model with weights drawn from the seed, on the rank's device.

    Returns:
        The model; if it is to be sharded, what its parameters, which are on the meta device, are
        to begin with; and what there is to tell.

    Raises:
        ConfigError: it knows fewer tokens than the data hold, or is not to be spread over ranks.
    """
    known = data.optional("vocab_size")
    typed = config.model.params.get("vocab_size")
    if known and typed and typed < known:
        raise ConfigError(
            f"model.vocab_size={typed}: the data hold {known} different tokens; "
            f"the smallest valid value is {known}"
        )
    if known is None and "vocab_size" in config.model.params and typed is None:
        raise ConfigError(
            "model.vocab_size: these data do not say how many different tokens they hold; "
            "type it, e.g. model.vocab_size=50257"
        )
    given = {"vocab_size": known, "max_length": config.data.params.get("max_length")}

    def build() -> nn.Module:
        seed_draws(rng_key(config.seed, "weights"), world.device)
        return check_unwrapped(construct(config.model, "model", nn.Module, config.trust, given))

    weights, notes = None, []
    may_shard = is_sharded(config, world)
    is_open = is_undecided(config, world)
    with preserve_generators():
        if config.model.target.startswith(OURS) and (may_shard or is_open):
            module, weights = build_on_meta(build)
            if is_open and sum(p.nbytes for p in module.parameters()) <= SMALL_BYTES:
                module, weights = build(), None
        else:
            module = build()
            if may_shard:
                notes.append(
                    "the model is built whole on every rank before it is sharded: only models of "
                    "this package start in shards"
                )
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(world.device))  # type: ignore[no-untyped-call] # untyped in torch
    module.train()
    if config.activation_checkpointing is True and not checkpoint_blocks(module):
        raise ConfigError(
            "activation_checkpointing=true: this model has no list of blocks (nn.ModuleList) "
            "to recompute; use activation_checkpointing=false"
        )
    return module, weights, tuple(notes)


def _component(config: RunConfig, key: str, expected: type[Built]) -> Built:
    return construct(getattr(config, key), key, expected, config.trust)


def _order(config: RunConfig, lengths: IntArray) -> Order:
    batch = config.batch
    if batch.global_batch is None:
        raise ConfigError("batch.global: needs a value, or accum.micro and accum.steps")
    return Order(len(lengths), config.seed, batch.global_batch, batch.unit, batch.tail, lengths)


def _optimizer(config: RunConfig) -> OptimizerSpec:
    kind = look_up(config.optimizer, "optimizer", config.trust)
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer):
        names = config.optimizer.params.keys() - {"groups", "lr", "weight_decay"}
        check_names(kind, "optimizer", sorted(names))
        return OwnOptimizer.of(kind, arguments_of(config.optimizer, "optimizer", config.trust))
    return construct(config.optimizer, "optimizer", OptimizerSpec, config.trust)


def _strategy(config: RunConfig, objective: Objective) -> GradientStrategy:
    component = config.accum.gradient
    strategy = construct(component, "accum.gradient", GradientStrategy, config.trust)
    if objective.scope not in strategy.scopes:
        raise ConfigError(
            f"accum.gradient: {type(strategy).__name__} is not exact for an objective of scope "
            f"{objective.scope}; it knows {', '.join(sorted(strategy.scopes))}"
        )
    return strategy


def _check(parts: Parts) -> None:
    """Refuse what no cut can make exact, and a schedule that does not fit into the run.

    Raises:
        ConfigError: naming what, and what to type.
    """
    parts.schedule.factor(0, parts.total_steps)
    refuse_sparse(parts.module)
    longest = int(parts.source.lengths.max())
    if isinstance(parts.cut, Budget) and longest > parts.cut.max_tokens:
        raise ConfigError(
            f"accum.max_tokens: {parts.cut.max_tokens} is less than the longest sample, of "
            f"{longest} tokens. The nearest valid value is accum.max_tokens={longest}"
        )
    norm = batch_statistics(parts.module)
    if norm is not None and not parts.cut.keeps_order:
        raise ConfigError(
            f"model: {norm} is BatchNorm, whose result depends on the cut, and "
            f"accum={parts.config.accum.name or parts.config.accum.target} chooses the cut: "
            "type accum=fixed accum.micro=N batchnorm=micro, which states it, or use GroupNorm"
        )
    if parts.config.batch.normalizer == "micro_batches" and not parts.cut.keeps_order:
        raise ConfigError(
            "batch.normalizer=micro_batches: a mean of means is only defined for stated counts in "
            "sample order: type accum=fixed accum.micro=N"
        )
