"""The schema: every key with type, range, unit and doc, and what must hold between keys.

A config is composed, validated and turned into a `RunConfig` once, at the edge. Nothing here
knows Hydra, numpy or torch, so a mistake is answered before any of them is imported.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError

from trainer.config import rules
from trainer.config.arguments import arguments
from trainer.config.batch import resolve_fixed
from trainer.config.check import check
from trainer.config.components import LIBRARIES, Accum, Component, Data
from trainer.config.habits import hint
from trainer.config.keys import Key, describe
from trainer.config.messages import ancestors, clip, did_you_mean, line, lookup, prune, show
from trainer.config.sections import (
    COMPONENT_PATHS,
    HIDDEN,
    OWN,
    Auto,
    Batch,
    Checkpoint,
    Count,
    Eval,
    Export,
    Flag,
    Log,
    Natural,
    Nonfinite,
    Parallel,
    Positive,
    Section,
    Seed,
    Text,
    Wandb,
    Word,
    Words,
)
from trainer.core.errors import ConfigError


class RunConfig(Section):
    """One run, composed and valid."""

    command: Literal["train", "plan", "verify", "evaluate", "export"] = Field(
        "train", description="what to do; a bare word on the command line is short for it"
    )
    name: Word | None = Field(
        None, description="a word for the run folder, the report and W&B: letters, digits, - _ ."
    )
    batch: Batch = Field(description="the optimizer step: samples or tokens behind it")
    accum: Accum = Field(description="how the global batch is cut; never changes the step")
    sync: Component = Field(description="which backward reduces gradients over ranks")
    parallel: Parallel = Field(description="where parameters and gradients live")
    model: Component = Field(description="any nn.Module; model._target_=package.Class for yours")
    data: Data = Field(description="the samples; data._target_=package.Class for yours")
    objective: Component = Field(description="named loss sums over named weights")
    optimizer: Component = Field(description="the update rule")
    scheduler: Component = Field(description="the learning rate over the steps")
    steps: Count | None = Field(
        None, description="optimizer steps; with epochs null too: one epoch, or as conf/preset says"
    )
    epochs: Count | None = Field(None, description="passes over the training data, for steps")
    seed: Seed = Field(0, description="data order, initial weights, every random draw")
    clip_norm: Positive | None = Field(
        1.0, description="largest 2-norm of the step's gradient; null: no clipping"
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="bf16: autocast over fp32 weights"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where to compute")
    compile: Flag = Field(False, description="torch.compile the model; slow first step")
    deterministic: bool | Literal["layout"] = Field(
        False, description="true: same command, same bits; layout: for every split and ranks too"
    )
    activation_checkpointing: bool | Auto = Field(
        False, description="recompute activations in backward: less memory, about 1/3 more time"
    )
    batchnorm: Literal["micro"] | None = Field(
        None,
        description="micro: yes, BatchNorm is to normalise each micro-batch; with accum=fixed",
    )
    num_workers: Auto | Natural = Field("auto", description="loading processes per rank")
    eval: Eval
    checkpoint: Checkpoint
    log: Log
    nonfinite: Nonfinite
    hooks: tuple[Component, ...] = Field(
        (), strict=False, description="read-only observers, e.g. [package.Hook]"
    )
    wandb: Wandb
    outputs: Text = Field("outputs", description="root of the run folders")
    init: Text | None = Field(
        None, description="run or exported weights that a new run starts from, at step 0"
    )
    resume: Text | None = Field(
        None, description="run folder to continue, or auto: the newest of this name or sweep"
    )
    resume_allow: Words = Field((), description="keys of the step that a resumed run may change")
    run: Text | None = Field(
        None, description="run folder that evaluate, export and verify read; auto: the newest"
    )
    step: Literal["last"] | Natural = Field(
        "last", description="which checkpoint of run= or init=: last, or the number of its step"
    )
    export: Export
    trust: Words = Field(
        (), description="packages of classes of your own, for recipes, evaluate, export and resume"
    )
    choices: Annotated[dict[str, Any], HIDDEN] = Field(default_factory=dict)
    unset: Annotated[tuple[str, ...], HIDDEN] = Field((), strict=False)
    config_dir: Annotated[str | None, HIDDEN] = None

    @property
    def total_epochs(self) -> int | None:
        """Passes over the data; None where `steps` says how long the run is."""
        return None if self.steps is not None else self.epochs or 1

    @property
    def checkpoint_step(self) -> int | None:
        """Which checkpoint of `run=` or `init=` is read; None for the newest that is intact."""
        return None if self.step == "last" else self.step

    @property
    def typed_targets(self) -> frozenset[str]:
        """Groups whose class the user named themselves."""
        typed = {path for path in COMPONENTS if attrgetter(path)(self).typed_target}
        return frozenset(typed | {"hooks" for hook in self.hooks if hook.typed_target})

    @property
    def components(self) -> dict[str, Component]:
        """Everything that names a class, by dotted key; `hooks[0]` is the first hook."""
        named = {path: attrgetter(path)(self) for path in COMPONENTS}
        return named | {f"hooks[{place}]": hook for place, hook in enumerate(self.hooks)}

    @property
    def targets(self) -> list[tuple[str, str]]:
        """Dotted key and import path of every class that the run names."""
        return [pair for key, each in self.components.items() for pair in each.targets(key)]

    def own_classes(self, *, typed: bool = True) -> list[tuple[str, str]]:
        """Those beyond this program and the model libraries; our own as arguments are among them.

        Args:
            typed: whether to list those that the user named themselves.
        """
        return [
            (place, target)
            for key, each in self.components.items()
            if typed or not each.typed_target
            for place, target in each.targets(key)
            if place != key or target.partition(".")[0] != "trainer"
            if target.rpartition(".")[0] not in LIBRARIES.get(place, ())
        ]

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages that `trust` has to name where nobody types the run's classes."""
        return tuple(sorted({each.partition(".")[0] for _, each in self.own_classes()}))

    def settled(self, world_size: int) -> Self:
        """Fill in `batch.global` where `accum.micro` and `accum.steps` give it.

        Args:
            world_size: number of ranks.

        Returns:
            A config whose `batch.global` is a number, and which cuts as this one.

        Raises:
            ConfigError: the sizes contradict; the line names the nearest that agree.
        """
        if self.accum.target != rules.FIXED_CUT or self.batch.unit != "samples":
            return self
        micro, steps = self.accum.params.get("micro"), self.accum.params.get("steps")
        sizes = resolve_fixed(self.batch.global_, micro, steps, world_size)
        # One of the two is enough, and leaves nothing to contradict on another number of ranks.
        cut = self.accum.params | ({"steps": None} if micro is not None else {})
        return self.model_copy(
            update={
                "batch": self.batch.model_copy(update={"global_": sizes.global_size}),
                "accum": self.accum.model_copy(update={"params": cut}),
            }
        )


