"""Overrides -> a valid `RunConfig`: the search path, Hydra's composition, and every fault at once.

Hydra composes the options; the values are then set as if each had its `++`, so that the schema
alone says which keys exist. What Hydra would stop at one by one is thus answered in one go, in one
wording for `key=`, `+key=` and `++key=`, and the options alone stay at hand as the example.
"""

from __future__ import annotations

import os
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

from trainer.cli.referenced_files import refuse_missing
from trainer.cli.settings import (
    RECIPE,
    TARGET,
    Groups,
    Told,
    climbs,
    dotted,
    tell_apart,
)
from trainer.config import recipes
from trainer.config.components import COMPONENTS, OWN, SHARED, targets_in
from trainer.config.consent import consent_faults
from trainer.config.keys import KEYS, data_dir
from trainer.config.messages import ancestors, clip, did_you_mean, flat, lookup
from trainer.config.run_config import RunConfig
from trainer.config.secrets import leaked
from trainer.config.validate import validate
from trainer.core.errors import ConfigError

CONFIG_NAME = "config"
VERSION_BASE = "1.3"
PRESET = "preset"
"""The folder of values that suit a model on certain data: chosen by both, and never typed."""

_FOLDER_KEYS = ("hydra.run.dir", "hydra.sweep.dir")

_UNKNOWN_TO_HYDRA = re.compile(r"Could not override '([\w./]+)'")

ComposeError = (HydraException, OmegaConfBaseException, yaml.YAMLError, ConfigError, ValueError)
"""What composition may raise for what is written in a command line or a file."""


@final
@dataclass(frozen=True, kw_only=True)
class Job:
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
@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Where a run would go, before it is checked."""

    folder: Path
    outputs: Path
    name: str | None


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

    def groups(self, searchpath: Sequence[str] = ()) -> Groups:
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
        return Groups(found)

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

    def compose(self, lines: Sequence[str]) -> DictConfig:
        """Compose a config with its `hydra` node.

        Raises:
            ConfigError: Hydra could not; in one line.
        """
        try:
            return compose(self.config_name, overrides=list(lines), return_hydra_config=True)
        except ComposeError as error:
            raise ConfigError(*explain(error)) from error

    def check(
        self,
        overrides: Sequence[Override],
        groups: Groups,
        replayed: Iterable[Override] = (),
        consented: Collection[tuple[str, str]] = (),
    ) -> Job:
        """Compose one run and check it whole.

        Args:
            overrides: one value each.
            groups: what is on the search path.
            replayed: those of them that come from a run folder, which is no consent to run code.
            consented: classes that the user signed with that run, each with its dotted key.

        Raises:
            ConfigError: one line per fault.
            TrainError: what the config names is not there; see `refuse_missing`.
        """
        told = tell_apart(overrides, groups)
        faults = list(told.faults)
        typed = frozenset(dotted(o) for o in overrides if not o.is_hydra_override())
        own_words = _said(overrides, replayed)
        try:
            full = self.compose([*told.hydra, *told.choices])
            bare = self.compose(_examples(full, told)) if told.has_recipe else full
            examples = plain_of(bare)
            _drop_replaced_classes(told.choices, full, bare)
            _apply(told.values, full)
            tree = plain_of(full)
            _drop_foreign_arguments(tree, typed)
            faults += _folder_faults(full, tree, typed)
            faults += consent_faults(tree, examples, own_words)
            config = validate(
                tree,
                examples,
                typed_targets=_typed_targets(full, tree, own_words, consented),
                choices=dict(full.hydra.runtime.choices),
                typed_keys=typed,
                config_dir=None if self.own_folder is None else str(self.own_folder),
            )
        except ConfigError as error:
            raise ConfigError(*_unique([*faults, *error.faults])) from None
        faults += _trust_faults(config)
        if faults:
            raise ConfigError(*_unique(faults))
        refuse_missing(config)
        known = flat(examples)
        return Job(
            config=config,
            lines=(*told.hydra, *told.choices, *told.value_lines(known)),
            folder=Path(str(full.hydra.run.dir)).absolute(),
            sweep_folder=Path(str(full.hydra.sweep.dir)).absolute(),
            known=frozenset(known),
            composed=full,
        )

    def look_ahead(self, overrides: Sequence[Override], groups: Groups) -> Outlook:
        """See where a run would go.

        Raises:
            ConfigError: it cannot even be composed.
        """
        told = tell_apart(overrides, groups)
        full = self.compose([*told.hydra, *told.choices])
        _apply(told.values, full)
        return Outlook(
            folder=Path(str(full.hydra.run.dir)).absolute(),
            outputs=Path(str(full.outputs)).absolute(),
            name=None if full.name is None else str(full.name),
        )


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


def _examples(full: DictConfig, told: Told) -> list[str]:
    """The lines that compose the options of a config without the values of its recipe."""
    choices = full.hydra.runtime.choices.items()
    own = [(group, option) for group, option in choices if not group.startswith("hydra/")]
    chosen = [f"{g}={o}" for g, o in own if g != RECIPE and "@" not in g and o is not None]
    return [*told.hydra, *chosen]


def _said(overrides: Iterable[Override], replayed: Iterable[Override]) -> dict[str, Any]:
    """What was typed, by dotted key, what is inside a mapping one by one."""
    foreign = {dotted(override) for override in replayed}
    typed = [o for o in overrides if not o.is_delete() and dotted(o) not in foreign]
    return {k: value for o in typed for k, value in flat({dotted(o): o.value()}).items()}


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
    path, _, leaf = key.rpartition(".")
    parent = OmegaConf.select(composed, path)
    if leaf not in parent:
        raise KeyError(*(f"{path}.{known}" for known in parent))
    with open_dict(parent):
        del parent[leaf]


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


def _drop_replaced_classes(choices: Iterable[str], full: DictConfig, bare: DictConfig) -> None:
    """Where an option was typed, take away the class that a recipe names in its place."""
    for group, _, option in (line.partition("=") for line in choices):
        path = group.replace("/", ".")
        target = OmegaConf.select(bare, f"{path}.{TARGET}")
        is_replaced = target != OmegaConf.select(full, f"{path}.{TARGET}")
        if path in COMPONENTS and option != OWN and is_replaced:
            OmegaConf.update(full, path, OmegaConf.select(bare, path), merge=False)


def _drop_foreign_arguments(tree: dict[str, Any], typed: frozenset[str]) -> None:
    """Where a class was typed, take away what a recipe set for the one it replaces, in place."""
    for path in COMPONENTS:
        if f"{path}.{TARGET}" not in typed:
            continue
        shared = SHARED.get(path, {})
        section = lookup(tree, path)
        for name in list(section):
            key = f"{path}.{name}"
            is_ours = any(k == key or k.startswith(f"{key}.") for k in KEYS) and name not in shared
            if not (is_ours or any(k == key or k.startswith(f"{key}.") for k in typed)):
                del section[name]


def _typed_targets(
    full: DictConfig,
    tree: Mapping[str, Any],
    own_words: Mapping[str, Any],
    consented: Collection[tuple[str, str]],
) -> frozenset[str]:
    """The components whose classes, of their arguments too, the user typed or consented to."""
    named = tree.get("hooks")
    listed = named if isinstance(named, list) else []
    hooks = [hook if isinstance(hook, Mapping) else {TARGET: hook} for hook in listed]
    typed = {"hooks" for key in own_words if key.partition(".")[0] == "hooks"}
    typed |= {"hooks"} if set(targets_in("hooks", hooks)) <= set(consented) else set()
    for path in COMPONENTS:
        own = {*consented, *targets_in(path, _own_option(full, path))}
        found = targets_in(path, lookup(tree, path))
        mine = [pair for pair in found if pair[0] == path or pair[0] not in COMPONENTS]
        if mine and all(pair in own or _is_typed(pair[0], path, own_words) for pair in mine):
            typed.add(path)
    return frozenset(typed)


def _is_typed(place: str, path: str, own_words: Mapping[str, Any]) -> bool:
    """Whether the user typed the class at a place in a component, or the list that it is in."""
    lists = (key for key in (place, *ancestors(place)) if key.startswith(f"{path}."))
    return f"{place}.{TARGET}" in own_words or any(
        isinstance(own_words.get(key), list) for key in lists
    )


def _own_option(full: DictConfig, path: str) -> object:
    """Read the option of a component from the user's own folder; None where it is not theirs."""
    sources = [s for s in full.hydra.runtime.config_sources if s.schema == "file"]
    group = path.replace(".", "/")
    name = f"{group}/{full.hydra.runtime.choices.get(group)}.yaml"
    folders = sorted(sources, key=lambda source: source.provider != "main")
    found = next((s for s in folders if (Path(s.path) / name).is_file()), None)
    if found is None or found.provider == "main":
        return None
    return yaml.safe_load((Path(found.path) / name).read_text())


