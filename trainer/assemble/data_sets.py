"""Open the data of a config, and its tokenizer; say what data and model take from each other."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

from torch import Tensor

from trainer.assemble.instantiate import construct, look_up, refuse_unused
from trainer.config import data_sets
from trainer.config.command_words import OF_OTHER_DATA
from trainer.config.components import EVAL_SETS, Component
from trainer.config.messages import show
from trainer.config.run_config import FINE_TUNING, RunConfig
from trainer.core.errors import ConfigError, DataError
from trainer.core.world import World
from trainer.data.joined import MixtureSource
from trainer.data.samples import faults_of, image_field
from trainer.data.source import DataSource, SourceSpec
from trainer.data.split import HOLDOUT, OWN_PART
from trainer.data.view import DataView
from trainer.models.facts import model_library

LABELLING_LIBRARY = "datasets"
"""Its factories take `split` as a label of what they give, or as the name of a part in a file."""
_ANY = ("auto", "bytes")
"""Options that go with data which give tokens, or bytes, of their own."""


@final
class RunTokenizer:
    """The tokenizer of a run, built once, for the first part that names an argument `tokenizer`."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.built: Any = None  # None until a part takes it

    def given_to(self, component: Component, key: str) -> Mapping[str, Any]:
        """Give the argument `tokenizer` of a component, if its constructor takes one."""
        config = self._config
        target = look_up(component, key, config.trust)
        if "tokenizer" not in inspect.signature(target).parameters:
            return {}
        if self.built is None:
            given = {"model": source_of_model(config)}
            self.built = construct(config.tokenizer, "tokenizer", object, config.trust, given)
        if tokens := getattr(target, "special_tokens", ()):
            self.built.add_tokens([*tokens], special_tokens=True)
        return {"tokenizer": self.built}

    def refuse_unused(self) -> None:
        """Refuse a tokenizer that was typed and that no part takes, so that it does nothing."""
        config = self._config
        name = config.tokenizer.label
        params = {key: value for key, value in config.tokenizer.params.items() if value is not None}
        if self.built is None and (name not in _ANY or params):
            typed = f"tokenizer={name}"
            for key, value in params.items() if name in _ANY else ():
                typed = f"tokenizer.{key}={show(value)}"
            text = "takes no tokenizer; type data=hf, or leave it out"
            raise ConfigError(f"{typed}: data={config.data.label} {text}")


def source_of_model(config: RunConfig) -> str | None:
    """Name what the model is loaded from, or configured by; None where it is neither."""
    params = config.model.params
    paths = (params.get("path"), params.get("config"), model_library().source_in(params))
    for path in paths:
        if isinstance(path, str):
            return path
    return None


def open_data(
    config: RunConfig,
    world: World,
    tokenizer: RunTokenizer | None = None,
    labels: Sequence[str] | None = None,
    trained_format: Mapping[str, Any] | None = None,
) -> DataSource:
    """Open what a run trains and evaluates on, or all samples for an evaluation. Collective.

    `tokenizer` is the run's, which data that take one are given. `labels` are the classes that the
    run has learnt, whose numbers hold in other data that are evaluated; `trained_format` says how
    its records were read, where these are others.
    """
    # `train` and `plan` show what is found on both sides.
    compares, own = config.command in {"train", "plan"}, config.data
    others = list[tuple[str, str, Component]]()
    if own.eval_path is not None:
        path = {**own.params, **data_sets.names_in_path(own.target), "path": own.eval_path}
        others.append((OWN_PART, "data.eval_path", own.model_copy(update={"params": path})))
    others += [(name, f"{EVAL_SETS}.{name}", each) for name, each in config.eval.sets.items()]
    is_whole = config.reads_all
    holds_out = not is_whole and own.eval_path is None
    spec = partial(_spec, config, tokenizer, trained_format=trained_format)
    opened, warnings = _with_sources(config, own, partial(spec, holds_out=holds_out), world)
    if is_whole:
        data = spec("data", opened, holds_out=holds_out, labels=labels).open_all(world)
    else:
        data = spec("data", opened, holds_out=holds_out).open(world, compares=compares)
    split = replace(data.split, warnings=(*warnings, *data.split.warnings))
    data = replace(data, split=split)
    if compares:
        refuse_unused("data", own.params, data.train.facts.unused)
    elif config.command != "evaluate":
        return data
    for name, key, component in others:
        if name in data.held_out:
            raise ConfigError(f"{key}: a source of the data has that name; choose another")
        with _faults_under(key):
            # Classes that are words have the numbers that they have in training; or none are.
            facts = data.train.facts
            labels = facts.label_names
            if facts.num_classes and not labels:
                labels = ()
            own_spec = partial(spec, labels=labels, trained_format=facts.record_format)
            part = own_spec(key, component, holds_out=False).open_all(world).train
            its_own = dict[str, Any]()
            for setting, value in component.params.items():
                # What it shares with the data was refused there, under its own key.
                if value != own.params.get(setting):
                    its_own[setting] = value
            refuse_unused(key, its_own, part.facts.unused)
            data = data.evaluating(name, part, key, world, compares=compares)
    return data


