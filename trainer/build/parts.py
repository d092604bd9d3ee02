"""Build everything a run is made of: data, model, objective, optimizer, order, cut."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn

from trainer.accumulate.base import GradientStrategy, seed_draws
from trainer.accumulate.loss_scale import LossScale
from trainer.build.instantiate import arguments_of, check_names, construct, look_up
from trainer.build.packing import leave_out_mask, needs_mask, packing_fault
from trainer.build.parallel import (
    SHARDED,
    ParallelSetup,
    auto_mode,
    parallel_mode,
    parallel_setup,
    planned_device,
)
from trainer.build.precision import resolve_precision, set_matmul_precision
from trainer.config.messages import show
from trainer.config.rules import cadence_steps
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError, DataError
from trainer.core.micro_batch import Fields
from trainer.core.world import World, rng_key
from trainer.data.bad_samples import readable
from trainer.data.collate import LABELS
from trainer.data.loader import Loader, Request
from trainer.data.samples import INPUT_IDS, faults_of, preserve_generators
from trainer.data.view import DataView, split_by_seed
from trainer.models.attention import choose_flash
from trainer.models.bind import AUTOCAST, bind
from trainer.models.check import refuse_lazy, vocabulary_of
from trainer.models.compilation import compile_model
from trainer.models.gpt import GPT
from trainer.models.meta_start import Weights, build_on_meta
from trainer.models.recompute import checkpoint_blocks
from trainer.objectives.base import ModelCall, Objective, weights_of
from trainer.optim.optimizers import OptimizerSpec, OwnOptimizer
from trainer.optim.schedules import Schedule
from trainer.plan.cut import Cut, Layout
from trainer.plan.cuts import Fixed, LayoutInvariant
from trainer.plan.order import Cursor, Order
from trainer.training.batches import Feed, PlannedBatch, Source
from trainer.training.evaluation import HeldOut
from trainer.training.window import Kit
from trainer.tune.layout import COMPILED_SHAPES, has_kernel, layout_for, packs
from trainer.verify.case import hooked

NUM_WORKERS = {"cpu": 0, "cuda": 4}  # loading processes per rank where nobody says
SPLITS = ("train", "held_out")


@final
@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of, before it is tuned.

    Attributes:
        train_set: the samples that are trained on.
        source: the same as steps take them: in order, with their lengths, collated.
        held_out: None where the data leave nothing to evaluate on.
        module: the model on its device, neither compiled nor wrapped. To be sharded, its
            parameters are on the meta device.
        weights: what parameters on the meta device begin with.
        precision: the word that `precision` became.
        call: the module, bound to that precision.
        spec: builds the optimizer, once the model is laid out.
        schedule: factor of every learning rate, by step.
        strategy: how the gradients of micro-batches become the step's.
        parallel: how ranks are used; under `sync=auto` with a policy that the plan may change.
        cut: as typed; that of `accum=auto` is tuned in `prepare`.
        layout: what hardware, model and data ask of every cut.
        total_steps: of the whole run, those before a resumption included.
        example: one collated micro-batch of a single sample, the longest; packed under packing.
    """

    config: RunConfig
    world: World
    train_set: DataView
    source: Source
    held_out: HeldOut | None
    module: nn.Module
    weights: Weights | None
    precision: str
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
    def is_sharded(self) -> bool:
        """Whether the model is laid out in shards; other commands compute in one process."""
        return self.parallel.mode in SHARDED and self.config.command in {"train", "plan"}

    @property
    def data_views(self) -> list[DataView]:
        """What is trained and evaluated on."""
        return [self.train_set, *([self.held_out.loader.dataset] if self.held_out else [])]

    def every(self, cadence: float | None) -> int | None:
        """Resolve a cadence in steps, or as a share of the run; None is never."""
        return None if cadence is None else cadence_steps(cadence, self.total_steps)

    @property
    def lr_scale(self) -> float:
        """What `scheduler.scale` multiplies every learning rate by."""
        return self.schedule.batch_factor(self.source.order.global_batch)

    def feed(self, cut: Cut, world: World, cursor: Cursor) -> Feed:
        """Begin to give the micro-batches of a rank, from a cursor on."""
        return Feed(self.source, cut, self.layout, world, self.config.seed, cursor)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer over the parameters that a model has now, real or fake.

        Raises:
            ConfigError: it steps within backward.
        """
        before, optimizer = hooked(model), self.spec.build(model)
        if new := set(hooked(model)) - set(before):
            raise ConfigError(
                f"optimizer._target_={self.config.optimizer.target}: steps within backward (a hook "
                f"on {min(new)}), so every micro-batch would be a step of its own; use one that "
                "waits for step()"
            )
        return optimizer

    def kit(
        self,
        *,
        is_fresh: bool = True,
        on_out_of_memory: Callable[[PlannedBatch, BaseException], None] | None = None,
        loss_scale: Mapping[str, Any] | None = None,
    ) -> Kit:
        """Compose the step, and build the optimizer; the model may not be replaced after it.

        Unless `is_fresh`, the weights of a model on the meta device are to be loaded. `loss_scale`
        is what a checkpoint of a run in fp16 has.
        """
        draw = self.weights.draw if self.weights is not None and is_fresh else None
        if self.config.compile and self.config.command != "verify":  # which runs copies, in float64
            compile_model(self.module, COMPILED_SHAPES)
        model = self.parallel.lay_out(self.module, self.call, self.world, draw)
        optimizer = self.make_optimizer(self.module)
        return Kit(
            model=model,
            objective=self.objective,
            terms=tuple(sorted(weights_of(self.objective, self.example))),
            strategy=self.strategy,
            sync=self.parallel.sync,
            deferred_fits=all(r.fits for r in self.parallel.rows if r.policy == "deferred"),
            normalizer=self.config.batch.normalizer,
            optimizer=optimizer,
            lr=self.spec.lr * self.lr_scale,
            base_lrs=tuple(group["lr"] * self.lr_scale for group in optimizer.param_groups),
            schedule=self.schedule,
            total_steps=self.total_steps,
            clip_norm=self.config.clip_norm,
            loss_scale=LossScale(**loss_scale or {}) if self.precision == "fp16" else None,
            world=self.world,
            on_out_of_memory=on_out_of_memory,
        )


def assemble(config: RunConfig, world: World, recorded: Mapping[str, Any] | None = None) -> Parts:
    """Build everything a run is made of. Collective.

    `recorded` is the contract of the checkpoint that is read, where there is one.

    Raises:
        TrainError: parts do not fit together, or the data cannot be read or do not fill a step.
    """
    batch, trust = config.batch, config.trust
    # Reading data may take minutes: a class that is not there is named before.
    look_up(config.model, "model", trust)
    objective, spec = construct(config.objective, "objective", Objective, trust), _optimizer(config)
    train_set, eval_set = _data_sets(config, world)
    lengths = train_set.lengths
    assert batch.global_batch is not None  # given by accum.micro and accum.steps where it is null
    order = Order(
        len(lengths), config.seed, batch.global_batch, batch.unit, batch.tail, lengths, config.order
    )
    mode, why = parallel_mode(config, world), None
    may_shard = mode in {"auto", *SHARDED} and config.command in {"train", "plan"}
    module, weights = _model(config, world, train_set, on_meta=may_shard)
    spec.freeze(module)
    if mode == "auto":
        mode, why = world.on_main(lambda: auto_mode(config, world, module))
        if mode == "ddp" and weights is not None:
            # A copy needs the weights themselves, not shards of them.
            module, weights = _model(config, world, train_set)
            spec.freeze(module)
    precision = resolve_precision(config, world, module, recorded)
    set_matmul_precision(precision, world.device)
    auto_workers = NUM_WORKERS[planned_device(config, world).type]
    # Labels of an objective of the user's own mean anything.
    tokens, labels = vocabulary_of(module)
    is_ours = type(objective).__module__.startswith("trainer.")
    known = {INPUT_IDS: tokens, LABELS: labels if is_ours else None}
    limits = {name: limit for name, limit in known.items() if limit is not None}
    num_workers = auto_workers if config.num_workers == "auto" else config.num_workers
    is_gpu = world.device.type == "cuda"
    loader = Loader(
        train_set, num_workers=num_workers, seed=config.seed, pin_memory=is_gpu, limits=limits
    )
    layout, example = _layout(config, world, loader, objective, module, precision)
    setup = parallel_setup(config, world, module, mode, AUTOCAST.get(precision))
    return Parts(
        config=config,
        world=world,
        train_set=train_set,
        source=Source(order=order, lengths=lengths, loader=loader, objective=objective),
        held_out=None if eval_set is None else _held_out(config, eval_set, loader, layout),
        module=module,
        weights=weights,
        precision=precision,
        call=bind_run(module, precision, world),
        objective=objective,
        spec=spec,
        schedule=construct(config.scheduler, "scheduler", Schedule, trust),
        strategy=construct(config.accum.gradient, "accum.gradient", GradientStrategy, trust),
        parallel=replace(setup, why_mode=why),
        cut=_cut(config),
        layout=replace(layout, lockstep=setup.sync.lockstep and world.size > 1),
        total_steps=config.steps or order.num_steps(config.total_epochs or 1),
        example=example,
    )


def _data_sets(config: RunConfig, world: World) -> tuple[DataView, DataView | None]:
    """Build the training and held-out data; what their class does not split, we do. Collective."""
    taken = inspect.signature(look_up(config.data, "data", config.trust)).parameters
    params = dict(config.data.params)
    holdout = params.get("holdout") if "holdout" in taken else params.pop("holdout", 0.05)
    is_share = isinstance(holdout, int | float) and 0 <= holdout < 1
    if "holdout" not in taken and not is_share:
        raise ConfigError(
            f"data.holdout={show(holdout)}: must be at least 0 and below 1, or 0 for none"
        )
    component = config.data.model_copy(update={"params": params})
    given = {"on_bad": config.data.on_bad, "seed": config.seed}
    built: list[DataView] = []
    for split in SPLITS if "split" in taken else ("",):
        with faults_of(component.target):
            dataset: Any = construct(
                component, "data", Sized, config.trust, {**given, "split": split}
            )
        built.append(DataView(dataset, version=config.order, timeout_s=config.parallel.timeout_s))
    if config.data.on_bad == "skip" and "on_bad" not in taken:
        built = readable(built, config.seed, world)
    if "split" not in taken:
        built = [split_by_seed(built[0], each, holdout, config.seed) for each in SPLITS]  # type: ignore[arg-type]
    train, rest = built
    return train, rest if len(rest) else None


def _held_out(config: RunConfig, data: DataView, loader: Loader, layout: Layout) -> HeldOut:
    """Load held-out samples as those of training are; no processes where a thread may do it."""
    return HeldOut(
        loader=loader.of(data, num_workers=loader.num_workers * data.draws_randomness),
        lengths=data.lengths,
        layout=layout,
        max_tokens=1,  # until it is planned
        most=config.eval.samples,
        is_ordered=config.deterministic == "layout",
    )


def _model(
    config: RunConfig, world: World, data: DataView, *, on_meta: bool = False
) -> tuple[nn.Module, Weights | None]:
    """Build the model from the seed; with `on_meta`, a model of ours with its weights beside it."""
    known, typed = data.optional("vocab_size"), config.model.params.get("vocab_size")
    if known and typed and typed < known:
        text = f"the data hold {known} different tokens; the smallest valid value is {known}"
        raise ConfigError(f"model.vocab_size={typed}: {text}")
    if known is None and "vocab_size" in config.model.params and typed is None:
        text = "the data do not state a vocabulary size; set it, e.g. model.vocab_size=50257"
        raise ConfigError(f"model.vocab_size: {text}")
    given = {"vocab_size": known, "max_length": config.data.params.get("max_length")}

    def build() -> nn.Module:
        seed_draws(rng_key(config.seed, "weights"), world.device)
        return refuse_lazy(construct(config.model, "model", nn.Module, config.trust, given))

    with preserve_generators():
        if on_meta and config.model.target.startswith("trainer."):
            module, weights = build_on_meta(build)
        else:
            module, weights = build(), None
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(world.device))  # type: ignore[no-untyped-call] # untyped in torch
    module.train()
    if config.activation_checkpointing is True and not checkpoint_blocks(module):
        text = "this model has no list of blocks (nn.ModuleList) to recompute; use false"
        raise ConfigError(f"activation_checkpointing=true: {text}")
    return module, weights


def bind_run(module: nn.Module, precision: str, world: World) -> ModelCall:
    """Bind a module to the run's precision."""
    return bind(module, autocast=AUTOCAST.get(precision), device_type=world.device.type)


