"""Turn a composed config into a valid `RunConfig`, or name everything that is wrong with it.

The composition of the chosen options alone, without a single value of the user's, is the example
that a config is compared with. So a class of anyone's own is checked like a built-in one, and a
misspelt key is found though Hydra's `+` let it in.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from trainer.config.components import ARGUMENTS, COMPONENTS, OWN, SHARED, extra_keys, owner_of
from trainer.config.keys import KEYS, options_of
from trainer.config.messages import (
    MISSING,
    SYNONYMS,
    ancestors,
    clip,
    did_you_mean,
    flat,
    line,
    lookup,
    show,
    value_fault,
)
from trainer.config.rules import give_way, rule_faults
from trainer.config.run_config import RunConfig
from trainer.config.secrets import is_secret, leaked
from trainer.config.types import convert, type_like
from trainer.core.errors import ConfigError

# Keys whose values the start of a run shows as defaults where nobody set them.
_SHOWN_DEFAULTS = [
    "optimizer.lr",
    "scheduler.warmup",
    "steps",
    "epochs",
    "eval.every",
    "checkpoint.every",
]

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
    picked = (choices or {}).items()
    named = {g: option for g, option in picked if not g.startswith("hydra/") and "@" not in g}
    # A class that was typed is no option's any more.
    named |= {p.replace(".", "/"): OWN for p in COMPONENTS if f"{p}._target_" in typed_keys}
    tree = copy.deepcopy(dict(raw))
    odd = [p for p in COMPONENTS if not isinstance(lookup(tree, p), Mapping)]
    if odd:
        raise ConfigError(*(line(p, lookup(tree, p), "takes an option or a mapping") for p in odd))
    faults = [*_leaf_faults(tree, named), *_argument_faults(tree, base, named)]
    give_way(tree, typed_keys)
    faults += rule_faults(tree, named)
    mode = os.environ.get("WANDB_MODE")
    if mode in KEYS["wandb.mode"].choices and _is_default("wandb.mode", raw, base, typed_keys):
        tree["wandb"] = {**tree["wandb"], "mode": mode}
    unset = [key for key in _SHOWN_DEFAULTS if _is_default(key, raw, base, typed_keys)]
    beside = {"config_dir": config_dir, "unset": unset}
    try:
        config = RunConfig.model_validate(_fields(tree, named, typed_targets) | beside)
    except ValidationError as error:
        faults += _schema_faults(error, tree, base, named)
    if faults:
        # One line for each key and value: the first says most.
        raise ConfigError(*{fault.partition(": ")[0]: fault for fault in reversed(faults)}.values())
    return config


def from_plain(plain: Tree) -> RunConfig:
    """Read what `to_plain` wrote; consent and `trust` are never read from a file.

    Raises:
        ConfigError: the mapping is not a config of this version.
    """
    choices = dict(plain.get("choices", {}))
    try:
        return RunConfig.model_validate(_fields({**plain, "trust": []}, choices, ()))
    except ValidationError as error:
        raise ConfigError(*dict.fromkeys(_schema_faults(error, plain, {}, choices))) from None


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


def _choice(owner: str, choices: Mapping[str, Any]) -> str:
    """Write which option a component was chosen by: `model=gpt_tiny`."""
    option = choices.get(owner.replace(".", "/"))
    return f"{owner}={option}" if option else owner


def _leaf_faults(tree: Tree, choices: Mapping[str, Any]) -> Iterator[str]:
    """Find values that are missing, keys that Hydra would act on, and secrets.

    Yields:
        One line per fault.
    """
    for key, value in _scalars(tree):
        for part in key.split("."):
            if _HYDRA_KEY.fullmatch(part) and part not in ("_target_", "_partial_"):
                yield clip(f"{key}: {part} is not for a config; _target_ and _partial_ are read")
        if value == MISSING:
            yield clip(f"{key}: {_choice(owner_of(key) or key, choices)} needs it, {key}=...")
        elif fault := secret_fault(key, value):
            yield fault


def _scalars(tree: Tree) -> Iterator[tuple[str, object]]:
    """Give every value, those in lists under the key of their list.

    Yields:
        Dotted key and value.
    """
    for key, value in flat(tree).items():
        for item in value if isinstance(value, list | tuple) and value else [value]:
            if isinstance(item, Mapping):
                yield from ((f"{key}.{name}", inner) for name, inner in _scalars(item))
            else:
                yield key, item


def _argument_faults(tree: Tree, base: Tree, choices: Mapping[str, Any]) -> Iterator[str]:
    """Read every constructor argument as the type it has there or in its option, in place.

    Yields:
        One line per fault.
    """
    for path in COMPONENTS:
        section, example = lookup(tree, path), lookup(base, path)
        target, extras = str(section.get("_target_")), extra_keys(path)
        # A class that its option does not name takes arguments that only its constructor knows.
        is_own = section.get("_target_") != example.get("_target_")
        types = {} if is_own else {name: type_like(value) for name, value in example.items()}
        is_shared = not is_own or path == "optimizer" or target.startswith("trainer.")
        types |= SHARED.get(path, {}) if is_shared else {}
        types |= ARGUMENTS.get(target, {})
        for name, value in section.items():
            key, default = f"{path}.{name}", example.get(name)
            if name in extras or value == MISSING:
                continue
            if name not in example and not is_own:
                yield from _unknown(key, value, base, choices)
            elif name in types and not (type(value) is type(default) and value == default):
                try:
                    section[name] = convert(types[name], value)
                except ValidationError:
                    yield value_fault(key, types[name], value, default)


def _unknown(key: str, value: object, known: Tree, choices: Mapping[str, Any]) -> Iterator[str]:
    """Say what is meant by a key that is none.

    Yields:
        One line.
    """
    owner, name = owner_of(key), key.rpartition(".")[2]
    others = [o for o, keys in options_of(owner).items() if name in keys] if owner else []
    if owner and others and key != owner:
        better = f"{owner}={others[0]} {key}={show(value)}"
        yield line(key, value, f"not a setting of {_choice(owner, choices)}; type {better}")
        return
    offers = [k for k in (*flat(known), *KEYS) if not k.endswith("_target_")]
    hint = f" Did you mean {SYNONYMS[name]}?" if name in SYNONYMS else did_you_mean(key, offers)
    if not hint and owner:
        names = [k for k in lookup(known, owner) if f"{owner}.{k}" in offers]
        hint = f" {_choice(owner, choices)} has {', '.join(names) or 'none'}"
    yield clip(f"{key}: unknown setting.{hint}")


def _is_default(key: str, raw: Tree, base: Tree, typed: Collection[str]) -> bool:
    """Whether neither the command line nor a recipe sets a key, or the other way to state it."""
    same = {"steps", "epochs"} if key in {"steps", "epochs"} else {key}
    return same.isdisjoint(typed) and all(lookup(raw, k) == lookup(base, k) for k in same)


def _fields(tree: Tree, choices: Mapping[str, Any], typed: Collection[str]) -> dict[str, Any]:
    """Bring a composed tree into the shape of `RunConfig`."""
    fields: dict[str, Any] = {**tree, "choices": dict(choices)}
    for path in COMPONENTS:
        if "." not in path:
            fields[path] = _component(tree.get(path), path, choices, typed)
    if isinstance(hooks := tree.get("hooks"), list | tuple):
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
    fields: dict[str, Any] = {key: section[key] for key in extras if key in section}
    if "gradient" in fields:
        fields["gradient"] = _component(fields["gradient"], f"{path}.gradient", choices, typed)
    return fields | {
        "target": section.get("_target_"),
        "params": {k: v for k, v in section.items() if k not in extras and k != "_target_"},
        "name": None if option == OWN else option,
        "typed_target": path in typed,
    }


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
        key = next((k for k in (path, *ancestors(path)) if k in KEYS), path)
        value = lookup(tree, key)
        inner = next(iter(value), "") if isinstance(value, Mapping) else ""
        if parts[-1] == "target":
            yield _class_fault(path.removesuffix(".target"), tree, choices)
        elif item["type"] == "extra_forbidden" and "." in parts[-1]:
            nested = f"{path.replace('.', ': {')}: ...{'}' * path.count('.')}"
            yield clip(f"{path}: a file nests its keys, {nested}")
        elif item["type"] == "extra_forbidden":
            for unknown, given in flat({path: item["input"]}).items():
                yield from _unknown(unknown, given, base, choices)
        elif key not in KEYS:
            names = [k.removeprefix(f"{key}.") for k in KEYS if k.startswith(f"{key}.")]
            yield line(key, value, f"is a section, not a value; it has {', '.join(names)}")
        elif inner:
            yield clip(f"{key}.{inner}: unknown setting. {key} is one value, {key}=...")
        else:
            yield value_fault(key, KEYS[key].annotation, value, lookup(base, key))


def _class_fault(path: str, tree: Tree, choices: Mapping[str, Any]) -> str:
    key, value = f"{path}._target_", lookup(tree, f"{path}._target_")
    if value is None:
        return clip(f"{_choice(path, choices)}: no class is named; type {key}=package.Class")
    return line(key, value, "must be the import path of a class: package.Class")
