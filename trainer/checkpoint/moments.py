"""Whether a stored optimizer state is one that the optimizer could have written.

PyTorch's fused kernels trust the shapes of the state they are handed, so a stranger's state is held
against that of a twin: the same optimizer with the same settings over a stand-in, after one step on
a gradient of zeros. Of an optimizer that cannot take that step, and of keys that come later, state
may hold for each parameter numbers, vectors, and tensors of one element or of its own shape.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint.tensor_reader import Stored

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

_Kinds = dict[str, object]
"""By key of a parameter's state, what may stand there."""


def check_settings(optimizer: Optimizer, saved: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Hold the settings of a group against those of the same optimizer, made anew.

    Args:
        optimizer: whose constructor knows what is in range.
        saved: of a group, perhaps a stranger's.
        live: of the same group, in range.

    Raises:
        KeyError: one is missing.
        TypeError: one is of another kind.
        ValueError: one is out of range.
    """
    for name, value in live.items():
        if value is None:
            continue
        if _form(saved[name]) != _form(value):
            raise TypeError(f"optimizer setting {name}")
        if _is_finite(value) and not _is_finite(saved[name]):
            raise ValueError(f"optimizer setting {name} is not finite")
    if _refusal(optimizer, live) is None and (error := _refusal(optimizer, saved)) is not None:
        raise ValueError(f"optimizer setting: {error}")


def check_states(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    settings: Mapping[str, Mapping[str, Any]],
    states: Mapping[Any, Any],
) -> None:
    """Hold every parameter's stored state against what the optimizer would keep for it.

    Args:
        optimizer: newly made.
        parameters: those it updates, by name.
        settings: of each parameter's group, by the same names.
        states: as stored, by the same names; a user's class may keep more under others.

    Raises:
        ValueError: one is of another kind, or a key is missing.
    """
    twins: dict[object, _Kinds | None] = {}
    keys: set[frozenset[str]] = set()
    for name, parameter in parameters.items():
        state, group = states.get(name) or {}, settings[name]
        alike = id(group), parameter.shape, parameter.dtype
        if state and alike not in twins:
            twins[alike] = _kinds_of_twin(optimizer, parameter, group)
        expected = twins.get(alike)
        if state and expected is None:
            keys.add(frozenset(state))
            if group.get("fused"):
                raise ValueError(f"optimizer settings of {name} allow no step")
        if state:
            _check_state(name, state, parameter, expected or {})
    if len(keys) > 1:
        raise ValueError("optimizer states differ in their keys")
    others = states.keys() - parameters.keys()
    if others and _is_of_torch(optimizer):
        raise ValueError(f"optimizer state of {min(map(repr, others)):.40}, which is not trained")


def check_without(
    saved: Mapping[str, Any], names: Iterable[str], states: Mapping[Any, Any]
) -> None:
    """See that just those parameters are without state that were when it was saved.

    A parameter has none before its first gradient.

    Args:
        saved: what a checkpoint says of its optimizer; an earlier version did not say this.
        names: the parameters it updated.
        states: by name, as stored.

    Raises:
        ValueError: they differ.
    """
    found = {name for name in names if not states.get(name)}
    if differing := found ^ set(saved.get("without", found)):
        raise ValueError(f"optimizer state of {min(differing)} is missing")


def check_any(optimizer: Optimizer, states: Mapping[Any, Any]) -> None:
    """Refuse that there is no state at all after steps, of an optimizer that keeps some.

    Raises:
        ValueError: so it is.
    """
    group = optimizer.param_groups[0]
    if not any(states.values()) and _kinds_of_twin(optimizer, group["params"][0], group):
        raise ValueError("optimizer state is missing")


def _check_state(
    name: str, state: Mapping[str, Any], parameter: Tensor, expected: Mapping[str, object]
) -> None:
    """Check one parameter's.

    Raises:
        ValueError: something is of another kind, or a key is missing.
    """
    for key in sorted(expected.keys() - state.keys()):
        raise ValueError(f"optimizer state of {name} lacks {key}")
    for key, value in state.items():
        is_right = (
            _kind(value) == expected[key] if key in expected else _is_plain(value, parameter.shape)
        )
        if not is_right:
            raise ValueError(f"optimizer state {name}.{key} is {_kind(value)}")


def _is_plain(value: object, shape: torch.Size) -> bool:
    """Whether all tensors in a value are vectors, of one element or of a shape."""
    if isinstance(value, Mapping):
        return all(_is_plain(item, shape) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(item, shape) for item in value)
    return not isinstance(value, Tensor | Stored) or (
        value.shape == shape or value.shape.numel() == 1 or len(value.shape) == 1
    )


def _kinds_of_twin(
    optimizer: Optimizer, parameter: Tensor, settings: Mapping[str, Any]
) -> _Kinds | None:
    """Tell what the optimizer keeps for a parameter after a first step; None where it takes none.

    PyTorch's own classes mostly keep the parameter's shape whatever it is, which a small stand-in
    shows.
    """
    shape = tuple(parameter.shape)
    if _is_of_torch(optimizer):
        sizes = sorted({size for size in shape if size > 1})
        small = tuple(sizes.index(size) + 2 if size > 1 else size for size in shape)
        kinds = _stepped(optimizer, parameter.dtype, small, torch.device("cpu"), settings)
        shapes = [kind[0] for kind in (kinds or {}).values() if isinstance(kind, tuple)]
        if all(each in {(), small} for each in shapes):
            return kinds and {
                key: (shape, kind[1]) if isinstance(kind, tuple) and kind[0] == small else kind
                for key, kind in kinds.items()
            }
    return _stepped(optimizer, parameter.dtype, shape, parameter.device, settings)


def _stepped(
    optimizer: Optimizer,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    settings: Mapping[str, Any],
) -> _Kinds | None:
    """Take a step of the twin on zeros."""
    # Only CUDA knows capturable steps; what they keep is the same.
    plain = {"capturable": False} if settings.get("capturable") else {}
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.update({hooks: OrderedDict() for hooks in _HOOKS})
    twin.state = defaultdict(dict)
    try:
        stand_in = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        stand_in.grad = torch.zeros_like(stand_in)
        twin.param_groups = [{**settings, **plain, "params": [stand_in]}]
        type(optimizer).step(twin)  # not the instance's, which a schedule may have wrapped
    except Exception:
        return None
    return {key: _kind(value) for key, value in twin.state[stand_in].items()}


def _refusal(optimizer: Optimizer, settings: Mapping[str, Any]) -> str | None:
    """Ask the optimizer's constructor for what is wrong with settings; None is nothing."""
    named = inspect.signature(type(optimizer)).parameters
    options = {key: value for key, value in settings.items() if key in named and key != "params"}
    try:
        type(optimizer)([nn.Parameter(torch.zeros(2, 2))], **options)
    except Exception as error:
        return str(error) or type(error).__name__
    return None


def _is_of_torch(optimizer: Optimizer) -> bool:
    """Whether it is PyTorch's own, under whatever name it was derived."""
    return type(optimizer).__init__.__module__.startswith("torch.optim.")


def _kind(value: Any) -> object:  # noqa: ANN401 - any state
    """Tell kinds of state apart."""
    if isinstance(value, Tensor | Stored):
        return tuple(value.shape), value.dtype
    return _form(value)


def _form(value: Any) -> object:  # noqa: ANN401 - any setting
    """Tell kinds of settings apart; what an optimizer keeps as a number may become a tensor."""
    if isinstance(value, bool):
        return bool
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        return float
    if isinstance(value, tuple):
        return tuple(map(_form, value))
    return type(value)


def _is_finite(value: Any) -> bool:  # noqa: ANN401 - any setting
    if isinstance(value, tuple | list):
        return all(map(_is_finite, value))
    if isinstance(value, Tensor):
        return bool(torch.isfinite(value).all())
    return not isinstance(value, float) or math.isfinite(value)
