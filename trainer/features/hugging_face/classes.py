"""Have classes of transformers take the settings of their config, and note what files lack."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from inspect import Parameter
from typing import Any

from trainer.models.facts import ModelFacts, noted

_NAMED = {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}
# Settings that may name a kernel on the hub
_CODE = ("attn_implementation", "experts_implementation")


def with_facts(target: Callable[..., Any], source: str) -> Callable[..., Any]:
    """Have what loads a model note on it what its files do not hold."""

    @functools.wraps(target)
    def load(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - as transformers gives it
        found = target(*given, **{**named, "output_loading_info": True})
        # A class may have a `from_pretrained` of its own, which reports nothing.
        if not isinstance(found, tuple):
            return found
        return noted((found[0], facts_of_loading(source, found[1])))

    return load


def with_config_settings(
    target: Callable[..., Any], names: Collection[str], *, typed: bool
) -> Callable[..., Any]:
    """Let a model that takes a config object be described by its config's settings.

    Of the `names` of arguments, ids of special tokens are taken, and what the constructor or the
    config knows. Unless the user `typed` the class, settings that name code to fetch from the
    network, as those of an inner config or of a kernel may, are left out.
    """
    is_config = inspect.isclass(target) and hasattr(target, "attribute_map")
    kind: Any = getattr(target, "config_class", None)
    if is_config:
        kind = target
    is_model = inspect.isclass(kind) and [*inspect.signature(target).parameters][:1] == ["config"]
    if not (is_config or is_model):
        return target

    def make(**settings: Any) -> Any:  # noqa: ANN401 - any model or config
        config = kind(**settings)
        return config if is_config else target(config)

    make.__name__ = target.__name__
    parameters = _parameters_of(kind, typed=typed)
    more = [*_settable(kind), *kind.attribute_map]
    for name in names:
        if name.endswith("_token_id"):
            more.append(name)
    if typed:
        more += _CODE
    for name in more:
        if name not in parameters:
            parameters[name] = Parameter(name, Parameter.KEYWORD_ONLY)
    signature = inspect.Signature([*parameters.values()])
    make.__signature__ = signature  # type: ignore[attr-defined] # read by inspect
    return make


def _parameters_of(kind: Any, *, typed: bool) -> dict[str, Parameter]:  # noqa: ANN401 - a config
    """Give the arguments of a config's constructor that can be typed, by name."""
    inner = getattr(kind, "sub_configs", ())
    found = dict[str, Parameter]()
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind in _NAMED and (typed or name not in inner):
            found[name] = parameter
    return found


def _settable(kind: Any) -> list[str]:  # noqa: ANN401 - a config
    """Name the properties of a config that can be set, such as `num_labels`.

    But the path that it was read from, which is no setting.
    """
    found = list[str]()
    for name, value in inspect.getmembers(kind):
        is_set = isinstance(value, property) and value.fset is not None
        if is_set and not name.startswith("_") and name != "name_or_path":
            found.append(name)
    return found


def facts_of_loading(source: str, report: Mapping[str, Any]) -> ModelFacts:
    """Say where the weights of a model are from, and by transformers' report which are not."""
    new = {*report["missing_keys"]}
    # Each comes with its shape in the files, and in the model.
    for name, *_ in report["mismatched_keys"]:
        new.add(name)
    return ModelFacts(source=source, new=sorted(new), unused=sorted(report["unexpected_keys"]))
