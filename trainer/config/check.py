"""Compares a composed config with what its options offer: names and types, fault by fault.

The composition of the chosen options alone, without a single value of the user's, is the example
that a config is held against. So a class of anyone's own is checked like a built-in one, and a
misspelt key is found though Hydra's `+` let it in.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from pydantic import ValidationError

from trainer.config.habits import SYNONYMS
from trainer.config.keys import Key
from trainer.config.messages import (
    MISSING,
    ancestors,
    assign,
    clip,
    conform,
    did_you_mean,
    flat,
    line,
    lookup,
    prune,
    show,
)
from trainer.config.secrets import is_secret, leaked
from trainer.config.sections import COMPONENT_PATHS, SHARED_KEYS

ONLY_WITH: Mapping[str, str] = {
    "accum.steps": "accum=fixed",
    "accum.max_tokens": "accum=budget",
    "accum.memory": "accum=auto",
    "data.path": "data=text",
    "data.field": "data=text",
}
"""Keys that one option has and its neighbours lack."""

_HYDRA_KEY = re.compile(r"_\w+_")


@final
@dataclass(frozen=True, kw_only=True)
class Checked:
    """A config whose names are known and whose constructor arguments have the right types.

    Attributes:
        tree: without the keys that are at fault.
        faults: one line each.
    """

    tree: dict[str, Any]
    faults: tuple[str, ...]


def check(
    raw: Mapping[str, Any],
    base: Mapping[str, Any],
    choices: Mapping[str, Any],
    keys: Mapping[str, Key],
    environ: Mapping[str, str],
) -> Checked:
    """Hold a composed config against the composition of its options alone.

    Args:
        raw: the composed config, plain.
        base: the same groups and options, without values.
        choices: option of every group, for the texts.
        keys: the interface, for offers and docs.
        environ: where secrets may stand that no config should hold.

    Returns:
        What is left, and the faults.
    """
    # A class that its option does not name takes arguments that only its constructor knows.
    own = {path for path in COMPONENT_PATHS if _target(raw, path) != _target(base, path)}
    unknown = dict(_unknown(raw, base, own, choices, keys))
    tree = prune(copy.deepcopy(dict(raw)), unknown)
    for key in unknown:
        _restore(tree, base, key)
    faults = [*unknown.values(), *_reserved(tree), *_missing(tree, choices), *_leaks(tree, environ)]
    faults += _conform_arguments(tree, base, own, keys)
    faults += _shared_arguments(tree, base, own, keys)
    return Checked(tree=tree, faults=tuple(faults))


def _target(tree: Mapping[str, Any], path: str) -> object:
    return lookup(tree, f"{path}._target_")


def _unknown(
    raw: Mapping[str, Any],
    base: Mapping[str, Any],
    own: set[str],
    choices: Mapping[str, Any],
    keys: Mapping[str, Key],
) -> Iterator[tuple[str, str]]:
    """Give every leaf that the options do not offer, with its line.

    Yields:
        Dotted key and fault.
    """
    known = flat(base)
    for key, value in flat(raw).items():
        if key in known or _owner(key) in own:
            continue
        parts = [other.removeprefix(f"{key}.") for other in known if other.startswith(f"{key}.")]
        parent = next((path for path in ancestors(key) if path in known), None)
        if parts:
            names = ", ".join(dict.fromkeys(part.split(".")[0] for part in parts))
            yield key, line(key, value, f"is a section, not a value; it has {names}")
        elif parent is None:
            yield key, _unknown_line(key, value, known, choices, keys)
        elif not isinstance(known[parent], Mapping) and (
            parent in keys or known[parent] is not None
        ):
            yield key, clip(f"{key}: unknown setting. {parent} is one value, {parent}=...")


def _unknown_line(
    key: str,
    value: object,
    known: Mapping[str, Any],
    choices: Mapping[str, Any],
    keys: Mapping[str, Key],
) -> str:
    owner = _owner(key)
    option = ONLY_WITH.get(key)
    if option and owner:
        there = _choice(owner, choices)
        return line(key, value, f"not a setting of {there}; say {option} {key}={show(value)}")
    offers = [k for k in (*known, *keys) if not k.endswith("_target_")]
    synonym = SYNONYMS.get(key.rsplit(".", 1)[-1])
    hint = f" Did you mean {synonym}?" if synonym else did_you_mean(key, offers)
    if not hint and owner:
        names = [k.removeprefix(f"{owner}.") for k in offers if k in known and _owner(k) == owner]
        hint = f" {_choice(owner, choices)} has {', '.join(dict.fromkeys(names)) or 'none'}"
    return clip(f"{key}: unknown setting.{hint}")


def _owner(key: str) -> str | None:
    """Name the innermost component a key belongs to."""
    return next((path for path in (key, *ancestors(key)) if path in COMPONENT_PATHS), None)


def _choice(owner: str, choices: Mapping[str, Any]) -> str:
    """Write which option a component was chosen by: `model=gpt_tiny`."""
    option = choices.get(owner.replace(".", "/"))
    return f"{owner}={option}" if option else owner


def _restore(tree: dict[str, Any], base: Mapping[str, Any], key: str) -> None:
    """Put the options' own values back where a fault took a whole section or value away."""
    for path in reversed((key, *ancestors(key))):
        offered = lookup(base, path)
        if offered is not None and lookup(tree, path) is None:
            assign(tree, path, copy.deepcopy(offered))


