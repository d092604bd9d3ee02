"""Compose overrides into a valid `RunConfig`, or name every fault at once.

Hydra composes the options; the values are then set as if each had its `++`, so that the schema
alone says which keys exist. What Hydra would stop at one by one is thus answered in one go, in one
wording for `key=`, `+key=` and `++key=`, and the options alone stay at hand as the example.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import filterfalse
from pathlib import Path
from typing import Any, Self, final

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from trainer import __version__
from trainer.cli.overrides import (
    Classified,
    classify,
    dotted,
    no_such_option,
    refuse_twice,
    values_in,
)
from trainer.cli.paths import absolute_paths, in_full, refuse_missing
from trainer.cli.plugins import EXTRAS, load_plugins, switch_off_reports, without_plugins
from trainer.config import components, consent, recipes
from trainer.config.consent import TARGET
from trainer.config.declared import declared
from trainer.config.keys import KEYS
from trainer.config.messages import clip, lookup, one_line
from trainer.config.option_files import OWN, data_dir, options_of
from trainer.config.recipes import other_versions
from trainer.config.run_config import RunConfig
from trainer.config.validate import validate
from trainer.core.errors import ConfigError
from trainer.core.own_code import OWN_CODE

CONFIG_NAME = "config"

_HYDRA_ERRORS = (HydraException, OmegaConfBaseException)
# Of the built-in folder alone, for every job of a sweep say: the options of its groups (found in
# 0.05 s), and what those that are chosen give (composed in 0.25 s, copied in 0.01 s).
_OPTIONS: dict[str, list[str]] = {}
_COMPOSED: dict[tuple[str, ...], DictConfig] = {}


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, checked."""

    config: RunConfig
    composed: DictConfig  # the same with Hydra's own node
    lines: tuple[str, ...]  # its overrides as Hydra takes them, with paths that are absolute
    typed: tuple[str, ...]  # the same with paths as they are typed
    folder: Path  # where the run goes; absolute
    makes_folder: bool = True  # it writes a config of its own; not so where a run is only read
    done: str | None = None  # why there is nothing to do
    note: str = ""  # a line to print before it starts
    forked: tuple[Path, int] | None = None  # another run, and its step that it begins with


