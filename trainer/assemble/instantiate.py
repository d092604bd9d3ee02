"""Turn the names in a config into objects: the only room that does.

A class named by a recipe is code from a stranger. It is looked up only inside this package, among
the models and optimizers of the model libraries, or in a package the command line trusts, and then
checked for what it is: a class, of the expected base, defined where its name says, so that an alias
cannot smuggle a function in. A class that the user typed themselves needs no further consent, and
may be a function or a method of a class. Arguments with a `_target_` are built in the same way.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from importlib import metadata
from inspect import Parameter
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import nn

from trainer.assemble.features import Feature, Features
from trainer.config import components
from trainer.config.command_words import READING
from trainer.config.data_sets import component_of, source_components
from trainer.config.messages import near_file, one_line, show
from trainer.config.option_files import LIBRARIES, data_dir, load_yaml, options_of
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError, TrainError
from trainer.core.own_code import OWN_CODE
from trainer.core.user_code import causes, described, place_of
from trainer.models.facts import model_library, noted, noted_facts
from trainer.models.transform import ModelTransform

Built = TypeVar("Built")
Transform = Callable[[nn.Module], Any]
PASSES_ON = "passes_on"
"""Class attribute: import path of what takes all names that a constructor takes by `**others`."""


def look_up(
    component: components.Component, key: str, trusted: tuple[str, ...], *, inner: bool = False
) -> Callable[..., Any]:
    """Find the class that a component, under a config key, names.

    A name that nobody typed is of this program, but not where it is for an argument (`inner`), of
    a model library, which then must have the base that the key asks for, or of a `trusted` package.
    """
    typed = f"{key}._target_={component.target}"
    module_name, root = component.target.rpartition(".")[0], component.target.partition(".")[0]
    is_trusted = component.typed_target or root in trusted or (root == "trainer" and not inner)
    base_name = components.LIBRARY_BASES.get(key, {}).get(module_name)
    if not is_trusted and base_name is None:
        raise ConfigError(
            f"{typed}: comes from a recipe or a saved run: pass it on the command line, or trust "
            f"its package with trust=[{root}]"
        )
    if component.typed_target or root in trusted:
        OWN_CODE.permit(component.target)
    try:
        found = _find(component.target)
        base: Any = object
        if not is_trusted:
            base = _find(f"{module_name}.{base_name}")
    except (ImportError, AttributeError, SyntaxError) as error:
        why = place_of(error) or OWN_CODE.why_hidden(component.target) or _meant(error)
        raise ConfigError(f"{typed}: {_cause(error)}{why}") from error
    is_factory = inspect.isfunction(found) or inspect.ismethod(found)
    is_native = getattr(found, "__module__", "").partition(".")[0] == root
    if not is_native or not (inspect.isclass(found) or is_factory):
        raise ConfigError(f"{typed}: not a class defined in {root}")
    # Functions of the libraries load code, too, which trust in a library does not mean.
    is_loader = root in components.LIBRARY_ROOTS and found.__name__ != "from_config"
    is_permitted = component.typed_target or (root in trusted and not is_loader)
    if is_factory and not is_permitted:
        option = options_of(components.owner_of(key) or key).get(component.name or "", {})
        if option.get("_target_") != component.target:  # of no built-in option
            text = "a function, not a class; to allow it, type it on the command line"
            raise ConfigError(f"{typed}: {text}")
    if inspect.isclass(found) and not issubclass(found, base):
        raise ConfigError(f"{typed}: not a {module_name}.{base_name}")
    return found  # type: ignore[no-any-return] # a class, or what makes an instance


def _meant(error: BaseException) -> str:
    """Offer the nearest name that a module, or class, has."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        path = near_file(f"{error.name.replace('.', os.sep)}.py") or ""
        module = path.removesuffix(".py")
        return f". Did you mean {module.replace(os.sep, '.')}?" if module != path else ""
    if not isinstance(error, AttributeError) or not error.obj:
        return ""
    # A rank is started anew, and its `__main__` is not the script that the user started.
    if getattr(error.obj, "__name__", "") == "__main__":
        return "; ranks are programs of their own: put the class into a file of its own"
    near = difflib.get_close_matches(str(error.name), vars(error.obj), n=1)
    return f". Did you mean {near[0]}?" if near else ""


