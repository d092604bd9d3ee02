"""Compose overrides into a valid `RunConfig`, or name every fault at once.

Hydra composes the options; the values are then set as if each had its `++`, so that the schema
alone says which keys exist. What Hydra would stop at one by one is thus answered in one go, in one
wording for `key=`, `+key=` and `++key=`, and the options alone stay at hand as the example.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import yaml
from hydra import compose, version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from trainer.cli.overrides import RECIPE, TARGET, Classified, ConfigGroups, classify, dotted
from trainer.cli.referenced_files import refuse_missing
from trainer.cli.trust import consented_components, trust_faults, typed_values
from trainer.config import recipes
from trainer.config.components import COMPONENTS, OWN, SHARED
from trainer.config.consent import consent_faults
from trainer.config.keys import KEYS, data_dir
from trainer.config.messages import clip, did_you_mean, flat, lookup
from trainer.config.run_config import RunConfig
from trainer.config.validate import validate
from trainer.core.errors import ConfigError

CONFIG_NAME = "config"
VERSION_BASE = "1.3"
PRESET = "preset"
"""The folder of values that suit a model on certain data: chosen by both, and never typed."""

_PATHS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.output_subdir", "hydra.job.name")
_UNKNOWN_TO_HYDRA = re.compile(r"Could not override '([\w./]+)'")

ComposeError = (HydraException, OmegaConfBaseException, yaml.YAMLError, ConfigError, ValueError)
"""What composition may raise for what is written in a command line or a file."""


@final
@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """One run, checked.

    Attributes:
        config: valid.
        lines: the overrides Hydra gets.
        folder: where the run goes; absolute.
        sweep_folder: where the sweep goes that it belongs to, if it does.
        known: dotted keys that the chosen options hold.
        composed: what Hydra and we made of it, with Hydra's own node.
    """

    config: RunConfig
    lines: tuple[str, ...]
    folder: Path
    sweep_folder: Path
    known: frozenset[str]
    composed: DictConfig


@final
@dataclass(frozen=True)
class Composer:
    """Hydra's composition over one search path. Enter `open` before use.

    Attributes:
        config_folder: primary config's folder; the built-in `conf/` or `--config-path`.
        config_name: primary config.
        own_folder: the user's `--config-dir`.
    """

    config_folder: Path
    config_name: str = CONFIG_NAME
    own_folder: Path | None = None

    @contextmanager
    def open(self) -> Iterator[Composer]:
        """Set up Hydra's search path for as long as the context lasts.

        A Hydra that is set up already, in a notebook say, comes back afterwards.

        Yields:
            Itself.

        Raises:
            ConfigError: a folder of the search path does not exist.
        """
        for flag, folder in (("path", self.config_folder), ("dir", self.own_folder)):
            if folder is not None and not folder.is_dir():
                raise ConfigError(f"--config-{flag}={folder}: no such folder")
        version.setbase(VERSION_BASE)
        recipes.register()
        path = create_config_search_path(str(self.config_folder))
        if self.own_folder is not None:
            before_schema = SearchPathQuery(provider="schema")
            path.prepend("command-line", f"file://{self.own_folder}", anchor=before_schema)
        state = GlobalHydra.instance()
        before, state.hydra = state.hydra, None
        Hydra.create_main_hydra2("train", path)
        try:
            yield self
        finally:
            state.hydra = before

    def groups(self, searchpath: Sequence[str] = ()) -> ConfigGroups:
        """List groups and options on the search path.

        Args:
            searchpath: the `hydra.searchpath=...` override, if one was typed.
        """
        found: dict[str, list[str]] = {}
        waiting = [""]
        while waiting:
            parent = waiting.pop()
            inside = self._list(parent, ObjectType.GROUP, searchpath)
            paths = [f"{parent}/{group}" if parent else group for group in inside]
            waiting += [path for path in paths if path not in ("hydra", PRESET)]
            options = self._list(parent, ObjectType.CONFIG, searchpath) if parent else []
            if options:
                found[parent] = options
        return ConfigGroups(found)

    def _list(self, path: str, kind: ObjectType, searchpath: Sequence[str]) -> list[str]:
        loader = GlobalHydra.instance().config_loader()
        if searchpath or self.config_folder != data_dir("conf"):
            typed = list(searchpath)
            try:
                return sorted(loader.get_group_options(path, kind, self.config_name, typed))
            except ComposeError as error:
                raise ConfigError(*explain(error)) from error
        # Hydra's way reads the primary config once for every folder: 60 ms more.
        sources = [s for s in loader.get_sources() if s.provider not in ("hydra", "schema")]
        return sorted({name for s in sources if s.is_group(path) for name in s.list(path, kind)})

    def compose(self, lines: Sequence[str], values: Iterable[Override] = ()) -> DictConfig:
        """Compose a config with its `hydra` node.

        Args:
            lines: settings of Hydra, and choices of options.
            values: set afterwards.

        Raises:
            ConfigError: Hydra could not; in one line, or one per value that cannot be set.
        """
        try:
            full = compose(self.config_name, overrides=list(lines), return_hydra_config=True)
        except ComposeError as error:
            raise ConfigError(*explain(error)) from error
        _apply(values, full)
        return full

    def check(
        self,
        overrides: Sequence[Override],
        groups: ConfigGroups,
        replayed: Collection[Override] = (),
        signed: Collection[tuple[str, str]] = (),
    ) -> CheckedRun:
        """Compose one run and check it whole.

        Args:
            overrides: one value each.
            groups: what is on the search path.
            replayed: those of them that come from a run folder, which is no consent to run code.
            signed: classes of that run, if the user signed it, each with its dotted key.

        Raises:
            ConfigError: one line per fault.
            TrainError: what the config names is not there; see `refuse_missing`.
        """
        parts = classify(overrides, groups)
        faults = list(parts.faults)
        keys = frozenset(dotted(o) for o in overrides if not o.is_hydra_override())
        typed = typed_values(overrides, replayed)
        try:
            full, examples = self._compose_with_examples(parts)
            tree = plain_of(full)
            _drop_foreign_arguments(tree, keys)
            faults += [*_folder_faults(full, tree, keys), *consent_faults(tree, examples, typed)]
            config = validate(
                tree,
                examples,
                typed_targets=consented_components(full, tree, typed, signed),
                choices=dict(full.hydra.runtime.choices),
                typed_keys=keys,
                config_dir=None if self.own_folder is None else str(self.own_folder),
            )
            faults += trust_faults(config)
        except ConfigError as error:
            raise ConfigError(*dict.fromkeys([*faults, *error.faults])) from None
        if faults:
            raise ConfigError(*dict.fromkeys(faults))
        refuse_missing(config)
        known = flat(examples)
        return CheckedRun(
            config=config,
            lines=(*parts.hydra, *parts.choices, *parts.value_lines(known)),
            folder=Path(str(full.hydra.run.dir)).absolute(),
            sweep_folder=Path(str(full.hydra.sweep.dir)).absolute(),
            known=frozenset(known),
            composed=full,
        )

    def _compose_with_examples(self, parts: Classified) -> tuple[DictConfig, dict[str, Any]]:
        """Compose a config, and its options without any value, of a recipe or typed."""
        full = self.compose([*parts.hydra, *parts.choices])
        options = full
        if any(line.startswith(f"{RECIPE}=") for line in parts.choices):
            choices = full.hydra.runtime.choices.items()
            own = [(g, o) for g, o in choices if not g.startswith("hydra/") and "@" not in g]
            chosen = [f"{g}={o}" for g, o in own if g != RECIPE and o is not None]
            options = self.compose([*parts.hydra, *chosen])
        examples = plain_of(options)
        # Where an option was typed, the class goes that a recipe names in its place.
        for group, _, option in (line.partition("=") for line in parts.choices):
            path = group.replace("/", ".")
            targets = [OmegaConf.select(tree, f"{path}.{TARGET}") for tree in (full, options)]
            if path in COMPONENTS and option != OWN and targets[0] != targets[1]:
                OmegaConf.update(full, path, OmegaConf.select(options, path), merge=False)
        _apply(parts.values, full)
        return full, examples


def explain(error: BaseException) -> list[str]:
    """Say in one line per fault what Hydra, OmegaConf or the YAML parser found wrong."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConfigError):
            return list(cause.faults)
        unknown = _UNKNOWN_TO_HYDRA.match(str(cause))
        if unknown is not None:
            return [clip(f"{unknown.group(1)}: unknown setting of Hydra")]
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            return [clip(f"{cause.full_key}: {str(cause).splitlines()[0]}")]
        error, cause = cause, cause.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        if not group:
            return [clip(f"--config-name={name}: no such file; leave it out, or add --config-path")]
        options = error.options or ()
        near = did_you_mean(name, options)
        return [clip(f"{group}={name}: no such option.{near} Choices: {', '.join(options)}")]
    return [clip(str(error).partition("See https://")[0])]


