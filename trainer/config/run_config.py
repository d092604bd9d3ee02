"""Define a run's config: every key with its type and range. Defaults and docs stand in `conf/`.

A config is composed, validated and turned into a `RunConfig` once, at the edge. Nothing here
knows Hydra, numpy or torch, so a mistake is answered before any of them is imported. The contract
of a run is what its steps depend on. Micro-batches, ranks, sync, workers and the device are no part
of it, since they compute the same steps.
"""

from __future__ import annotations

import hashlib
import json
import math
import pkgutil
from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, Self, get_args

import yaml
from pydantic import Field, create_model

from trainer.config import components, sections
from trainer.config.amounts import parse_time
from trainer.config.cards import CardName
from trainer.config.command_words import ALL_COMMANDS, OF_OTHER_DATA, READING_COMMANDS
from trainer.config.components import COMPONENTS, Component, Count, Natural, NonEmptyText, Section
from trainer.config.declared import declared
from trainer.config.messages import ancestors, did_you_mean, flat, line, show
from trainer.config.rules import complete_sizes
from trainer.core.coupling import MEAN_OF_MEANS, NONE, Coupling, strictest
from trainer.core.durable import read_json
from trainer.core.run_folder import RunFolder

FINE_TUNING = (8, 128, 100)
"""Smallest and largest default global batch where weights are loaded, and the steps an epoch that
it leaves, if it can."""

# What the optimizer step is made of, beside `steps` and `epochs`; the rest is execution.
_STEP_KEYS: tuple[str, ...] = ("batch", "seed", "data", "model", "objective", "optimizer")
_STEP_KEYS += ("tokenizer", "scheduler", "clip_norm", "precision", "parts")
_STEP_KEYS += components.FEATURES
# Within them, and free all the same.
# What is skipped is behind every checkpoint, as `saved_runs` sees to.
_FREE_KEYS = ("data.on_bad", "data.show", "data.skip_steps", "objective.metrics")
# Null where the optimizer's class has them by what the model's weights are.
_BY_JOB = {"optimizer.lr", "optimizer.betas", "optimizer.weight_decay"}