@final
@dataclass
class Composer:
    """Hydra's composition over one search path. Enter `open` before use."""

    own_folder: str | None = None  # the user's `--config-dir`
    # Options on the search path, while it is open
    groups: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, own_folder: str | None = None) -> Self:
        """Read what is typed behind `--config-dir`; classes may be of modules found here."""
        # Files may have changed since the last command.
        for reader in (declared, options_of):
            reader.cache_clear()
        try:
            OWN_CODE.folder = Path.cwd()
        except FileNotFoundError:
            raise ConfigError("the current folder was deleted; change to one that exists") from None
        return cls(in_full(own_folder) if own_folder else None)

    @contextmanager
    def open(self, overrides: Iterable[Override] = ()) -> Iterator[Any]:
        """Set up Hydra's search path, `hydra.searchpath` among the overrides, and give Hydra.

        A Hydra that is set up already, in a notebook say, comes back afterwards. What Hydra raises
        inside becomes a `ConfigError`.
        """
        own = self.own_folder
        if own is not None and not os.path.isdir(own):  # noqa: PTH112 - see `exists`
            raise ConfigError(clip(f"--config-dir={own}: no such folder"))
        switch_off_reports()
        without_plugins()
        recipes.register(own)
        overrides = [*overrides]
        load_plugins(overrides)
        # Hydra is one for the whole process.
        state = GlobalHydra.instance()
        before, state.hydra = state.hydra, None
        lines = list[str]()
        for override in overrides:
            line = override.input_line or ""
            if "hydra.searchpath=" in line:
                lines.append(line)
        try:
            with initialize_config_dir(str(data_dir("conf")), "train", version_base="1.3"):
                hydra = GlobalHydra.instance().hydra
                self.groups = self._options(hydra, lines)
                yield hydra
        except _HYDRA_ERRORS as error:
            raise ConfigError(*explain(error)) from error
        finally:
            GlobalHydra.instance().hydra = before

    def _options(self, hydra: Any, lines: list[str]) -> dict[str, list[str]]:  # noqa: ANN401
        is_ours = self.own_folder is None and not lines
        if is_ours and _OPTIONS:
            return _OPTIONS.copy()
        options = {}
        for group in (*components.GROUPS, recipes.RECIPE_GROUP):
            # The primary config, which adds nothing to the search path, would be read each time.
            names = hydra.config_loader.get_group_options(group.replace(".", "/"), overrides=lines)
            options[group] = sorted({*names} - {OWN})
        if is_ours:
            _OPTIONS.update(options)
        return options

    def compose(self, lines: Sequence[str], values: Iterable[Override] = ()) -> DictConfig:
        """Compose settings of Hydra and choices of options, and set values; with `hydra`."""
        foreign = ("hydra", recipes.RECIPE_GROUP)
        is_ours = self.own_folder is None and not any(line.startswith(foreign) for line in lines)
        full = _COMPOSED.get((*lines,)) if is_ours else None
        try:
            full = full or compose(CONFIG_NAME, list(lines), return_hydra_config=True)
        except (*_HYDRA_ERRORS, yaml.YAMLError, ConfigError, ValueError) as error:
            raise ConfigError(*explain(error)) from error
        except RecursionError:
            chosen = [line for line in lines if line.startswith(recipes.RECIPE_GROUP)]
            named = [*chosen, "an option"][0]
            raise ConfigError(clip(f"{named}: extends itself, by its defaults")) from None
        if is_ours:
            # What is composed once knows the folder in which that was.
            full = deepcopy(_COMPOSED.setdefault((*lines,), full))
            with open_dict(full.hydra):
                full.hydra.runtime.cwd = str(Path.cwd())
        _set_values(full, values)
        return full

    def check(
        self,
        overrides: Sequence[Override],
        faults: Iterable[str] = (),
        *,
        replayed: Collection[Override] = (),
        own_classes: Collection[str] = (),
    ) -> Job:
        """Compose one run from overrides of one value each, and check it whole.

        `faults` were found earlier, of what was typed. The overrides of `replayed` come from a run
        folder, which is no consent to run code, but for its `own_classes`, if the user made it.
        """
        parts = classify(overrides, self.groups)
        faults = [*faults, *parts.faults]
        chosen: object = None
        keys = set(map(dotted, filterfalse(Override.is_hydra_override, overrides)))
        typed = values_in(each for each in overrides if each not in replayed)
        try:
            full, examples = self._compose_with_examples(parts)
            runtime: Any = OmegaConf.to_container(full.hydra.runtime)
            chosen = runtime["choices"].get(recipes.RECIPE_GROUP)
            tree = plain_of(full)
            _drop_foreign_arguments(tree, keys)
            faults += _folder_faults(full)
            faults += consent.key_faults(tree, examples, typed, self.own_folder)
            config = validate(
                tree,
                examples,
                typed_targets=consent.consented_components(tree, typed, own_classes, runtime),
                choices=runtime["choices"],
                typed_keys=keys,
                config_dir=self.own_folder,
            )
            faults += consent.class_faults(config)
        except ConfigError as error:
            faults += error.faults
        if faults:
            versions = "; ".join(other_versions(chosen, __version__))
            for number, fault in enumerate(faults):
                key, is_unknown, _ = fault.partition(": unknown setting.")
                # A key that was not typed is the recipe's, and may be one of another version.
                if versions and is_unknown and key not in keys:
                    faults[number] = one_line(f"{fault}; {versions}")
            raise ConfigError(*dict.fromkeys(faults))
        # Hydra instantiates what stands there, which neither a recipe nor a run folder may give.
        node = OmegaConf.to_container(full.hydra, resolve=False)
        for _, target in components.targets_in("hydra", node):
            OWN_CODE.permit(target)
        lines = (*parts.hydra, *parts.lines)
        # Which values are paths is known once all is composed, so it is done again.
        if paths := absolute_paths(config):
            rest = [each for each in overrides if dotted(each) not in paths]
            job = self.check([*rest, *paths.values()], replayed=replayed, own_classes=own_classes)
            return replace(job, typed=lines)
        refuse_missing(config)
        notes = other_versions(chosen, __version__, newer=True)
        return Job(
            config=config,
            composed=full,
            lines=lines,
            typed=lines,
            folder=Path(str(full.hydra.run.dir)).absolute(),
            note="".join(f"warning: {note}\n" for note in notes),
        )

    def _compose_with_examples(self, parts: Classified) -> tuple[DictConfig, dict[str, Any]]:
        """Compose a config, and its options without any value, of a recipe or typed."""
        full = options = self.compose([*parts.hydra, *parts.choices])
        if any(line.startswith(f"{recipes.RECIPE_GROUP}=") for line in parts.choices):
            chosen = []
            for group, option in full.hydra.runtime.choices.items():
                if group.replace("/", ".") in components.GROUPS:
                    chosen.append(f"{group}={option}")
            options = self.compose([*parts.hydra, *chosen])
        examples = plain_of(options)
        # Where an option was typed, the class goes that a recipe names in its place.
        for group, _, option in (line.partition("=") for line in parts.choices):
            path = group.replace("/", ".")
            targets = [OmegaConf.select(tree, f"{path}.{TARGET}") for tree in (full, options)]
            if path in components.COMPONENTS and option != OWN and targets[0] != targets[1]:
                OmegaConf.update(full, path, OmegaConf.select(options, path), merge=False)
        _set_values(full, parts.values)
        return full, examples


