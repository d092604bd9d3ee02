"""Call the user's hooks: each sees what happened, may read the model, and may give figures."""

from __future__ import annotations

import inspect
from abc import ABC
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import nn

from trainer.core.user_code import described
from trainer.data.samples import preserve_generators
from trainer.report.journal import EVAL_SECONDS, Entry

WATCHED = ("on_step", "on_eval", "on_checkpoint")


class Hook(ABC):  # noqa: B024 - known by its methods
    """Whatever has a method of `WATCHED`; it sees what happened, and changes nothing."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        """Whether a class has one, without inheritance."""
        return any(callable(getattr(kind, event, None)) for event in WATCHED)


@final
class Hooks:
    """Calls one method of every hook that has it, with a dict of plain values, its own copy.

    One that fails is reported once, and called again the next time. Methods with a second
    parameter `model` get the `module`, which they only read: nothing checks that.
    """

    def __init__(
        self,
        hooks: Mapping[str, object],
        warn: Callable[[str], None],
        module: nn.Module | None = None,
    ) -> None:
        self._warn, self._module, self._warned = warn, module, set[str]()
        self._ours = {"step", "loss", EVAL_SECONDS}  # names of figures that no hook may give
        self._calls = defaultdict[str, list[tuple[str, Callable[..., object], bool]]](list)
        for name, hook in hooks.items():
            for event in WATCHED:
                if callable(method := getattr(hook, event, None)):
                    takes_model = [*inspect.signature(method).parameters][1:2] == ["model"]
                    self._calls[event].append((f"{name}.{event}", method, takes_model))

    def call(self, event: str, values: Entry) -> dict[str, float]:
        """Call a method of all hooks, and give the figures that they return."""
        found: dict[str, float] = {}
        if calls := self._calls[event]:
            self._ours |= values.keys()
        for name, method, takes_model in calls:
            try:
                with preserve_generators():  # of the host; what hooks draw moves none
                    returned = method(dict(values), *[self._module] * takes_model)
                if isinstance(returned, Mapping):
                    found |= self._figures(name, returned, found)
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
        if name.endswith("on_checkpoint"):
            odd = [*numbers]  # which has no line
        if odd:
            text = f"hook {name} returned {', '.join(map(str, odd))}: left out (reported once)"
            self._warn_once(f"{name} {odd}", f"{text}; figures are numbers with names of their own")
        return {key: n for key, n in numbers.items() if n is not None and key not in odd}

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warn(text)
        self._warned.add(what)


def _number(value: object) -> float | None:
    """Give a number, of a 0-d tensor too; None for anything else."""
    value = value.detach() if isinstance(value, torch.Tensor) else value
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
    return value if isinstance(value, int | float) else None
