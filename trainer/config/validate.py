"""Turn a composed config into a valid `RunConfig`, or name everything that is wrong with it.

The composition of the chosen options alone, without a single value of the user's, is the example
that a config is compared with. So a class of anyone's own is checked like a built-in one, and a
misspelt key is found though Hydra's `+` let it in.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from trainer.config.arguments import argument_faults, value_fault
from trainer.config.components import ARGUMENTS, COMPONENTS, OWN, SHARED, extra_keys, owner_of
from trainer.config.habits import SYNONYMS
from trainer.config.keys import KEYS, options_of
from trainer.config.messages import (
    MISSING,
    ancestors,
    clip,
    did_you_mean,
    flat,
    line,
    lookup,
    prune,
    show,
)
from trainer.config.rules import give_way, rule_faults
from trainer.config.run_config import RunConfig
from trainer.config.secrets import is_secret, leaked
from trainer.config.types import convert, type_like
from trainer.core.errors import ConfigError

SHOWN_DEFAULTS: tuple[str, ...] = (
    "optimizer.lr",
    "scheduler.warmup",
    "steps",
    "epochs",
    "eval.every",
    "checkpoint.every",
)
"""Keys whose values the start of a run shows as defaults where nobody set them."""

_HYDRA_KEY = re.compile(r"_\w+_")

Tree = Mapping[str, Any]


def validate(
    raw: Tree,
    base: Tree,
    typed_targets: Collection[str] = (),
    choices: Mapping[str, Any] | None = None,
    typed_keys: Collection[str] = (),
    config_dir: str | None = None,
) -> RunConfig:
    """Turn a composed config into a valid one.

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
    picked = _own_choices(choices or {}, typed_keys)
    # A class that its option does not name takes arguments that only its constructor knows.
    own = {p for p in COMPONENTS if lookup(raw, f"{p}._target_") != lookup(base, f"{p}._target_")}
    unknown = dict(_unknown_keys(raw, base, own, picked))
    tree = prune(copy.deepcopy(dict(raw)), unknown)
    if unknown:
        _fill_in(tree, base)  # what a fault took away is no fault of its own
    faults = [*unknown.values(), *_reserved(tree), *_missing(tree, picked), *_secrets(tree)]
    faults += _convert_arguments(tree, base, own)
    give_way(tree, typed_keys)
    faults += rule_faults(tree, picked)
    faults += argument_faults(tree)
    _apply_wandb_variable(tree, base, typed_keys)
    unset = [key for key in SHOWN_DEFAULTS if _is_default(key, raw, base, typed_keys)]
    try:
        fields = _fields(tree, picked, typed_targets)
        config = RunConfig.model_validate({**fields, "config_dir": config_dir, "unset": unset})
    except ValidationError as error:
        faults += _schema_faults(error, tree, base, picked)
    if faults:
        # One line for each key and value: the first says most.
        raise ConfigError(*{fault.partition(": ")[0]: fault for fault in reversed(faults)}.values())
    return config


def from_plain(
    plain: Tree, typed_targets: Collection[str] = (), trust: Sequence[str] = ()
) -> RunConfig:
    """Read what `to_plain` wrote.

    Args:
        plain: the mapping.
        typed_targets: as for `validate`, from whoever was asked; never from a file.
        trust: likewise.

    Raises:
        ConfigError: the mapping is not a config of this version.
    """
    tree = {**plain, "trust": list(trust)}
    choices = dict(tree.pop("choices", {}))
    try:
        return RunConfig.model_validate(_fields(tree, choices, typed_targets))
    except ValidationError as error:
        raise ConfigError(*dict.fromkeys(_schema_faults(error, tree, {}, choices))) from None


def _own_choices(choices: Mapping[str, Any], typed: Collection[str]) -> dict[str, Any]:
    """Leave out Hydra's groups and presets; a class that was typed is no option's any more."""
    named = {g: o for g, o in choices.items() if not g.startswith("hydra/") and "@" not in g}
    return named | {p.replace(".", "/"): OWN for p in COMPONENTS if f"{p}._target_" in typed}


def _choice(owner: str, choices: Mapping[str, Any]) -> str:
    """Write which option a component was chosen by: `model=gpt_tiny`."""
    option = choices.get(owner.replace(".", "/"))
    return f"{owner}={option}" if option else owner


