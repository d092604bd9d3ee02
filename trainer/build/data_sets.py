"""Build the data sets of a run, what loads them, and what is held out."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from trainer.build.instantiate import construct, takes
from trainer.build.parallel import planned_device
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.world import World
from trainer.data.limits import Limits
from trainer.data.loader import Loader
from trainer.data.readable import readable
from trainer.data.samples import faults_of
from trainer.data.view import DataView, split_by_seed
from trainer.models.vocabulary import vocabulary_of
from trainer.objectives.base import Objective
from trainer.plan.cut import Layout
from trainer.training.evaluation import HeldOut

CPU_WORKERS = 0
GPU_WORKERS = 4


def data_sets(config: RunConfig, world: World) -> tuple[DataView, DataView | None]:
    """Build the training and the held-out data; what the data class does not split, we do.

    Likewise what is bad in it, where it is to be passed over. Collective then.

    Raises:
        ConfigError: the share to hold out is not known.
    """
    component = config.data
    has = partial(takes, component, "data", config.trust)
    passes_over = config.data.on_bad == "skip" and not has("on_bad")
    params = dict(component.params)
    if "holdout" in params and params["holdout"] is None and not has("holdout"):
        raise ConfigError(
            f"data.holdout=null: {component.target} takes no holdout, so a share is held out by "
            "seed: type one, e.g. 0.05, or 0 for none"
        )
    holdout = params.get("holdout") if has("holdout") else params.pop("holdout", 0.05)
    if not has("holdout") and not (isinstance(holdout, int | float) and 0 <= holdout < 1):
        raise ConfigError(f"data.holdout={holdout}: must be at least 0 and below 1")
    component = component.model_copy(update={"params": params})
    given = {"on_bad": config.data.on_bad, "seed": config.seed}
    splits = [{"split": split} for split in ("train", "held_out")] if has("split") else [{}]
    built: list[DataView] = []
    for split in splits:
        with faults_of(component.target):
            dataset: Any = construct(component, "data", Sized, config.trust, {**given, **split})
        built.append(DataView(dataset))
    if passes_over:
        built = readable(built, config.seed, world)
    if has("split"):
        return built[0], built[1]
    train, rest = (
        split_by_seed(built[0], split=split, holdout=holdout, seed=config.seed)  # type: ignore[arg-type]
        for split in ("train", "held_out")
    )
    return train, rest if len(rest) else None


def limits_of_model(module: nn.Module, objective: Objective) -> Limits:
    """Find what token ids and labels must be below; labels of one's own objective mean anything."""
    tokens, labels = vocabulary_of(module)
    is_own = not type(objective).__module__.startswith("trainer.")
    return Limits(tokens=tokens, labels=None if is_own else labels)


def make_loader(config: RunConfig, data: DataView, world: World, limits: Limits) -> Loader:
    """Make the loader of the training data, with as many workers as asked."""
    auto = GPU_WORKERS if planned_device(config, world).type == "cuda" else CPU_WORKERS
    workers = auto if config.num_workers == "auto" else config.num_workers
    on_gpu = world.device.type == "cuda"
    return Loader(data, num_workers=workers, seed=config.seed, pin_memory=on_gpu, limits=limits)


def held_out_of(
    config: RunConfig, data: DataView | None, layout: Layout, limits: Limits
) -> HeldOut | None:
    """Give the evaluation data; None where nothing is held out."""
    if data is None or not len(data):
        return None
    return HeldOut(
        loader=Loader(data, num_workers=0, seed=config.seed, limits=limits),
        lengths=data.lengths,
        layout=replace(layout, lockstep=False),
        max_tokens=1,
        is_ordered=config.deterministic == "layout",
    )