class RunConfig(Section):
    """One run, composed and valid. What its keys mean stands in `conf/`."""

    command: str
    name: components.Word | None
    batch: components.Batch
    accum: components.Accum
    sync: Component
    parallel: sections.ParallelSection
    model: Component
    transforms: tuple[Component, ...] = Field(strict=False)
    tokenizer: Component
    adapter: Component
    data: components.DataKeys
    objective: components.ObjectiveKeys
    optimizer: Component
    scheduler: Component
    steps: Count | None
    epochs: Count | None
    max_time: components.Time | None
    seed: components.Seed
    clip_norm: components.Positive | None
    ema: sections.Ema
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"]
    device: Literal["auto", "cpu", "cuda"] | CardName
    network: components.Bandwidth | None
    compile: bool
    deterministic: bool | Literal["layout"]
    activation_checkpointing: bool | components.AutoWord
    num_workers: components.AutoWord | Natural
    profile: Natural
    eval: sections.Eval
    checkpoint: sections.Checkpoint
    log: sections.Log
    stop: sections.Stop
    sweep: sections.SweepSection
    nonfinite: sections.Nonfinite
    hooks: tuple[Component, ...] = Field(strict=False)
    parts: tuple[Component, ...] = Field(strict=False)
    logger: tuple[Component, ...] = Field(strict=False)
    outputs: NonEmptyText
    init: NonEmptyText | None
    # A key with a dot: `init` has a value of its own
    init_partial: bool = Field(alias="init.partial")
    resume: NonEmptyText | None
    resume_allow: components.Words
    run: NonEmptyText | None
    step: Literal["last", "best", "ema"] | Natural
    matrix: bool
    export: sections.Export
    prompt: str | None
    generate: sections.Generate
    trust: components.Words
    # Not keys of the interface. `choices`: the option of every group, `accum/gradient` too
    choices: dict[str, Any] = Field(default_factory=dict)
    unset: tuple[str, ...] = Field((), strict=False)  # keys of the step at their defaults, to show
    config_dir: str | None = None  # folder of the user's own options; None without one

    @property
    def max_seconds(self) -> float:
        """Seconds after which a process of the run is to be saved and end."""
        return parse_time(self.max_time or "") or math.inf

    @property
    def total_epochs(self) -> int | None:
        """Passes over the data; None where `steps` says how long the run is."""
        return None if self.steps is not None else self.epochs or 1

    @property
    def reads_all(self) -> bool:
        """Whether every sample of the data is read, as those of other data than the run's."""
        return self.command in OF_OTHER_DATA or self.data.params.get("holdout") == "all"

    @property
    def features(self) -> dict[str, Component]:
        """What features there are, by key."""
        return {key: getattr(self, key) for key in components.FEATURES}

    @property
    def model_transforms(self) -> dict[str, Component]:
        """What changes the model by its key, in order; the adapter is the last."""
        listed = {f"transforms[{i}]": entry for i, entry in enumerate(self.transforms)}
        return {**listed, "adapter": self.adapter}

    def own_classes(self, *, typed: bool = True) -> list[tuple[str, str]]:
        """List classes beyond this program and the model libraries, with their dotted keys.

        Our own classes are among them where they are arguments of another. Those that the user
        named themselves may be left out.
        """
        named: dict[str, Component] = {path: attrgetter(path)(self) for path in COMPONENTS}
        named |= dict(self.listed())
        found = []
        for key, each in named.items():
            if each.typed_target and not typed:
                continue
            section = {"_target_": each.target, **each.params}
            if isinstance(each, components.ObjectiveKeys):
                section["metrics"] = [*each.metrics]
            for place, target in components.targets_in(key, section):
                is_ours = place == key and target.partition(".")[0] == "trainer"
                libraries = components.LIBRARY_BASES.get(place, ())
                if not is_ours and target.rpartition(".")[0] not in libraries:
                    found.append((place, target))
        return found

    def listed(self) -> Iterator[tuple[str, Component]]:
        """Give the classes of lists and of held-out sets, each with its key: `hooks[0]`."""
        for name in components.LISTS:
            entries: tuple[Component, ...] = getattr(self, name)
            for place, each in enumerate(entries):
                yield f"{name}[{place}]", each
        for name, each in self.eval.sets.items():
            yield f"{components.EVAL_SETS}.{name}", each

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages that `trust` has to name where nobody types the run's classes."""
        return tuple(sorted({each.partition(".")[0] for _, each in self.own_classes()}))

    def of_size(self, size: int) -> Self:
        """Give the same with another `batch.global`."""
        batch = self.batch.model_copy(update={"global_batch": size})
        return self.model_copy(update={"batch": batch})

    def with_global_batch(self, world_size: int) -> Self:
        """Fill in `batch.global` where `accum.micro` and `accum.steps` give it; cut as before."""
        params = self.accum.params
        if not {"micro", "steps"} <= params.keys() or self.batch.unit != "samples":
            return self
        micro, steps = params["micro"], params["steps"]
        if self.batch.global_batch is None and None in (micro, steps):
            # The sizes are arguments of the batch's own class.
            return self
        size = complete_sizes(self.batch.global_batch, micro, steps, world_size)
        # One of the two is enough, and leaves nothing to contradict on another number of ranks.
        cut = dict(params)
        if micro is not None:
            cut["steps"] = None
        accum = self.accum.model_copy(update={"params": cut})
        return self.of_size(size).model_copy(update={"accum": accum})


FullConfig: type[RunConfig] = create_model(
    "FullConfig",
    __base__=RunConfig,
    __module__=__name__,
    command=(Literal[ALL_COMMANDS], ...),
    **dict.fromkeys(components.FEATURES, (Component, ...)),  # type: ignore[call-overload]
)
"""The config with a key for each feature, and every command: the one that is built."""


def to_plain(config: RunConfig) -> dict[str, Any]:
    """Write a config as `config.yaml` holds it: as it was composed, with the options by name.

    `trust`, consent and `--config-dir` stay out: a file cannot give them.
    """
    plain: dict[str, Any] = _plain(config)
    for key in ("trust", "config_dir"):
        del plain[key]
    plain["logger"] = [each.name or _plain(each) for each in config.logger]
    # The settings of a tracker stand in a section of its name, beside the list.
    for each in config.logger:
        if each.name:
            plain[each.name] = _plain(each)
    return plain


