"""Take the learning rate of PyTorch's own schedulers as a pure function of the step.

A scheduler of PyTorch holds an optimizer and a state. Here one drives an optimizer without weights,
from the first step on, and its factors are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler

from trainer.core.errors import ConfigError
from trainer.optim.optimizers import without_compiler
from trainer.optim.schedules import Schedule


@final
@dataclass(frozen=True, kw_only=True)
class OwnScheduler(Schedule):
    """Any subclass of `LRScheduler`, a user's too; it counts steps from the end of the warm-up."""

    kind: type[LRScheduler]  # the class
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments beside the optimizer

    def after_warmup(self, step: int, warmup_steps: int, total_steps: int) -> float:
        """See the base class."""
        while len(self._known) <= step - warmup_steps:
            factor, other = next(self._factors)
            if not math.isclose(factor, other, rel_tol=1e-9, abs_tol=1e-12):
                raise ConfigError(
                    f"scheduler: {self.kind.__name__} sets rates, not factors of optimizer.lr, by "
                    "arguments such as eta_min or max_lr; type scheduler=cosine scheduler.floor=0.1"
                )
            self._known.append(factor)
        return self._known[step - warmup_steps]

    @cached_property
    def _known(self) -> list[float]:
        """The factors of the first steps."""
        return []

    @cached_property
    def _factors(self) -> Iterator[tuple[float, float]]:
        """The factors of the next steps, from two learning rates, which have to agree."""
        return zip(self._walk(1.0), self._walk(0.5), strict=True)

    def _walk(self, lr: float) -> Iterator[float]:
        optimizer = without_compiler(torch.optim.SGD)([torch.nn.Parameter(torch.zeros(0))], lr=lr)
        try:
            scheduler = self.kind(optimizer, **self.options)
            while True:
                yield optimizer.param_groups[0]["lr"] / lr
                optimizer.step()
                scheduler.step()
        except (TypeError, ValueError, KeyError) as error:  # such as of one that asks for a metric
            text = f"{self.kind.__name__} is no function of the step alone, or refuses: {error}"
            raise ConfigError(f"scheduler: {text}") from error
