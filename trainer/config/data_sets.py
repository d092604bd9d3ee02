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

OF_OWN_DATA = ("data.holdout", "data.max_samples", "data.part", "data.subset", "data.filter")
"""Keys by which a run takes a part of its data."""
SOURCE_WEIGHT = "weight"  # setting of a source beside those of its class


def eval_sets(tree: Tree) -> dict[str, Any]:
    """Give the named held-out sets of a config by key, each laid over its data unless of a class.

    What is no mapping stays as it is, for the schema to refuse.
    """
    sets = _section(_section(tree, "eval"), "sets")
    same = set_defaults(_section(tree, "data"))
    # All of such a set is evaluated.
    same.pop("holdout", None)
    elsewhere = names_in_path(str(same.get("_target_")))
    found: dict[str, Any] = {}
    for name, entry in sets.items():
        found[f"{EVAL_SETS}.{name}"] = entry
        if isinstance(entry, Mapping) and "_target_" not in entry:
            own = dict(same)
            # What data.subset and data.part name is in data.path, and another path may lack it.
            if "path" in entry:
                own |= elsewhere
            found[f"{EVAL_SETS}.{name}"] = own | dict(entry)
    return found


def set_defaults(data: Tree) -> dict[str, Any]:
    """Give what a held-out set has where it says nothing else: settings of the data.

    Beside data of several sources it is like one of them, and has the settings that they share.
    """
    same = dict(data)
    for name in extra_keys("data"):
        same.pop(name, None)
    if sources_argument(str(data.get("_target_"))) is None:
        return same
    one = source_option()
    # It is of a mixture; a held-out set is evaluated as a whole.
    del one[SOURCE_WEIGHT]
    for name in one:
        if name != "_target_" and same.get(name) is not None:
            one[name] = same[name]
    return one


def names_in_path(target: str) -> dict[str, None]:
    """Name the arguments of a class that choose among what its path holds, each with null."""
    found = dict[str, None]()
    for name, kind in declared(target).types.items():
        if kind == NameInPath | None:
            found[name] = None
    return found


def sources_argument(target: str) -> str | None:
    """Name the argument of a class that takes sources; None where it takes none."""
    for name, kind in declared(target).types.items():
        if kind is Sources:
            return name
    return None


def sources(tree: Tree) -> dict[str, dict[str, Any]]:
    """Give the sources of a config's data by key, each over the option that it is of by default."""
    data = _section(tree, "data")
    argument = sources_argument(str(data.get("_target_")))
    found = dict[str, dict[str, Any]]()
    if argument is None:
        return found
    for name, entry in _section(data, argument).items():
        if isinstance(entry, Mapping):
            # Of a class of its own no default is known.
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
    params = dict(section)
    params.pop("_target_", None)
    try:
        return Component(target=section["_target_"], params=params, typed_target=typed)
    except ValidationError as error:
        raise ConfigError(line(f"{key}._target_", section["_target_"], NO_CLASS)) from error


def _section(tree: Tree, name: str) -> Tree:
    # What is no mapping is left for the schema to refuse.
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}
