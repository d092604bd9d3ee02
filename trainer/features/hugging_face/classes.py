"""Have classes of transformers take the settings of their config, and note what files lack."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from inspect import Parameter
from typing import Any

from trainer.models.facts import ModelFacts, noted

_NAMED = {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}
_CODE = ("attn_implementation", "experts_implementation")  # may name a kernel on the hub


def with_facts(target: Callable[..., Any], source: str) -> Callable[..., Any]:
    """Have what loads a model note on it what its files do not hold."""

    @functools.wraps(target)
    def load(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - as transformers gives it
        found = target(*given, **{**named, "output_loading_info": True})
        if not isinstance(found, tuple):  # a method of its own
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
    kind: Any = target if is_config else getattr(target, "config_class", None)
    is_model = inspect.isclass(kind) and [*inspect.signature(target).parameters][:1] == ["config"]
    if not (is_config or is_model):
        return target

    def make(**settings: Any) -> Any:  # noqa: ANN401 - any model or config
        return kind(**settings) if is_config else target(kind(**settings))

    make.__name__ = target.__name__
    own = [p for p in inspect.signature(kind).parameters.values() if p.kind in _NAMED]
    if not typed:
        own = [p for p in own if p.name not in getattr(kind, "sub_configs", ())]
    known = {p.name for p in own}
    found = [n for n, v in inspect.getmembers(kind) if isinstance(v, property) and v.fset]
    more = [n for n in found if not n.startswith("_") and n != "name_or_path"]
    more += [*kind.attribute_map, *(n for n in names if n.endswith("_token_id"))]
    more += _CODE if typed else ()
    own += [Parameter(n, Parameter.KEYWORD_ONLY) for n in dict.fromkeys(more) if n not in known]
    make.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined] # read by inspect
    return make


def facts_of_loading(source: str, report: Mapping[str, Any]) -> ModelFacts:
    """Say where the weights of a model are from, and by transformers' report which are not."""
    new = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    return ModelFacts(source=source, new=sorted(new), unused=sorted(report["unexpected_keys"]))