def _apply(values: Iterable[Override], composed: DictConfig) -> None:
    """Set values, each as if behind Hydra's `++`, in place.

    Raises:
        ConfigError: one line per value that cannot be set or removed.
    """
    faults = []
    for override in values:
        key = override.key_or_group
        try:
            if override.is_delete():
                _remove(composed, key)
            else:
                OmegaConf.update(composed, key, override.value(), merge=True, force_add=True)
        except OmegaConfBaseException as error:
            why = str(error).splitlines()[0]
            why = "must be a mapping, {name: value}" if why.startswith("Cannot merge") else why
            faults.append(clip(f"{override.input_line}: {why}"))
        except (TypeError, ValueError):
            faults.append(clip(f"{key}: unknown setting; a list has no settings inside"))
        except KeyError as error:
            near = did_you_mean(key, error.args)
            faults.append(clip(f"~{key}: there is no such setting to remove.{near}"))
    if faults:
        raise ConfigError(*faults)


def _remove(composed: DictConfig, key: str) -> None:
    path, _, last = key.rpartition(".")
    parent = OmegaConf.select(composed, path)
    if last not in parent:
        raise KeyError(*(f"{path}.{known}" for known in parent))
    with open_dict(parent):
        del parent[last]


def plain_of(composed: DictConfig) -> dict[str, Any]:
    """A composed config as plain mappings, resolved, without Hydra's own node.

    Raises:
        ConfigError: an interpolation leads nowhere.
    """
    tree: dict[str, Any] = {}
    try:
        for key in map(str, composed):
            if key != "hydra":
                value = composed[key]
                is_node = OmegaConf.is_config(value)
                tree[key] = OmegaConf.to_container(value, resolve=True) if is_node else value
    except OmegaConfBaseException as error:
        raise ConfigError(*explain(error)) from error
    return tree