def _trust_faults(config: RunConfig) -> list[str]:
    """Say in one line which classes nobody consented to, before a module could be imported."""
    unknown = {
        place: target
        for place, target in config.own_classes(typed=False)
        if target.partition(".")[0] not in config.trust
    }
    if not unknown:
        return []
    (path, target), *others = unknown.items()
    more = f" ({', '.join(other for other, _ in others)} too)" if others else ""
    packages = dict.fromkeys(each.partition(".")[0] for each in unknown.values())
    remedy = f"type 'trust=[{','.join(packages)}]'"
    named = f"{path}.{TARGET}={target}{more}: named by a recipe or a run, not by you"
    return [clip(f"{named}; {remedy}")]


def _folder_faults(full: DictConfig, tree: Mapping[str, Any], typed: frozenset[str]) -> list[str]:
    """Check where a run would write."""
    outputs = str(tree.get("outputs"))
    folders = {key: str(OmegaConf.select(full, key)) for key in _FOLDER_KEYS}
    faults = [
        clip(f"{key}={folder}: must not lead upwards with ..")
        for key, folder in folders.items()
        if climbs(folder) and not climbs(outputs)
    ]
    faults += [f"{key}=: names no folder" for key, folder in folders.items() if not folder]
    records = OmegaConf.select(full, "hydra.output_subdir")
    if records is not None and (climbs(records) or Path(str(records)).is_absolute()):
        faults.append(clip(f"hydra.output_subdir={records}: must stay below the run folder"))
    job = OmegaConf.select(full, "hydra.job.name")  # names the log file
    if "/" in str(job) and not leaked(job, os.environ):
        faults.append(clip(f"hydra.job.name={job}: names the log file; must hold no /"))
    if "outputs" not in typed and Path(outputs).is_absolute():
        faults.append(clip(f"outputs={outputs}: an absolute folder has to be typed by you"))
    return faults


def _unique(faults: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(faults))
