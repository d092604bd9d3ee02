"""What modules keep, in buffers and outside of them, and whether a pass moved it."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainer.bits import bits_of

Kept = Mapping[str, object]
"""By module name, something that is equal while the module's parameters and attributes are."""

MAX_DEPTH = 4
"""Of containers and objects within one another that are looked into."""

OPAQUE = (nn.Module, type, random.Random, FunctionType, MethodType)
"""Objects that are not looked into: modules are by their own names, and generators draw."""


def kept(module: nn.Module) -> Kept:
    """Sum up what every module of a model keeps itself; generators count as nothing."""
    return {name: _digest(vars(part), MAX_DEPTH) for name, part in module.named_modules()}


def moved(before: Kept, after: Kept, name: str) -> bool:
    """Tell whether a module, or one within it, keeps something else than before."""
    within = f"{name}." if name else ""
    return any(
        digest != before.get(other)
        for other, digest in after.items()
        if other == name or other.startswith(within)
    )


def _digest(value: Any, depth: int) -> object:  # noqa: ANN401 - any attribute
    if isinstance(value, Tensor):
        # As bytes, since NumPy does not know every dtype.
        return tuple(value.shape), hashlib.blake2b(bits_of(value.cpu()).numpy().data).digest()
    if isinstance(value, np.ndarray | bool | int | float | complex | str | bytes):
        return repr(value)
    if depth and isinstance(value, Mapping):
        return [(repr(key), _digest(held, depth - 1)) for key, held in value.items()]
    if depth and isinstance(value, list | tuple | deque):
        return [_digest(held, depth - 1) for held in value]
    if depth and hasattr(value, "__dict__") and not isinstance(value, OPAQUE):
        return _digest(vars(value), depth - 1)
    return None
