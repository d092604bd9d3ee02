"""Find random generators among attributes; seed them, and put their state back."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache, partial
from types import MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Generator, Tensor

_KINDS = (Generator, np.random.Generator, np.random.RandomState, random.Random)
_MOST_PARTS = 32  # a longer list holds data, and not transforms
_MOST_SEARCHED = 256
"""Objects that one search looks at, at most; they take up to 0.3 ms, and of most data 0.05."""


@cache
def is_generator(kind: Any) -> bool:  # noqa: ANN401 - a class, which mypy calls unhashable
    """Whether a class is a random generator's; to ask PyTorch's own each time takes 0.5 us.

    One that reads the system's entropy has no state.
    """
    return issubclass(kind, _KINDS) and not issubclass(kind, random.SystemRandom)


def generators_in(root: object) -> dict[str, Any]:
    """Find the generators of an object, also deep in lists, mappings and parts of its own.

    Paths are the same in every process; each generator comes once.
    """
    found: dict[str, Any] = {}
    seen, waiting = {id(root)}, deque([("", root)])
    while waiting and len(seen) < _MOST_SEARCHED:
        # What is nearest comes first, so that the limit leaves out what lies deepest.
        path, owner = waiting.popleft()
        for name, value in _parts(owner):
            if value is None or id(value) in seen:
                continue
            seen.add(id(value))
            if is_generator(value.__class__):
                found[f"{path}.{name}"] = value
            elif not isinstance(value, str | int | float | Tensor | np.ndarray):
                waiting.append((f"{path}.{name}", value))
    return found


def _parts(owner: object) -> Iterable[tuple[Any, Any]]:
    """Give what an object holds, by name; attributes are not asked for, which may run code."""
    if isinstance(owner, dict | list | tuple):
        if len(owner) > _MOST_PARTS:
            return ()
        return list(owner.items() if isinstance(owner, dict) else enumerate(owner))
    if isinstance(owner, functools.partial):
        return [("func", owner.func), ("args", owner.args), ("keywords", owner.keywords)]
    if isinstance(owner, MethodType):
        return [("self", owner.__self__)]
    if isinstance(owner, type | ModuleType):
        return ()
    return list(getattr(owner, "__dict__", {}).items())


def reseed(generator: Any, key: int) -> None:  # noqa: ANN401 - of any kind
    """Begin a generator's draws anew (10 us)."""
    if isinstance(generator, Generator):
        generator.manual_seed(key)
    elif isinstance(generator, random.Random):
        generator.seed(key)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        # NumPy seeds a bit generator in its constructor alone.
        bits.state = type(bits)(key).state
    else:
        # With the second number of a normal draw that may wait in it.
        kind = type(generator._bit_generator)
        generator.set_state(np.random.RandomState(kind(key)).get_state(legacy=False))


def undo_of(generator: Any) -> Callable[[], object]:  # noqa: ANN401 - of any kind
    """Remember the state of a generator; gives what puts it back."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state", bits.state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())