def _cause(error: BaseException) -> str:
    """Say why a class cannot be imported, with the error behind it that a library wraps."""
    first, *_, last = error, *causes(error)
    text = str(first)
    if last is not first and str(last) not in text:
        text = f"{first} ({last})"
    if isinstance(last, ModuleNotFoundError) and last.name in LIBRARIES["extras"]:
        text += f": pip install '.[{LIBRARIES['extras'][last.name]}]'"
    # Built for another torch it fails with an operator that is missing, which names no cause.
    if "torchvision" in str(last):
        with suppress(metadata.PackageNotFoundError):
            vision, torch = metadata.version("torchvision"), metadata.version("torch")
            pair = f"torchvision {vision} does not fit torch {torch}"
            text += f"; {pair}: install the one that was built for it, or remove it"
    return " ".join(text.split())


def _find(target: str) -> Any:  # noqa: ANN401 - whatever has the name
    """Import what a dotted name leads to, in a class of a module too."""
    module, _, names = target.rpartition(".")
    while "." in module:
        try:
            if importlib.util.find_spec(module) is not None:
                break
        except ModuleNotFoundError:
            # The parent is no package: a class stands on the way to it.
            pass
        module, _, name = module.rpartition(".")
        names = f"{name}.{names}"
    return attrgetter(names)(importlib.import_module(module))


def construct(
    component: components.Component,
    key: str,
    expected: type[Built],
    trusted: tuple[str, ...] = (),
    given: Mapping[str, Any] | None = None,
) -> Built:
    """Build a component, and check that it is an instance of what its place needs.

    Arguments that come from elsewhere, `given`, are passed where the constructor takes them and
    the config leaves them out or null. A `TrainError` of the constructor passes.
    """
    target, wrong = look_up(component, key, trusted), f"not of class {expected.__name__}"
    if inspect.isclass(target) and not component.typed_target and not issubclass(target, expected):
        raise ConfigError(f"{key}._target_={component.target}: {wrong}")
    built = _call(target, component, key, trusted, given or {})
    if not isinstance(built, expected):
        kind = type(built).__name__
        raise ConfigError(f"{key}._target_={component.target}: gives {kind}, {wrong}")
    if isinstance(built, torch.nn.Module):
        refuse_unused(key, component.params, noted_facts(built).unused_arguments)
    return built


def check_components(config: RunConfig) -> None:
    """Look the classes of a run up, and the names of their arguments, at any depth; build nothing.

    One `ConfigError` has a line for each fault of all of them.
    """
    faults: list[str] = []
    waiting = [(path, attrgetter(path)(config), False) for path in components.COMPONENTS]
    takes_steps = config.command not in READING
    for key, each in config.listed():
        is_read = key.startswith(("transforms", components.EVAL_SETS))
        if takes_steps or is_read:
            waiting.append((key, each, False))
    # Where data have sources, other settings of the data are theirs.
    if found := source_components(config.data):
        waiting = [each for each in waiting if each[0] != "data"]
        waiting += [(key, each, False) for key, (each, _) in found.items()]
    for key, component, inner in waiting:
        try:
            target = look_up(component, key, config.trust, inner=inner)
            # Not all shared ones reach a class of the user's own, or one of PyTorch's.
            shared = {path: components.SHARED[path] for path in ("optimizer", "scheduler")}
            given = {**shared, "data": {"holdout"}}.get(components.owner_of(key) or key, ())
            target, arguments = model_library().callable(
                target, component.params, typed=component.typed_target
            )
            names = [name for name in arguments if name not in ("_partial_", *given)]
            check_names(target, key, names)
        except ConfigError as error:
            faults += error.faults
        _with_inner(component.params, component, key, lambda *inner: waiting.append((*inner, True)))
    if faults:
        raise ConfigError(*faults)


def arguments_of(
    component: components.Component, key: str, trusted: tuple[str, ...]
) -> dict[str, Any]:
    """Give the arguments of a component; those that name a class with `_target_` are built."""

    def build(key: str, inner: components.Component) -> Any:  # noqa: ANN401 - whatever it makes
        return _call(look_up(inner, key, trusted, inner=True), inner, key, trusted, {})

    return dict(_with_inner(component.params, component, key, build))


def _with_inner(
    value: Any,  # noqa: ANN401 - any argument
    owner: components.Component,
    key: str,
    build: Callable[[str, components.Component], Any],
) -> Any:  # noqa: ANN401
    """Put what `build` makes of a class in the place of each that a value names, at its key."""
    if isinstance(value, list):
        return [_with_inner(each, owner, key, build) for each in value]
    if not isinstance(value, Mapping):
        return value
    if "_target_" not in value:
        return {k: _with_inner(each, owner, f"{key}.{k}", build) for k, each in value.items()}
    return build(key, component_of(value, key, typed=owner.typed_target))