COMPONENTS: Mapping[str, type[Component]] = {
    **dict.fromkeys(COMPONENT_PATHS, Component),
    "accum": Accum,
    "data": Data,
}
"""Where a config names a class, by dotted key."""

KEYS: Mapping[str, Key] = dict(describe(RunConfig))
"""Every key of the interface in reading order: doc, kind of value, default, choices."""

RETIRED = ("accum.buffer", "batch.schedule", "batchnorm.mode", "batchnorm.group")
"""Keys that earlier versions wrote, and that did nothing: runs go on without them."""

SHOWN_DEFAULTS: tuple[str, ...] = (
    "optimizer.lr",
    "scheduler.warmup",
    "steps",
    "epochs",
    "eval.every",
    "checkpoint.every",
)
"""Keys whose values the start of a run shows as defaults where nobody set them."""


def validate(
    raw: Mapping[str, Any],
    base: Mapping[str, Any],
    typed_targets: Collection[str] = (),
    choices: Mapping[str, Any] | None = None,
    typed_keys: Collection[str] = (),
    config_dir: str | None = None,
) -> RunConfig:
    """Turn a composed config into a valid one, or name everything that is wrong with it.

    Args:
        raw: the composed config as plain mappings, resolved.
        base: the same groups and options composed without any value, of the command line or of a
            recipe: the example for names and types.
        typed_targets: components whose class the user named themselves (`model`, `hooks`).
        choices: option of every group by the folder's name, `accum/gradient` too.
        typed_keys: dotted keys that the command line gives a value.
        config_dir: folder of the user's own options.

    Raises:
        ConfigError: with one line per fault.
    """
    picked = _picked(choices or {}, typed_keys)
    checked = check(raw, base, picked, KEYS, os.environ)
    tree, faults = checked.tree, list(checked.faults)
    faults += rules.between(tree, picked, frozenset(typed_keys))
    told = {_subject(fault) for fault in faults}
    faults += [fault for fault in arguments(tree) if _subject(fault) not in told]
    _give_way(tree, frozenset(typed_keys))
    _hear_wandb_mode(tree, base, typed_keys)
    try:
        fields = _fields(tree, picked, typed_targets)
        unset = [key for key in SHOWN_DEFAULTS if _is_default(key, raw, base, typed_keys)]
        config = RunConfig.model_validate({**fields, "config_dir": config_dir, "unset": unset})
    except ValidationError as error:
        # What cannot be said yet has no type to conform to.
        told = {_subject(fault) for fault in faults}
        further = (_fault(item, tree, picked) for item in error.errors(include_url=False))
        faults += [fault for fault in further if _subject(fault) not in told]
        raise ConfigError(*dict.fromkeys(faults)) from None
    if faults:
        raise ConfigError(*dict.fromkeys(faults))
    return config