def _plain(value: Any) -> Any:  # noqa: ANN401 - gives mappings, lists and scalars
    if isinstance(value, Component):
        fields = {"_target_": value.target, **value.params}
        for name, info in sorted(type(value).model_fields.items()):
            if name not in Component.model_fields:
                fields[info.alias or name] = getattr(value, name)
        value = fields
    elif isinstance(value, Section):
        items = type(value).model_fields.items()
        value = {info.alias or name: getattr(value, name) for name, info in items}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_plain, value)]
    return value


def to_text(config: RunConfig) -> str:
    """Write a config for another process of the run, consent and all.

    As YAML, in order: keys of a mapping may be numbers, of which JSON makes text.
    """
    return yaml.safe_dump(_plain(config.model_dump(by_alias=True)), sort_keys=False)


def from_text(text: str) -> RunConfig:
    """Read what `to_text` wrote."""
    return FullConfig.model_validate(yaml.safe_load(text))


def digests(plain: Mapping[str, Any]) -> dict[str, str]:
    """Hash every key's value that must be the same for all processes of a run."""
    found = dict[str, str]()
    for key, value in flat(plain).items():
        text = json.dumps(value, sort_keys=True, default=str)
        found[key] = hashlib.sha256(text.encode()).hexdigest()
    return found


def stated_coupling(config: RunConfig) -> Coupling:
    """Say what couples the samples of a run by its config alone, whatever its model is."""
    if config.batch.normalizer == "micro_batches":
        return MEAN_OF_MEANS
    for key, feature in config.features.items():
        if declared(feature.target).flags.get("accepts_cut"):
            why = f"{key}={feature.label} makes the cut a part of the step"
            return Coupling("micro_batch", why=why)
    return NONE


def contract(
    config: RunConfig, *, coupling: Coupling = NONE, ranks: int | None = None
) -> dict[str, Any]:
    """List what changes the step: flat, JSON-able, equal for every way to execute the run.

    With the coupling of the run's samples, the cut, over so many ranks, may be part of the step.
    """
    plain = to_plain(config)
    tree = {key: plain[key] for key in _STEP_KEYS}
    tree |= {"steps": config.steps, "epochs": config.total_epochs}
    # Only where there is one, so that a key that is new changes the terms of no other run.
    if config.ema.decay is not None:
        tree["ema"] = {"decay": config.ema.decay}
    if config.transforms:
        tree["transforms"] = plain["transforms"]
    if config.adapter.target != components.NO_ADAPTER:
        tree["adapter"] = plain["adapter"]
    if strictest(coupling, stated_coupling(config)).fixes_cut:
        own = components.extra_keys("accum")
        tree["accum"] = {key: value for key, value in plain["accum"].items() if key not in own}
        if ranks is not None:
            tree["parallel"] = {"ranks": ranks}
    free = {*_FREE_KEYS}
    for key, feature in config.features.items():
        for name, kind in declared(feature.target).types.items():
            if components.FREE in get_args(kind):
                free.add(f"{key}.{name}")
    terms = flat(tree)
    for key in free:
        terms.pop(key, None)
    # The type in which gradients are summed is of the step, whatever the cut is.
    return {**terms, "accum.buffer": config.accum.buffer}


def evaluation_file(config: RunConfig) -> str:
    """Name what `train evaluate` writes: evaluate.json, or of other data a file of their own."""
    if not config.reads_all:
        return RunFolder.EVALUATION
    return f"evaluate-{config_hash(_plain(config.data))[:8]}.json"