def _unknown_keys(
    raw: Tree, base: Tree, own: set[str], choices: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Find every key that the options do not offer.

    Yields:
        Dotted key and fault.
    """
    known = flat(base)
    for key, value in flat(raw).items():
        if key in known or owner_of(key) in own:
            continue
        parts = [other.removeprefix(f"{key}.") for other in known if other.startswith(f"{key}.")]
        parent = next((path for path in ancestors(key) if path in known), None)
        if parts:
            names = ", ".join(dict.fromkeys(part.split(".")[0] for part in parts))
            yield key, line(key, value, f"is a section, not a value; it has {names}")
        elif parent is None:
            yield key, _unknown_line(key, value, known, choices)
        elif not isinstance(known[parent], Mapping) and (
            parent in KEYS or known[parent] is not None
        ):
            yield key, clip(f"{key}: unknown setting. {parent} is one value, {parent}=...")


def _unknown_line(key: str, value: object, known: Tree, choices: Mapping[str, Any]) -> str:
    owner, name = owner_of(key), key.rpartition(".")[2]
    others = [o for o, keys in options_of(owner).items() if name in keys] if owner else []
    if owner and others and key != owner:
        there = _choice(owner, choices)
        better = f"{owner}={others[0]} {key}={show(value)}"
        return line(key, value, f"not a setting of {there}; type {better}")
    offers = [k for k in (*known, *KEYS) if not k.endswith("_target_")]
    hint = f" Did you mean {SYNONYMS[name]}?" if name in SYNONYMS else did_you_mean(key, offers)
    if not hint and owner:
        names = [k.removeprefix(f"{owner}.") for k in known if k in offers and owner_of(k) == owner]
        hint = f" {_choice(owner, choices)} has {', '.join(names) or 'none'}"
    return clip(f"{key}: unknown setting.{hint}")


def _fill_in(tree: dict[str, Any], base: Tree) -> None:
    """Put the options' own values where a tree has none, in place."""
    for key, value in base.items():
        if isinstance(tree.setdefault(key, copy.deepcopy(value)), dict) and isinstance(value, dict):
            _fill_in(tree[key], value)


def _reserved(tree: Tree) -> Iterator[str]:
    for key in flat(tree):
        for part in key.split("."):
            if _HYDRA_KEY.fullmatch(part) and part not in ("_target_", "_partial_"):
                yield clip(f"{key}: {part} is not for a config; _target_ and _partial_ are read")


def _missing(tree: Tree, choices: Mapping[str, Any]) -> Iterator[str]:
    for key, value in flat(tree).items():
        if value == MISSING:
            yield clip(f"{key}: {_choice(owner_of(key) or key, choices)} needs it, {key}=...")


def _secrets(tree: Tree) -> Iterator[str]:
    """Find secrets, which would be written to the run folder, and shown with it.

    Yields:
        One line per fault.
    """
    for key, value in _scalars(tree):
        if fault := secret_fault(key, value):
            yield fault


def secret_fault(key: str, value: object) -> str | None:
    """Say why a value must not be written into a run folder; None where it may.

    Args:
        key: dotted.
        value: as typed, or resolved.
    """
    where = "settings are written into the run folder; leave it in the environment"
    if variable := leaked(value, os.environ):
        return clip(f"{key}: holds the secret of ${variable}, and {where}")
    if is_secret(key.rpartition(".")[2], value):
        return clip(f"{key}: looks like a secret, and {where}, where the library reads it")
    return None


def _scalars(tree: Tree) -> Iterator[tuple[str, object]]:
    """Give every value, those in lists under the key of their list.

    Yields:
        Dotted key and value.
    """
    for key, value in flat(tree).items():
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, Mapping):
                yield from ((f"{key}.{name}", inner) for name, inner in _scalars(item))
            else:
                yield key, item