def explain(error: BaseException) -> list[str]:
    """Say in one line per fault what Hydra, OmegaConf or the YAML parser found wrong."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConfigError):
            return list(cause.faults)
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            text = str(cause).splitlines()[0].rpartition("resolving interpolation: ")[2]
            if text.endswith("is not in struct"):
                text = f"no such setting; +{cause.full_key}=VALUE adds one"
            return [clip(f"{cause.full_key}: {text}")]
        error, cause = cause, cause.__cause__
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        # Of a recipe that another extends
        if group == recipes.RECIPE_GROUP:
            place = str(error).partition(":")[0]
            return [one_line(f"{place}: {no_such_option(group, name, recipes.available())}")]
        if error.options:
            options = dict.fromkeys([*error.options, *EXTRAS.get(group, ())])
            options.pop(OWN, None)
            return [no_such_option(group, name, [*options])]
    return [clip(str(error).partition("See https://")[0])]


def _set_values(composed: DictConfig, values: Iterable[Override]) -> None:
    """Set values, each as if behind Hydra's `++`, in place; all that cannot be set are named."""
    faults = []
    for override in values:
        key, line = override.key_or_group, override.input_line
        try:
            if override.is_delete():
                section, _, name = key.rpartition(".")
                with open_dict(composed):
                    del OmegaConf.select(composed, section)[name]
            else:
                refuse_twice(override)
                value = override.value()
                # Beside `init` stands `init.partial`, which OmegaConf would look for within it.
                if key.startswith("init."):
                    with open_dict(composed):
                        composed[key] = value
                    continue
                # Whole are an empty mapping, which empties that of a recipe, and one of beginnings,
                # as of stages. Others are merged by name.
                is_whole = isinstance(value, dict) and (not value or "0" in map(str, value))
                OmegaConf.update(composed, key, value, merge=not is_whole, force_add=True)
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            why = str(error).splitlines()[0]
            if why.startswith("Cannot merge"):
                why = "must be a mapping, {name: value}"
            faults.append(clip(f"{line}: {why}"))
    if faults:
        raise ConfigError(*faults)


def plain_of(composed: DictConfig) -> dict[str, Any]:
    """A composed config as plain mappings, resolved, without Hydra's own node."""
    try:
        plain = dict[str, Any]()
        for key, value in composed.items():
            if key == "hydra":
                continue
            if OmegaConf.is_config(value):
                plain[str(key)] = OmegaConf.to_container(value, resolve=True)
            else:
                plain[str(key)] = value
        return plain
    except OmegaConfBaseException as error:
        raise ConfigError(*explain(error)) from error


def _drop_foreign_arguments(tree: dict[str, Any], typed: Collection[str]) -> None:
    """Where a class was typed, take away what a recipe set for the one it replaces, in place."""
    for path in components.COMPONENTS:
        if f"{path}.{TARGET}" not in typed:
            continue
        ours = KEYS.keys() - {f"{path}.{name}" for name in components.SHARED.get(path, ())}
        section = lookup(tree, path)
        # The program's own keys of a component, such as `accum.packed`, are of any class.
        for name in list(section):
            key = f"{path}.{name}"
            if not any(f"{k}.".startswith(f"{key}.") for k in (*ours, *typed)):
                del section[name]


def _folder_faults(full: DictConfig) -> Iterator[str]:
    outputs = Path(str(full.outputs))
    for key in ("run.dir", "sweep.dir", "output_subdir"):
        folder = Path(str(OmegaConf.select(full.hydra, key)))
        if ".." in folder.parts and ".." not in outputs.parts:
            yield clip(f"hydra.{key}={folder}: must not lead upwards with ..")
        if folder.is_absolute() and key == "output_subdir":
            yield clip(f"hydra.{key}={folder}: must be relative, below the run folder")