def result_of(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Give Python what a command wrote: what its file has, or what its feature says."""
    files = {"train": RunFolder.RESULT, "plan": RunFolder.PLAN, "verify": RunFolder.VERIFY}
    files["evaluate"] = evaluation_file(config)
    command, found = READING_COMMANDS.get(config.command), dict[str, Any]()
    if config.command in files:
        found = read_json(folder / files[config.command])
    elif command is not None and command.result is not None:
        found = pkgutil.resolve_name(command.result)(config, folder)
    return found


def config_hash(terms: Mapping[str, Any]) -> str:
    """Give the SHA-256 of a contract: equal for runs that take the same steps, however executed."""
    return hashlib.sha256(json.dumps(terms, sort_keys=True).encode()).hexdigest()


def contract_diff(
    old: Mapping[str, Any], new: Mapping[str, Any], allow: Collection[str] = ()
) -> list[str]:
    """Name what a resumed run would change about its step, one line per key.

    Keys and whole sections that `allow` names may change; `steps` and `epochs` may grow anyway.
    `precision=auto` and `objective=auto` are what the checkpoint says that they became, as are
    settings of the optimizer that are left to the job.
    """
    faults = []
    for key, before, now in _changes(old, new, allow):
        is_clock = key in ("steps", "epochs") and isinstance(before, int) and isinstance(now, int)
        if not (is_clock and (now or 0) > (before or 0)):
            change = "it may grow; to make it less" if is_clock else "to change it"
            text = f"the run has {show(before)}; {change}, resume_allow=[{key}]"
            faults.append(line(key, now, text))
    return faults


def _changes(
    old: Mapping[str, Any], new: Mapping[str, Any], allow: Collection[str]
) -> Iterator[tuple[str, Any, Any]]:
    """Give each key of two contracts that differs, with both values, unless it may or was open."""
    are_open = [t.get("objective._target_") == components.AUTO_OBJECTIVE for t in (old, new)]
    for key in sorted(old.keys() | new.keys()):
        before, now = (terms.get(key) for terms in (old, new))
        is_open = key == "precision" and "auto" in (before, now)
        is_open |= key in _BY_JOB and None in (before, now)
        is_open |= key.startswith("objective.") and are_open[0] != are_open[1]
        if before != now and not is_open and {key, *ancestors(key)}.isdisjoint(allow):
            yield key, before, now


def reading_faults(config: RunConfig, old: Mapping[str, Any]) -> list[str]:
    """Name what a config to read a run with changes of what the run's figures depend on."""
    roots = {"model", "transforms", "adapter", "tokenizer"}
    # Weights that are exported are the same under any objective.
    if config.command != "export":
        roots.add("objective")
    if config.command == "evaluate" and not config.reads_all:
        # By these samples are held out.
        roots |= {"data", "seed"}
    faults, new = list[str](), contract(config)
    # Another path to the base of a model: what it gives is compared with what the run had.
    allowed = {*config.resume_allow}
    for key in new:
        if key.startswith("model.") and components.NAMES_A_PATH.fullmatch(key):
            allowed.add(key)
    for key, before, now in _changes(old, new, allowed):
        remedy = "leave it out"
        if key.startswith("data."):
            remedy += "; all of other data: data.path=OTHER data.holdout=all"
        if key == "data.path":
            remedy += "; the same data in another place: resume_allow=[data.path]"
        if key == "tokenizer.path":
            remedy += "; the same tokenizer in another place: resume_allow=[tokenizer.path]"
        if key.partition(".")[0] in roots:
            faults.append(line(key, now, f"the run has {show(before)}; {remedy}"))
    return faults


def step_faults(config: RunConfig, old: Mapping[str, Any]) -> list[str]:
    """Name what a config changes about a run's contract, and unknown keys of `resume_allow`."""
    keys = {*flat(to_plain(config)), *old}
    known = keys.union(*map(ancestors, keys))
    # Arguments of classes may be those of one that the run had before; our own keys are known.
    ours, unknown = list[str](), list[str]()
    for path in COMPONENTS:
        ours += [f"{path}.{name}" for name in components.extra_keys(path)]
    for key in config.resume_allow:
        if key not in known and (components.owner_of(key) is None or did_you_mean(key, ours)):
            text = f"{key}: unknown setting.{did_you_mean(key, known)}"
            unknown.append(line("resume_allow", [key], text))
    return [*unknown, *contract_diff(old, contract(config), config.resume_allow)]