def _with_sources(
    config: RunConfig, data: Component, spec: Callable[..., SourceSpec], world: World
) -> tuple[Component, list[str]]:
    """Open the sources of data that have some, and put them among the arguments. Collective.

    What the class of the data does not take is a setting of all sources that take it. Gives the
    data, and what to warn of.
    """
    if (argument := data_sets.sources_argument(data.target)) is None:
        return data, []
    if config.reads_all:
        key, text = "data.holdout=all", "all of one data set is evaluated"
        if config.command in OF_OTHER_DATA:
            key, text = "data.sources", f"{config.command} reads one data set"
        raise ConfigError(f"{key}: {text}; type data=hf data.path=OTHER")
    target = look_up(data, "data", config.trust)
    if (check := getattr(target, "check_sources", None)) is not None:
        check(data.params)  # sources may take minutes to open
    taken = inspect.signature(target).parameters
    own, shared, spare = _parted(data.params, taken)
    opened, warnings, labels = dict[str, MixtureSource](), list[str](), None
    for key, (component, weight) in data_sets.source_components(data).items():
        target = look_up(component, key, config.trust)
        names = {*inspect.signature(target).parameters, "holdout"}
        params = dict[str, Any]()
        for name, value in shared.items():
            if name in names:
                params[name] = value
        whole = component.model_copy(update={"params": params | component.params})
        with _faults_under(key):
            found = spec(key, whole, labels=labels).open(world, compares=False)
        unused = found.train.facts.unused
        refuse_unused(key, component.params, unused)
        spare -= names - unused.keys()
        held_out = found.held_out.get(OWN_PART)
        source = MixtureSource(train=found.train, held_out=held_out, weight=weight)
        opened[key.rpartition(".")[2]] = source
        warnings += [re.sub(r"^data\b", key, text) for text in found.split.warnings]
        labels = labels or found.train.facts.label_names
    if spare:
        name = min(spare)
        raise ConfigError(f"data.{name}={show(shared[name])}: no source takes it; leave it out")
    return data.model_copy(update={"params": own | {argument: opened}}), warnings


def _parted(
    params: Mapping[str, Any], taken: Container[str]
) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """Part settings: those of the data, those of its sources, and which of these need a taker."""
    own, shared, spare = dict[str, Any](), dict[str, Any](), set[str]()
    defaults = data_sets.source_option()
    for name, value in params.items():
        # `holdout` counts for the data and for each source.
        if name in taken or name == "holdout":
            own[name] = value
        if name not in taken and value is not None:
            shared[name] = value
            # A default was typed by nobody, so that no source need take it.
            if value != defaults.get(name):
                spare.add(name)
    return own, shared, spare


@contextmanager
def _faults_under(key: str) -> Iterator[None]:
    """Put the key of a held-out set where a message says `data`, or `data.path` of another path."""
    word = re.compile(r"^data\b(?!\.sources)")
    if key == "data.eval_path":
        word = re.compile(r"^data(\.path)?\b")
    try:
        yield
    except DataError as error:
        text = word.sub(key, str(error))
        raise DataError(text.replace(" data.part=", f" {key}.part=")) from error


def _spec(
    config: RunConfig,
    tokenizer: RunTokenizer | None,
    key: str,
    data: Component,
    *,
    holds_out: bool,
    labels: Any = None,  # noqa: ANN401 - names, whatever holds them
    trained_format: Mapping[str, Any] | None = None,
) -> SourceSpec:
    """Say how the data set of a component is built and parted."""
    target = look_up(data, key, config.trust)
    taken, params = inspect.signature(target).parameters, dict(data.params)
    share: Any = 0.0
    if holds_out:
        share = params.get("holdout", HOLDOUT)
    is_share = isinstance(share, int | float) and 0 <= share < 1
    if "holdout" in taken:
        if not holds_out:
            params["holdout"] = 0
    elif not is_share:
        text = "must be at least 0 and below 1, or 0 for none"
        raise ConfigError(f"data.holdout={show(share)}: {text}")
    else:
        params.pop("holdout", None)
    component = data.model_copy(update={"params": params})
    # A seed of its own makes other data of a data set, or other parts; `seed` does neither.
    split_seed = config.data.split_seed
    given: dict[str, Any] = {
        **{"on_bad": config.data.on_bad, "seed": split_seed, "split_seed": split_seed},
        **(tokenizer or RunTokenizer(config)).given_to(component, "data"),
        "label_names": labels,
        "trained_format": trained_format,
        "model_path": source_of_model(config),
        "objective": config.objective.name,
    }
    # Of what cannot be read it says why there is no prediction.
    is_asked = config.command in OF_OTHER_DATA
    if is_asked:
        given |= {"learns": False}
    if "task" in taken:
        given |= purpose_of_model(config)
    is_label = target.__module__.partition(".")[0] == LABELLING_LIBRARY
    is_typed = "split" in taken and not is_label and params.get("split") is not None
    gives_parts = not is_typed and callable(getattr(target, "splits", None))

    def build(**more: str) -> Any:  # noqa: ANN401 - whatever it makes
        with faults_of(component.target):
            # Of what gives parts, these have a length.
            kind: type[Any] = Sized
            if gives_parts:
                kind = object
            return construct(component, key, kind, config.trust, {**given, **more})

    if not is_share:
        share = HOLDOUT
    return SourceSpec(
        build=build,
        name=component.target,
        takes_split="split" in taken and not (is_label or is_typed or gives_parts),
        is_part=is_typed,
        holdout=share,
        split_seed=split_seed,
        skips=config.data.on_bad != "stop" and "on_bad" not in taken and not is_asked,
        seed=config.seed,
    )