def _drop_foreign_arguments(tree: dict[str, Any], typed: frozenset[str]) -> None:
    """Where a class was typed, take away what a recipe set for the one it replaces, in place."""
    for path in (path for path in COMPONENTS if f"{path}.{TARGET}" in typed):
        ours = KEYS.keys() - {f"{path}.{name}" for name in SHARED.get(path, ())}
        section = lookup(tree, path)
        for name in list(section):
            key = f"{path}.{name}"
            if not any(k == key or k.startswith(f"{key}.") for k in (*ours, *typed)):
                del section[name]


def _folder_faults(full: DictConfig, tree: Mapping[str, Any], typed: frozenset[str]) -> list[str]:
    """Check where a run would write."""
    outputs = str(tree.get("outputs"))
    folders = {key: OmegaConf.select(full, key) for key in _PATHS}
    faults = [
        clip(f"{key}={folder}: must not lead upwards with ..")
        for key, folder in folders.items()
        if ".." in Path(str(folder)).parts and ".." not in Path(outputs).parts
    ]
    faults += [f"{key}=: names no folder" for key, folder in folders.items() if folder == ""]
    if Path(str(folders["hydra.output_subdir"])).is_absolute():
        faults.append("hydra.output_subdir: must stay below the run folder; type a relative path")
    if "/" in str(folders["hydra.job.name"]):
        faults.append(clip(f"hydra.job.name={full.hydra.job.name}: names a file; must hold no /"))
    if "outputs" not in typed and Path(outputs).is_absolute():
        faults.append(clip(f"outputs={outputs}: an absolute folder has to be typed by you"))
    return faults
