"""Build the data sets of a run: what is trained on, and what is held out."""

from __future__ import annotations

import inspect
from collections.abc import Sized
from typing import Any

from trainer.build.instantiate import construct, look_up
from trainer.config.messages import show
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.world import World
from trainer.data.readable import readable
from trainer.data.samples import faults_of
from trainer.data.view import DataView, split_by_seed

SPLITS = ("train", "held_out")


def data_sets(config: RunConfig, world: World) -> tuple[DataView, DataView | None]:
    """Build the training and the held-out data; what the data class does not split, we do.

    Likewise what is bad in it, where it is to be passed over. Collective then.

    Raises:
        ConfigError: the share to hold out is not known.
    """
    taken = inspect.signature(look_up(config.data, "data", config.trust)).parameters
    params = dict(config.data.params)
    holdout = params.get("holdout") if "holdout" in taken else params.pop("holdout", 0.05)
    is_share = isinstance(holdout, int | float) and 0 <= holdout < 1
    if "holdout" not in taken and not is_share:
        raise ConfigError(
            f"data.holdout={show(holdout)}: must be at least 0 and below 1, e.g. 0.05, or 0 for "
            f"none; {config.data.target} takes no holdout, so a share is held out by seed"
        )
    component = config.data.model_copy(update={"params": params})
    given = {"on_bad": config.data.on_bad, "seed": config.seed}
    built: list[DataView] = []
    for split in SPLITS if "split" in taken else ("",):
        with faults_of(component.target):
            dataset: Any = construct(
                component, "data", Sized, config.trust, {**given, "split": split}
            )
        built.append(DataView(dataset))
    if config.data.on_bad == "skip" and "on_bad" not in taken:
        built = readable(built, config.seed, world)
    if "split" not in taken:
        built = [split_by_seed(built[0], each, holdout, config.seed) for each in SPLITS]  # type: ignore[arg-type]
    train, rest = built
    return train, rest if len(rest) else None
