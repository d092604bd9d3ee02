"""Say how the data set of a config is built, and open it."""

from __future__ import annotations

import inspect
from collections.abc import Sized
from typing import Any

from trainer.assemble.instantiate import construct, look_up
from trainer.assemble.tokenizer import RunTokenizer
from trainer.config.messages import show
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.world import World
from trainer.data.samples import faults_of
from trainer.data.source import DataSource, SourceSpec

HOLDOUT = 0.05
"""Share that is held out where nobody says."""

LABELLING_LIBRARY = "datasets"
"""Its factories take `split` as a label of what they give, or as the name of a part in a file."""


def open_data(config: RunConfig, world: World, tokenizer: RunTokenizer | None = None) -> DataSource:
    """Open the training and held-out data of a run, or all samples for an evaluation. Collective.

    `tokenizer` is the run's, which data that take one are given.

    Raises:
        ConfigError: an argument of the data set is wrong, or its share is.
        TrainError: the data cannot be built or read.
    """
    target = look_up(config.data, "data", config.trust)
    taken, params = inspect.signature(target).parameters, dict(config.data.params)
    share = 0.0 if config.evaluates_all else params.get("holdout", HOLDOUT)
    is_share = isinstance(share, int | float) and 0 <= share < 1
    if "holdout" in taken:
        params |= {"holdout": 0} if config.evaluates_all else {}
    elif not is_share:
        text = "must be at least 0 and below 1, or 0 for none"
        raise ConfigError(f"data.holdout={show(share)}: {text}")
    else:
        params.pop("holdout", None)
    component = config.data.model_copy(update={"params": params})
    # A seed of its own makes other data of a data set, or other parts; `seed` does neither.
    split_seed = config.data.split_seed
    given = {
        **{"on_bad": config.data.on_bad, "seed": split_seed, "split_seed": split_seed},
        **(tokenizer or RunTokenizer(config)).given_to(component, "data"),
    }

    is_label = target.__module__.partition(".")[0] == LABELLING_LIBRARY
    is_typed = "split" in taken and not is_label and params.get("split") is not None
    gives_parts = not is_typed and callable(getattr(target, "splits", None))

    def build(**more: str) -> Any:  # noqa: ANN401 - whatever it makes
        with faults_of(component.target):
            kind = object if gives_parts else Sized  # its parts have a length
            return construct(component, "data", kind, config.trust, {**given, **more})

    source = SourceSpec(
        build=build,
        name=component.target,
        takes_split="split" in taken and not (is_label or is_typed or gives_parts),
        is_part=is_typed,
        holdout=share if is_share else HOLDOUT,
        split_seed=split_seed,
        skips=config.data.on_bad != "stop" and "on_bad" not in taken,
        seed=config.seed,
    )
    if config.evaluates_all:
        return source.open_all(world)
    # `train` and `plan` show what is found on both sides.
    return source.open(world, compares=config.command in {"train", "plan"})