def _layout(
    config: RunConfig,
    world: World,
    loader: Loader,
    objective: Objective,
    module: nn.Module,
    precision: str,
) -> tuple[Layout, Fields]:
    """Find what hardware, model and data ask of every cut, and one micro-batch as it asks."""
    data, device = loader.dataset, planned_device(config, world)
    longest = data.lengths.argmax()
    request = Request(ids=(longest,), epoch=0, pad_to=data.lengths.max())
    example = row = loader.load(request)
    unfit = None
    if data.collate is not None or objective.scope != "sample" or INPUT_IDS not in example:
        unfit = "this data set or objective cannot use packed samples"
    elif config.accum.packed is not False:
        try:
            row = loader.load(replace(request, packed=True))
        except DataError as error:
            unfit = str(error)
    is_taken = isinstance(module, GPT) and has_kernel(module, device, precision)
    choose_flash(device, is_newest=is_taken)
    call = bind_run(module, precision, world)
    if not world.on_main(lambda: needs_mask(loader, module, call)):
        leave_out_mask(module)
    packed = packs(
        config.accum.packed,
        module,
        unfit=unfit,
        device=device,
        precision=precision,
        fill=float(data.lengths.mean()) / max(1, request.pad_to),
        fault=lambda: world.on_main(lambda: packing_fault(loader, module, call)),
    )
    layout = layout_for(
        data.lengths[data.lengths.sample()],
        world_size=world.size,
        device_type=device.type,
        packed=packed,
        compiled=config.compile,
        group_size=objective.group_size,
    )
    return layout, row if packed else example


def _optimizer(config: RunConfig) -> OptimizerSpec:
    kind = look_up(config.optimizer, "optimizer", config.trust)
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer):
        own = config.optimizer.params.keys() - {"groups", "lr", "weight_decay"}
        check_names(kind, "optimizer", sorted(own))
        return OwnOptimizer.of(kind, arguments_of(config.optimizer, "optimizer", config.trust))
    return construct(config.optimizer, "optimizer", OptimizerSpec, config.trust)


def _cut(config: RunConfig) -> Cut:
    """Build the cut; that of `deterministic=layout` is fixed, the same for all numbers of ranks."""
    cut = construct(config.accum, "accum", Cut, config.trust)
    if config.deterministic != "layout":
        return cut
    if not isinstance(cut, Fixed) or cut.micro is None:
        raise ConfigError("deterministic=layout: needs accum=fixed accum.micro=N")
    return LayoutInvariant(micro=cut.micro)