def purpose_of_model(config: RunConfig) -> dict[str, Any]:
    """Give what the model is made for, as arguments of a data set."""
    model, source = config.model, source_of_model(config)
    return dict(model_library().arguments_for_data(model.target, model.params, source))


def with_fine_tuning_batch(
    config: RunConfig, num_samples: int, recorded: Mapping[str, Any], *, compares: bool
) -> RunConfig:
    """Give a config that leaves `batch.global` open the size that suits loaded weights.

    A run that goes on has the size that it began with, by the contract of its checkpoint,
    `recorded`; it is empty where a run begins. Where the loss `compares` the samples of a step, or
    its steps have a fixed number of micro-batches, the default stays.
    """
    params = config.model.params
    is_loaded = config.init or params.get("path") or model_library().source_in(params)
    is_open = "batch.global" in config.unset and config.accum.params.get("steps") is None
    if not is_open or config.batch.unit != "samples":
        return config
    if (size := recorded.get("batch.global")) is not None:
        return config.of_size(size)
    if not is_loaded or compares or purpose_of_model(config)["task"] == "embedding":
        return config
    smallest, largest, steps = FINE_TUNING
    # The largest power of two that leaves an epoch so many steps, within the two bounds.
    power = 1 << max(0, (num_samples // steps).bit_length() - 1)
    return config.of_size(min(max(power, smallest), largest))


def arguments_from_data(
    config: RunConfig, data: DataView, tokenizer: RunTokenizer, recorded: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Give what a model may take from the data; of a run that is read, what it took there."""
    known, typed = data.facts.vocab_size, config.model.params.get("vocab_size")
    if recorded:
        size = typed or recorded.get("vocab_size")
        if known and size and size < known:
            raise DataError(f"data: hold {known} different tokens; the run's model has {size}")
        return dict(recorded)
    if known and typed and typed < known:
        text = f"the data hold {known} different tokens; the smallest valid value is {known}"
        raise ConfigError(f"model.vocab_size={typed}: {text}")
    if known is None and "vocab_size" in config.model.params and typed is None:
        text = "the data do not state a vocabulary size; set it, e.g. model.vocab_size=50257"
        if _image_of(config, data) is not None:
            text = "the samples are images, without tokens; type model=resnet or model=vit"
        raise ConfigError(f"model.vocab_size: {text}")
    # What was typed or, where that is null, what the data made of it.
    params = config.data.params
    length = params.get("max_length")
    if length is None and "max_length" in params:
        length = data.facts.max_length
    return {
        "vocab_size": known,
        "num_classes": data.facts.num_classes,
        "label_names": data.facts.label_names,
        "label_kind": data.facts.label_kind,
        "pad_token_id": data.facts.pad_token_id,
        "new_token_ids": getattr(tokenizer.built, "new_token_ids", None),
        "max_length": length,
        "channels": _channels(config, data),
    }


def _channels(config: RunConfig, data: DataView) -> int | None:
    """Count the channels of an image, for a model that asks."""
    taken = inspect.signature(look_up(config.model, "model", config.trust)).parameters
    if "channels" not in taken or config.model.params.get("channels") is not None:
        return None
    if (image := _image_of(config, data)) is None:
        text = "the samples have no image to take it from; type data=digits, or the number"
        raise ConfigError(f"model.channels=null: {text}")
    return len(image)


def _image_of(config: RunConfig, data: DataView) -> Tensor | None:
    """Give the image of the first sample, `(channels, height, width)`, if it has one."""
    if not len(data):
        return None
    with data.isolated_rng():
        sample = data.read(0, seed=config.seed, epoch=0)
    name = image_field(sample)
    return None if name is None else sample[name]
