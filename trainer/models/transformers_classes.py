"""Know what classes of transformers take, and what their files hold; imports it only with them."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from trainer.core.format import DTYPE_WORDS

_LOADERS = {"from_pretrained", "from_config", "_from_config"}
_DTYPES = ("dtype", "torch_dtype")
_NAMED = {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}
_CODE = ("attn_implementation", "experts_implementation")  # may name a kernel on the hub
PRETRAINED = "pretrained_model_name_or_path"
"""Argument of what loads a model: a folder, or a name on the hub."""

_FEW = 2  # names, which tell what the others are
_STORED_WORDS = {word.upper().replace("P", ""): word for word in DTYPE_WORDS.values()}
"""The field's words by those of safetensors, such as `F32`."""


def with_dtype(target: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Have a model of transformers loaded, or built, with fp32 weights unless a dtype is typed.

    Left alone, its weights have the dtype of the file or of the config, mostly bf16, in which small
    updates are rounded away.
    """
    owner = getattr(target, "__self__", None)
    is_model = hasattr(owner, "config_class") or hasattr(owner, "_model_mapping")
    if not is_model or target.__name__ not in _LOADERS:
        return dict(arguments)
    parameters = inspect.signature(target).parameters.values()
    takes = any(p.name == "dtype" or p.kind is Parameter.VAR_KEYWORD for p in parameters)
    is_typed = any(arguments.get(name) is not None for name in _DTYPES)
    return dict(arguments) if is_typed or not takes else {**arguments, "dtype": "float32"}


def noting(target: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Have what loads a model of transformers note on it what its files did not hold."""
    owner = getattr(target, "__self__", None)
    is_model = hasattr(owner, "config_class") or hasattr(owner, "_model_mapping")
    source = arguments.get(PRETRAINED)
    if not is_model or target.__name__ != "from_pretrained" or not isinstance(source, str):
        return target

    @functools.wraps(target)
    def load(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - as transformers gives it
        found = target(*given, **{**named, "output_loading_info": True})
        if not isinstance(found, tuple):  # a method of its own
            return found
        note_loaded(found[0], source, found[1])
        return found[0]

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


def stored_dtypes(name: str | None) -> list[str]:
    """Name the dtypes of the floating-point weights in the files that a model was loaded from.

    Such as `["bf16"]`; empty where the files are not known or not safetensors.
    """
    hub: Any = sys.modules.get("transformers.utils.hub")
    if name is None or hub is None:
        return []
    try:
        file = hub.cached_file(name, "config.json", local_files_only=True)
        kinds = set[str]()
        for each in Path(file).parent.glob("*.safetensors"):
            with safe_open(str(each), "pt") as tensors:
                kinds |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    except (OSError, TypeError, ValueError, SafetensorError):
        return []
    real = [kind for kind in kinds if kind.startswith(("F", "BF"))]
    return sorted(_STORED_WORDS.get(kind, kind.lower()) for kind in real)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what transformers logs as it loads or runs a model; the start says it in rows."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


LOADED_FROM, _LOADED_BUT = "loaded_from", "loaded_but"


def note_loaded(module: nn.Module, source: str, report: Mapping[str, Any]) -> None:
    """Note on a model where its weights are from, and by transformers' report which are not."""
    setattr(module, LOADED_FROM, source)
    new = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    found = {"new": sorted(new), "unused": sorted(report["unexpected_keys"])}
    setattr(module, _LOADED_BUT, found)


def loaded_from(module: nn.Module, params: Mapping[str, Any]) -> str | None:
    """Name what a model, or a part that it wraps, was loaded from, by its mark or its arguments."""
    names: Iterator[str] = (vars(part)[LOADED_FROM] for _, part in _loaded_parts(module))
    return next(names, None) or pretrained_of(params)


def new_weights(module: nn.Module) -> list[str]:
    """Name the parameters of a loaded model that no file holds, beside a part that it wraps too."""
    loaded = tuple(prefix for prefix, _ in _loaded_parts(module))
    names = sorted(name for name, _ in module.named_parameters()) if loaded else []
    return [*_noted(module, "new"), *(name for name in names if not name.startswith(loaded))]


def loaded_but(module: nn.Module) -> str:
    """Say which weights of a model are new, and which of its files were not used."""
    texts = []
    for what, names in (("new", new_weights(module)), ("unused", _noted(module, "unused"))):
        if names:
            more = ", ..." if len(names) > _FEW else ""
            texts.append(f"{len(names)} {what} ({', '.join(names[:_FEW])}{more})")
    return ", ".join(texts)


def _loaded_parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """List what was loaded, as a whole, with what the names of its parameters begin with."""
    named = module.named_modules()
    return [(n and f"{n}.", part) for n, part in named if LOADED_FROM in vars(part)]


def _noted(module: nn.Module, what: str) -> list[str]:
    found = ((p, vars(part).get(_LOADED_BUT, {})) for p, part in _loaded_parts(module))
    return [f"{prefix}{name}" for prefix, groups in found for name in groups.get(what, ())]


def pretrained_of(params: Mapping[str, Any]) -> str | None:
    """Find what a model is loaded from among its arguments, at any depth."""
    if isinstance(name := params.get(PRETRAINED), str):
        return name
    inner = (pretrained_of(value) for value in params.values() if isinstance(value, Mapping))
    return next(filter(None, inner), None)
