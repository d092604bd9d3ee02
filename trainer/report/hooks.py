"""Call the user's hooks: each sees what happened, may read the model, and may give figures."""

from __future__ import annotations

import inspect
import random
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, final

import torch
from torch import nn

from trainer.core import gpu
from trainer.core.errors import ConfigError
from trainer.core.user_code import described
from trainer.report.journal import EVAL_SECONDS, Entry

WATCHED = ("on_step", "on_eval", "on_checkpoint")


class Hook(ABC):  # noqa: B024 - known by its methods
    """Whatever has a method of `WATCHED`; it sees what happened, and cannot change it."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        """Whether a class has one, without inheritance."""
        return any(callable(getattr(kind, event, None)) for event in WATCHED)


@final
class Hooks:
    """Calls one method of every hook that has it, with a dict of plain values, its own copy.

    One that fails is reported once, and called again the next time. Methods with a second
    parameter `model` get the `module`; with None they get none.
    """

    def __init__(
        self,
        hooks: Mapping[str, object],
        warn: Callable[[str], None],
        module: nn.Module | None = None,
    ) -> None:
        self._warn, self._module, self._warned = warn, module, set[str]()
        self._ours = {"step", "loss", EVAL_SECONDS}  # names of figures that no hook may give
        self._calls: dict[str, list[tuple[str, Callable[..., object], bool]]] = {}
        for event in WATCHED:
            self._calls[event] = []
            for name, hook in hooks.items():
                if callable(method := getattr(hook, event, None)):
                    call = (f"{name}.{event}", method, _takes_model(method))
                    self._calls[event].append(call)

    def call(self, event: str, values: Entry) -> dict[str, float]:
        """Call a method of all hooks, and give the figures that they return."""
        found: dict[str, float] = {}
        if calls := self._calls[event]:
            self._ours |= values.keys()
        for name, method, takes_model in calls:
            try:
                if takes_model and self._module is not None:
                    with _unchanged(self._module, name):
                        returned = method(dict(values), self._module)
                else:
                    returned = method(dict(values))
                if isinstance(returned, Mapping):
                    found |= self._figures(name, returned, found)
            except ConfigError:
                raise
            except Exception as error:  # a watcher never stops what it watches
                self._warn_once(name, f"hook {name} failed (reported once): {described(error)}")
        return found

    def _figures(
        self, name: str, returned: Mapping[Any, Any], found: Mapping[str, float]
    ) -> dict[str, float]:
        """Take what a hook returned, but what is no number, or has the name of another."""
        numbers = {key: _number(value) for key, value in returned.items()}
        taken = self._ours | found.keys()
        odd = [key for key, number in numbers.items() if number is None or not isinstance(key, str)]
        odd += [key for key in numbers if key in taken]
        if name.endswith(WATCHED[2]):
            odd = [*numbers]  # a checkpoint has no line
        if odd:
            text = f"hook {name} returned {', '.join(map(str, odd))}: left out (reported once)"
            self._warn_once(f"{name} {odd}", f"{text}; figures are numbers with names of their own")
        return {key: n for key, n in numbers.items() if n is not None and key not in odd}

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warn(text)
        self._warned.add(what)


def _takes_model(method: Callable[..., object]) -> bool:
    """Whether the second parameter of a method, behind `self`, is called `model`."""
    try:
        return [*inspect.signature(method).parameters][1:2] == ["model"]
    except (TypeError, ValueError):  # of what is not written in Python
        return False


def _number(value: object) -> float | None:
    """Give a number, of a 0-d tensor too; None for anything else."""
    value = value.detach() if isinstance(value, torch.Tensor) else value
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
    return value if isinstance(value, int | float) else None


@contextmanager
def _unchanged(module: nn.Module, name: str) -> Iterator[None]:
    """Refuse a change of the model, and undo draws of random numbers, within.

    A write through `tensor.data` or NumPy is not seen: PyTorch counts none of them.
    """
    before, draws = _marks(module), (random.getstate(), torch.get_rng_state())
    on_gpu = gpu.generator_states()
    try:
        yield
    finally:
        random.setstate(draws[0])
        torch.set_rng_state(draws[1])
        gpu.set_generators(on_gpu)
        if (after := _marks(module)) != before:
            what = next((k for k in after if k not in before or after[k] != before[k]), "a module")
            raise ConfigError(
                f"{name}: changed the model ({what}), which a hook only reads; change it by "
                "transforms or parts, or leave the hook out"
            )


def _marks(module: nn.Module) -> dict[str, tuple[object, ...]]:
    """Give what changes where a weight, its gradient, a buffer or the mode of a module does."""
    marks: dict[str, tuple[object, ...]] = {
        name: (id(t), t._version, t.requires_grad, id(t.grad), getattr(t.grad, "_version", 0))
        for name, t in chain(module.named_parameters(), module.named_buffers())
    }
    return marks | {f"{n} in training": (m.training,) for n, m in module.named_modules()}