def to_plain(config: RunConfig) -> dict[str, Any]:
    """Write a config as `config.yaml` holds it: as it was composed, with the options by name.

    `trust` and the consent to classes of one's own stay out: a file cannot give them. So does
    `--config-dir`, which is typed for a run and not part of it.
    """
    plain: dict[str, Any] = _plain(config)
    del plain["trust"], plain["config_dir"]
    return plain


def from_plain(
    plain: Mapping[str, Any],
    typed_targets: Collection[str] = (),
    trust: Sequence[str] = (),
) -> RunConfig:
    """Read what `to_plain` wrote.

    Args:
        plain: the mapping.
        typed_targets: as for `validate`, from whoever was asked; never from a file.
        trust: likewise.

    Raises:
        ConfigError: the mapping is not a config of this version.
    """
    tree = prune(plain, RETIRED)
    picked = dict(tree.pop("choices", {}))
    tree["trust"] = list(trust)
    try:
        return RunConfig.model_validate(_fields(tree, picked, typed_targets))
    except ValidationError as error:
        faults = [_fault(item, tree, picked) for item in error.errors(include_url=False)]
        raise ConfigError(*dict.fromkeys(faults)) from None


def _picked(choices: Mapping[str, Any], typed: Collection[str]) -> dict[str, Any]:
    """Keep the program's own groups; a class that was typed is no option's any more."""
    named = {group: option for group, option in choices.items() if not group.startswith("hydra/")}
    # Presets follow from the other choices.
    picked = {group: option for group, option in named.items() if "@" not in group}
    for path in COMPONENTS:
        if f"{path}._target_" in typed:
            picked[path.replace(".", "/")] = OWN
    return picked


def _is_default(
    key: str, raw: Mapping[str, Any], base: Mapping[str, Any], typed: Collection[str]
) -> bool:
    """Whether neither the command line nor a recipe sets a key, or the other way to state it."""
    same = {"steps", "epochs"} if key in {"steps", "epochs"} else {key}
    return same.isdisjoint(typed) and all(lookup(raw, k) == lookup(base, k) for k in same)


def _give_way(tree: dict[str, Any], typed: frozenset[str]) -> None:
    """Null the size that nobody asked for and the other two give."""
    if lookup(tree, "accum._target_") == rules.FIXED_CUT:
        size, micro, steps = rules.sizes_that_count(tree, typed)
        tree["batch"] = {**tree["batch"], "global": size}
        tree["accum"] = {**tree["accum"], "micro": micro, "steps": steps}


def _hear_wandb_mode(tree: dict[str, Any], base: Mapping[str, Any], typed: Collection[str]) -> None:
    """Let WANDB_MODE beat the default, and a typed value beat WANDB_MODE."""
    mode = os.environ.get("WANDB_MODE")
    is_default = lookup(tree, "wandb.mode") == lookup(base, "wandb.mode")
    if mode in KEYS["wandb.mode"].choices and is_default and "wandb.mode" not in typed:
        tree["wandb"] = {**tree["wandb"], "mode": mode}