def _call(
    target: Callable[..., Any],
    component: components.Component,
    key: str,
    trusted: tuple[str, ...],
    given: Mapping[str, Any],
) -> Any:  # noqa: ANN401 - whatever it makes
    """Call what a component names with its arguments, or bind them with `_partial_`."""
    arguments = arguments_of(component, key, trusted)
    is_partial = arguments.pop("_partial_", False)
    target, arguments = model_library().callable(target, arguments, typed=component.typed_target)
    parameters = inspect.signature(target).parameters
    for name, value in given.items():
        if name in parameters and value is not None and arguments.get(name) is None:
            arguments[name] = value
    check_names(target, key, arguments)
    if is_partial:
        return functools.partial(target, **arguments)
    # What a stranger's recipe asks of a class may break it anywhere.
    refusals: tuple[type[Exception], ...] = (Exception,)
    if component.typed_target:
        refusals = (TypeError, ValueError, OSError)
    try:
        # A constructor may switch gradients off, and leave them so for all that follows.
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            return noted(target(**arguments))
    except TrainError:
        raise
    except refusals as error:
        text = " ".join(str(error).split())
        if isinstance(error, ImportError):
            text = _cause(error)
        elif place_of(error):
            text = described(error)
        if (
            "required positional" in text
            and inspect.isfunction(target)
            and key not in components.COMPONENTS
        ):
            text += "; to give the function itself, add _partial_: true"
        raise ConfigError(f"{key}: {component.target}: {text}") from error


def look_up_transforms(config: RunConfig) -> tuple[list[Transform], bool]:
    """Build what changes a model, the adapter last; tells whether all draw on the meta device.

    A function takes the model first, and then the arguments of its entry.
    """
    transforms = list[Transform]()
    for key, entry in config.model_transforms.items():
        kind = look_up(entry, key, config.trust)
        if inspect.isclass(kind):
            transforms.append(construct(entry, key, ModelTransform, config.trust))
        else:
            bound = entry.model_copy(update={"params": {**entry.params, "_partial_": True}})
            transforms.append(construct(bound, key, functools.partial, config.trust))
    return transforms, all(map(draws_on_meta, transforms))


def draws_on_meta(transform: Transform) -> bool:
    """Whether a transform declares that it may be given a model on the meta device."""
    if isinstance(transform, functools.partial):
        transform = transform.func
    return bool(getattr(transform, "draws_on_meta", False))


def run_features(config: RunConfig) -> Features:
    """Build the features of every run, and those that a config names."""
    found = dict[str, Feature]()
    for name, entry in load_yaml(data_dir("conf") / "features.yaml").items():
        found[name] = pkgutil.resolve_name(entry["_target_"]).of(config)
    for key, component in config.features.items():
        found[key] = construct(component, key, Feature, config.trust)
    return Features(found)


def refuse_unused(key: str, typed: Mapping[str, Any], unused: Mapping[str, str] | None) -> None:
    """Refuse arguments that were typed and do nothing; what was built says of `unused` ones why."""
    faults = list[str]()
    for name, why in (unused or {}).items():
        if typed.get(name) is not None:
            faults.append(f"{key}.{name}={show(typed[name])}: {why}; leave it out")
    if faults:
        raise ConfigError(*faults)


def check_names(target: Callable[..., Any], key: str, names: Collection[str]) -> None:
    """Name every argument that a constructor does not take, with the nearest it does."""
    parameters: Mapping[str, Parameter] = inspect.signature(target).parameters
    # The constructor of `nn.Module` itself refuses what its `**kwargs` take.
    if getattr(target, "__init__", None) is torch.nn.Module.__init__:
        parameters = {}
    if any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
        if (receiver := getattr(target, PASSES_ON, None)) is None:
            return
        own = {n: p for n, p in parameters.items() if p.kind is not Parameter.VAR_KEYWORD}
        try:
            parameters = {**own, **inspect.signature(_find(receiver)).parameters}
        except ImportError as error:
            raise ConfigError(f"{key}: {target.__name__} needs it: {_cause(error)}") from error
    faults = list[str]()
    for name in names:
        if name not in parameters:
            hint = f"It takes {', '.join(parameters) or 'none'}."
            if near := difflib.get_close_matches(name, parameters, n=1):
                hint = f"Did you mean {key}.{near[0]}?"
            text = f"{key}.{name}: {target.__name__} takes no such argument. {hint}"
            faults.append(one_line(text))
    if faults:
        raise ConfigError(*faults)
