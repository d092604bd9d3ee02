"""Find the data sets that a config names beside its data: held-out sets, and sources of a mixture.

Each takes over settings of the data, and lays its own over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from trainer.config.components import EVAL_SETS, Component, NameInPath, Sources, extra_keys
from trainer.config.declared import declared
from trainer.config.messages import NO_CLASS, Tree, line
from trainer.config.option_files import options_of
from trainer.core.errors import ConfigError

SOURCE_WEIGHT = "weight"
"""Setting of a source beside those of its class."""


def eval_sets(tree: Tree) -> dict[str, Any]:
    """Give the named held-out sets of a config by key, each laid over its data unless of a class.

    What is no mapping stays as it is, for the schema to refuse.
    """
    sets = _section(_section(tree, "eval"), "sets")
    same = set_defaults(_section(tree, "data"))
    same.pop("holdout", None)  # all of it is evaluated
    elsewhere = names_in_path(str(same.get("_target_")))
    found: dict[str, Any] = {}
    for name, entry in sets.items():
        found[f"{EVAL_SETS}.{name}"] = entry
        if isinstance(entry, Mapping) and "_target_" not in entry:
            # What data.subset and data.part name is in data.path, and another path may lack it.
            beside = elsewhere if "path" in entry else {}
            found[f"{EVAL_SETS}.{name}"] = same | beside | dict(entry)
    return found


def set_defaults(data: Tree) -> dict[str, Any]:
    """Give what a held-out set has where it says nothing else: settings of the data.

    Beside data of several sources it is like one of them, and has the settings that they share.
    """
    same = {name: data[name] for name in data if name not in extra_keys("data")}
    if sources_argument(str(data.get("_target_"))) is None:
        return same
    one = source_option()
    del one[SOURCE_WEIGHT]
    shared = {n: same[n] for n in one if n != "_target_" and same.get(n) is not None}
    return one | shared


def names_in_path(target: str) -> dict[str, None]:
    """Name the arguments of a class that choose among what its path holds, each with null."""
    types = declared(target).types.items()
    return {name: None for name, kind in types if kind == NameInPath | None}


def sources_argument(target: str) -> str | None:
    """Name the argument of a class that takes sources; None where it takes none."""
    types = declared(target).types.items()
    return next((name for name, kind in types if kind is Sources), None)


def sources(tree: Tree) -> dict[str, dict[str, Any]]:
    """Give the sources of a config's data by key, each over the option that it is of by default."""
    data = _section(tree, "data")
    argument = sources_argument(str(data.get("_target_")))
    found = {}
    for name, entry in _section(data, argument).items() if argument else ():
        if isinstance(entry, Mapping):
            default = {} if "_target_" in entry else source_option()
            found[f"data.{argument}.{name}"] = {**default, **entry}
    return found


def source_option() -> dict[str, Any]:
    """Give the class that a source is of where it names none, and all that it may be given."""
    return {SOURCE_WEIGHT: 1.0, **options_of("data")["hf"]}


def source_components(data: Component) -> dict[str, tuple[Component, float]]:
    """Give class, arguments of its own and weight of each source of a data set, by key."""
    plain = {"data": {"_target_": data.target, **data.params}}
    found = {}
    for key, section in sources(plain).items():
        argument, name = key.split(".")[1:]
        own = dict(data.params[argument][name])
        is_typed = data.typed_target and "_target_" in own
        weight = float(own.pop(SOURCE_WEIGHT, 1))
        component = component_of({**own, "_target_": section["_target_"]}, key, typed=is_typed)
        found[key] = component, weight
    return found


def component_of(section: Tree, key: str, *, typed: bool) -> Component:
    """Tell a class that a value of the config names from its arguments."""
    params = {name: value for name, value in section.items() if name != "_target_"}
    try:
        return Component(target=section["_target_"], params=params, typed_target=typed)
    except ValidationError as error:
        raise ConfigError(line(f"{key}._target_", section["_target_"], NO_CLASS)) from error


def _section(tree: Tree, name: str) -> Tree:
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}