def _fields(
    tree: Mapping[str, Any], choices: Mapping[str, Any], typed_targets: Collection[str]
) -> dict[str, Any]:
    """Bring a composed tree into the shape of `RunConfig`."""
    fields: dict[str, Any] = {**tree, "choices": dict(choices)}
    for path in COMPONENTS:
        if "." not in path:
            fields[path] = _component(tree.get(path), path, choices, typed_targets)
    hooks = tree.get("hooks")
    if isinstance(hooks, list | tuple):
        fields["hooks"] = [_hook(hook, "hooks" in typed_targets) for hook in hooks]
    return fields


def _component(
    section: object, path: str, choices: Mapping[str, Any], typed_targets: Collection[str]
) -> object:
    if not isinstance(section, Mapping):
        return section
    extras = COMPONENTS[path].model_fields.keys() - Component.model_fields.keys()
    option = choices.get(path.replace(".", "/"))
    fields: dict[str, Any] = {
        "target": section.get("_target_"),
        "params": {k: v for k, v in section.items() if k not in extras and k != "_target_"},
        "name": None if option == OWN else option,
        "typed_target": path in typed_targets,
    }
    fields |= {extra: section[extra] for extra in extras if extra in section}
    if "gradient" in fields:
        fields["gradient"] = _component(
            fields["gradient"], f"{path}.gradient", choices, typed_targets
        )
    return fields


def _hook(hook: object, typed: bool) -> object:
    section = {"_target_": hook} if isinstance(hook, str) else hook
    if not isinstance(section, Mapping):
        return hook
    params = {k: v for k, v in section.items() if k != "_target_"}
    return {"target": section.get("_target_"), "params": params, "typed_target": typed}


def _plain(value: Any) -> Any:  # noqa: ANN401
    """Write a value of the config as plain mappings, lists and scalars."""
    if isinstance(value, Component):
        own = Component.model_fields.keys()
        extras = {k: _plain(getattr(value, k)) for k in type(value).model_fields if k not in own}
        return {"_target_": value.target, **copy.deepcopy(value.params), **extras}
    if isinstance(value, Section):
        items = type(value).model_fields.items()
        return {info.alias or name: _plain(getattr(value, name)) for name, info in items}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return copy.deepcopy(value)


def _subject(fault: str) -> str:
    """Give the key and value that a line is about."""
    return fault.partition(": ")[0]


def _fault(item: Mapping[str, Any], tree: Mapping[str, Any], choices: Mapping[str, Any]) -> str:
    """Put an error of the schema into the words of the interface."""
    parts = [str(part) for part in item["loc"] if not isinstance(part, int)]
    path = ".".join(parts)
    if parts[-1] == "target":
        return _class_fault(path.removesuffix(".target"), tree, choices)
    if item["type"] == "extra_forbidden" and "." in parts[-1]:
        nested = f"{path.replace('.', ': {')}: ...{'}' * path.count('.')}"
        return clip(f"{path}: a file nests its keys, {nested}")
    key = next((k for k in (path, *ancestors(path)) if k in KEYS), None)
    if item["type"] == "extra_forbidden" or key is None:
        return clip(f"{path}: unknown setting.{did_you_mean(path, KEYS)}")
    entry, value = KEYS[key], lookup(tree, key)
    example = f", e.g. {show(entry.default)}"
    example = "" if entry.default in (None, (), *entry.choices) else example
    return line(key, value, f"must be {entry.kind}{example}{hint(key, value, entry.choices)}")


def _class_fault(path: str, tree: Mapping[str, Any], choices: Mapping[str, Any]) -> str:
    key, value = f"{path}._target_", lookup(tree, f"{path}._target_")
    if value is None:
        option = choices.get(path.replace(".", "/"))
        about = f"{path}={option}: " if option else f"{path}: "
        return clip(f"{about}no class is named; say {key}=package.Class")
    return line(key, value, "must be the import path of a class: package.Class")