def _reserved(tree: Mapping[str, Any]) -> Iterator[str]:
    for key in flat(tree):
        for part in key.split("."):
            if _HYDRA_KEY.fullmatch(part) and part not in ("_target_", "_partial_"):
                yield clip(f"{key}: {part} is not for a config; _target_ and _partial_ are read")


def _missing(tree: Mapping[str, Any], choices: Mapping[str, Any]) -> Iterator[str]:
    for key, value in flat(tree).items():
        if value == MISSING:
            yield clip(f"{key}: {_choice(_owner(key) or key, choices)} needs it, {key}=...")


def _leaks(tree: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[str]:
    """Give what would be written to the run folder, and from there to whom it is shown.

    Yields:
        One line per fault.
    """
    for key, value in _scalars(tree):
        variable = leaked(value, environ)
        if variable:
            yield leak_line(key, variable)
        elif is_secret(key.rpartition(".")[2], value):
            yield secret_line(key)


def leak_line(key: str, variable: str) -> str:
    """Say that a setting holds what the environment keeps secret."""
    return clip(
        f"{key}: holds the secret of ${variable}, and would be written to the run folder; "
        "leave it in the environment"
    )


def secret_line(key: str) -> str:
    """Say that a setting must not be written into a run folder."""
    return clip(
        f"{key}: looks like a secret, and settings are written into the run folder; "
        "leave it in the environment, where the library that needs it reads it"
    )


def _scalars(tree: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
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


def _conform_arguments(
    tree: dict[str, Any], base: Mapping[str, Any], own: set[str], keys: Mapping[str, Key]
) -> Iterator[str]:
    """Read every constructor argument as the type its option gives it, in place.

    What the interface declares has a type of its own, and is left to the schema.

    Yields:
        One line per fault.
    """
    examples = flat(base)
    for key, value in flat(tree).items():
        owner = _owner(key)
        if owner is None or owner in own or key not in examples or key in keys:
            continue
        try:
            assign(tree, key, conform(examples[key], value))
        except ValueError as error:
            yield line(key, value, f"{error}, e.g. {show(examples[key])}")


def _shared_arguments(
    tree: dict[str, Any], base: Mapping[str, Any], own: set[str], keys: Mapping[str, Key]
) -> Iterator[str]:
    """Check the range of those arguments that mean the same in every option, in place.

    Yields:
        One line per fault.
    """
    for group in SHARED_KEYS.keys() - own:
        for name, value in lookup(tree, group).items():
            key = f"{group}.{name}"
            if not _is_shared(key) or value == MISSING:
                continue
            try:
                section = SHARED_KEYS[group].model_validate({name: value})
            except ValidationError:
                yield line(key, value, f"must be {keys[key].kind}")
                continue
            if value is None and lookup(base, key) is not None:
                yield line(key, value, f"must be given, e.g. {show(lookup(base, key))}")
            tree[group][name] = getattr(section, name)


def _is_shared(key: str) -> bool:
    group, _, name = key.rpartition(".")
    return group in SHARED_KEYS and name in SHARED_KEYS[group].model_fields
