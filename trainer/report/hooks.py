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
        # Names of figures that no hook may give
        self._ours = {"step", "loss", EVAL_SECONDS}
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
                # What hooks draw moves no generator of the host.
                with preserve_generators():
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
        taken = self._ours | found.keys()
        # A checkpoint has no line in metrics.jsonl that figures could stand in.
        has_line = not name.endswith("on_checkpoint")
        figures, odd, doubled = dict[str, float](), list[Any](), list[Any]()
        for key, value in returned.items():
            number = _number(value)
            if number is None or not isinstance(key, str) or not has_line:
                odd.append(key)
            elif key in taken:
                doubled.append(key)
            else:
                figures[key] = number
        odd += doubled
        if odd:
            text = f"hook {name} returned {', '.join(map(str, odd))}: left out (reported once)"
            self._warn_once(f"{name} {odd}", f"{text}; figures are numbers with names of their own")
        return figures

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warn(text)
        self._warned.add(what)


def _number(value: object) -> float | None:
    """Give a number, of a 0-d tensor too; None for anything else."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
    # NumPy's scalars and arrays have both as well.
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    return value if isinstance(value, int | float) else None