def _convert_arguments(tree: Tree, base: Tree, own: set[str]) -> Iterator[str]:
    """Read every constructor argument as the type it has there or in its option, in place.

    Yields:
        One line per fault.
    """
    for path in COMPONENTS:
        section = lookup(tree, path)
        target = str(section.get("_target_"))
        types: dict[str, Any] = {}
        if path not in own:
            types = {name: type_like(value) for name, value in lookup(base, path).items()}
        if path not in own or target.startswith("trainer."):
            types |= SHARED.get(path, {})
        types |= ARGUMENTS.get(target, {})
        for name, value in section.items():
            example = lookup(base, f"{path}.{name}")
            is_default = type(value) is type(example) and value == example
            if name not in types or name in extra_keys(path) or is_default or value == MISSING:
                continue
            try:
                section[name] = convert(types[name], value)
            except ValidationError:
                yield value_fault(f"{path}.{name}", types[name], value, example)


def _is_default(key: str, raw: Tree, base: Tree, typed: Collection[str]) -> bool:
    """Whether neither the command line nor a recipe sets a key, or the other way to state it."""
    same = {"steps", "epochs"} if key in {"steps", "epochs"} else {key}
    return same.isdisjoint(typed) and all(lookup(raw, k) == lookup(base, k) for k in same)


def _apply_wandb_variable(tree: dict[str, Any], base: Tree, typed: Collection[str]) -> None:
    """Let WANDB_MODE beat the default, and a typed value beat WANDB_MODE."""
    mode = os.environ.get("WANDB_MODE")
    is_default = lookup(tree, "wandb.mode") == lookup(base, "wandb.mode")
    if mode in KEYS["wandb.mode"].choices and is_default and "wandb.mode" not in typed:
        tree["wandb"] = {**tree["wandb"], "mode": mode}


def _fields(tree: Tree, choices: Mapping[str, Any], typed: Collection[str]) -> dict[str, Any]:
    """Bring a composed tree into the shape of `RunConfig`."""
    fields: dict[str, Any] = {**tree, "choices": dict(choices)}
    for path in COMPONENTS:
        if "." not in path:
            fields[path] = _component(tree.get(path), path, choices, typed)
    hooks = tree.get("hooks")
    if isinstance(hooks, list | tuple):
        sections = [{"_target_": hook} if isinstance(hook, str) else hook for hook in hooks]
        fields["hooks"] = [_component(section, "hooks", {}, typed) for section in sections]
    return fields


def _component(
    section: object, path: str, choices: Mapping[str, Any], typed: Collection[str]
) -> object:
    if not isinstance(section, Mapping):
        return section
    extras = extra_keys(path)
    option = choices.get(path.replace(".", "/"))
    fields: dict[str, Any] = {
        "target": section.get("_target_"),
        "params": {k: v for k, v in section.items() if k not in extras and k != "_target_"},
        "name": None if option == OWN else option,
        "typed_target": path in typed,
    }
    fields |= {extra: section[extra] for extra in extras if extra in section}
    if "gradient" in fields:
        fields["gradient"] = _component(fields["gradient"], f"{path}.gradient", choices, typed)
    return fields


def _schema_faults(
    error: ValidationError, tree: Tree, base: Tree, choices: Mapping[str, Any]
) -> Iterator[str]:
    """Put the errors of pydantic into the words of the interface.

    Yields:
        One line per fault.
    """
    for item in error.errors(include_url=False):
        parts = [str(part) for part in item["loc"] if not isinstance(part, int)]
        path = ".".join(parts)
        if parts[-1] == "target":
            yield _class_fault(path.removesuffix(".target"), tree, choices)
            continue
        key = next((k for k in (path, *ancestors(path)) if k in KEYS), None)
        if item["type"] == "extra_forbidden" and "." in parts[-1]:
            nested = f"{path.replace('.', ': {')}: ...{'}' * path.count('.')}"
            yield clip(f"{path}: a file nests its keys, {nested}")
        elif item["type"] == "extra_forbidden" or key is None:
            yield clip(f"{path}: unknown setting.{did_you_mean(path, KEYS)}")
        else:
            yield value_fault(key, KEYS[key].annotation, lookup(tree, key), lookup(base, key))


def _class_fault(path: str, tree: Tree, choices: Mapping[str, Any]) -> str:
    key, value = f"{path}._target_", lookup(tree, f"{path}._target_")
    if value is None:
        return clip(f"{_choice(path, choices)}: no class is named; type {key}=package.Class")
    return line(key, value, "must be the import path of a class: package.Class")
