"""Build the training and held-out data; what their class does not part, we do."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sized
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from trainer.assemble.instantiate import construct, look_up
from trainer.config.messages import show
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError, DataError
from trainer.core.world import World
from trainer.data.bad_samples import readable
from trainer.data.joined import Joined
from trainer.data.samples import HELD_OUT, TRAIN, faults_of
from trainer.data.split import Overlap, Split, find_overlap, have_equal_contents, split_warnings
from trainer.data.view import DataView, split_by_seed

HOLDOUT = 0.05
"""Share that is held out where nobody says."""

HELD_OUT_NAMES = (HELD_OUT, "validation", "val", "valid", "dev", "eval", "test")
"""What a held-out part may be called, the first one first, beside one called `train`."""

LABELLING_LIBRARY = "datasets"
"""Its factories take `split` as a label of what they give, or as the name of a part in a file."""


def build_data(config: RunConfig, world: World) -> tuple[DataView, DataView | None, Split]:
    """Build the training and held-out data, and say how they were parted. Collective.

    A class whose constructor takes `split` parts itself, as does one that gives a mapping of parts.
    Of one data set, or of two with equal contents, `data.holdout` is held out here.

    Raises:
        ConfigError: an argument of the data set is wrong, or its share is.
        TrainError: the data cannot be built or read.
    """
    params, taken = dict(config.data.params), _arguments(config)
    share = params.get("holdout", HOLDOUT)
    is_share = isinstance(share, int | float) and 0 <= share < 1
    if "holdout" not in taken and not is_share:
        raise ConfigError(
            f"data.holdout={show(share)}: must be at least 0 and below 1, or 0 for none"
        )
    seed = config.data.split_seed
    built, rule, is_twice = _parts(config, params, seed, world)
    warnings: list[str] = []
    if is_twice:
        warnings.append(
            f"data: both parts of {config.data.target} are the same {len(built[0])} samples, so "
            f"data.holdout={share:g} of them is held out; for none, type data.holdout=0"
        )
    asked = built[0].optional("holdout")
    asked = asked if isinstance(asked, int | float) else None
    if len(built) == 1:
        share = share if is_share else HOLDOUT
        built = [split_by_seed(built[0], each, share, seed) for each in (TRAIN, HELD_OUT)]
        rule, asked = "samples drawn by data.split_seed", share
    train, rest = built
    split = Split(rule=rule, holdout=asked, seed=seed, warnings=tuple(warnings))
    if not len(rest) or share == 0:
        return train, None, split
    if config.command in {"train", "plan"}:  # which show what is found
        found = world.on_main(lambda: asdict(find_overlap(train, rest)))
        split = replace(split, overlap=Overlap(**found))
    return train, rest, replace(split, warnings=(*warnings, *split_warnings(split, train, rest)))


def all_data(config: RunConfig, world: World) -> tuple[DataView, DataView | None, Split]:
    """Build every sample of the data to be evaluated on: `data.holdout=all`. Collective.

    Of data that bring their own parts these are all of them, in turn. Raises as `build_data`.
    """
    seed = config.data.split_seed
    components, _, _ = _parts(config, {**config.data.params, "holdout": 0}, seed, world)
    components = [part for part in components if len(part)] or components[:1]
    every = components[0] if len(components) == 1 else _view(Joined(components), config)
    return every, every if len(every) else None, Split(rule="all of them", holdout=None, seed=seed)


def _view(dataset: Any, config: RunConfig) -> DataView:  # noqa: ANN401 - any data set
    return DataView(dataset, timeout_s=config.parallel.timeout_s)


def _arguments(config: RunConfig) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(look_up(config.data, "data", config.trust)).parameters


def _parts(
    config: RunConfig, params: Mapping[str, Any], seed: int, world: World
) -> tuple[list[DataView], str, bool]:
    """Build all parts that a data set brings, or the one it is, without what cannot be read.

    Returns:
        The parts, by what they are parted, and whether they were one data set, given twice.

    Raises:
        ConfigError: the data set does not know the name of a part.
    """
    target, taken = look_up(config.data, "data", config.trust), _arguments(config)
    params = {k: v for k, v in params.items() if k != "holdout" or k in taken}
    component = config.data.model_copy(update={"params": params})
    is_label = target.__module__.partition(".")[0] == LABELLING_LIBRARY
    # A seed of its own makes other data of a data set, or other parts; `seed` does neither.
    given = {"on_bad": config.data.on_bad, "seed": seed, "split_seed": seed}

    def build(**more: str) -> Any:  # noqa: ANN401 - whatever it makes
        with faults_of(component.target):
            return construct(component, "data", Sized, config.trust, {**given, **more})

    if "split" in taken and params.get("split") is None and not is_label:
        built = [build(split=TRAIN)]
        try:
            built.append(build(split=HELD_OUT))
        except ConfigError as error:
            hint = "to hold out a share of one part, type data.split=NAME"
            raise ConfigError(*(f"{fault}; {hint}" for fault in error.faults)) from error
        rule = "parts of the data set itself"
    else:
        built, rule = _named_parts(build(), component.target)
    views = [_view(each, config) for each in built]
    rule = views[0].optional("split_rule") or rule
    is_twice = len(views) > 1 and world.on_main(partial(have_equal_contents, *views))
    views = views[:1] if is_twice else views
    if config.data.on_bad != "stop" and "on_bad" not in taken:  # else the data set does it
        views = readable(views, config.seed, world)
    return views, rule, is_twice


def _named_parts(built: Any, target: str) -> tuple[list[Any], str]:  # noqa: ANN401 - any data set
    """Take the parts for training and evaluation out of a mapping, such as a `DatasetDict`."""
    if not isinstance(built, Mapping) or not all(isinstance(name, str) for name in built):
        return [built], ""
    names = [TRAIN, *(name for name in HELD_OUT_NAMES if name in built)][:2]
    if len(built) == 1:
        names = [*built]
    elif TRAIN not in built:
        raise DataError(
            f"data: {target} gives the parts {', '.join(built) or 'none'}: call one of them train, "
            "or type which to take: data.split=NAME, where it takes `split`"
        )
    if odd := [name for name in names if not isinstance(built[name], Sized)]:
        raise DataError(
            f"data: {target}: part {odd[0]!r} is a {type(built[odd[0]]).__name__}, which has no "
            "length; load it whole, without streaming=True"
        )
    return [built[name] for name in names], f"parts {' and '.join(names)} of the data set"
