"""Average the weights of a run over its steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainer.checkpoint.state import plain_name
from trainer.core.stateful import State, Stateful
from trainer.core.tensors import local_part

AVERAGE = "ema"
"""Name of the part of a checkpoint that holds the average, and of `step` to read it."""


@final
class WeightAverage(Stateful):
    """The exponential moving average of the weights that are trained, updated once a step.

    That of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`: it begins with
    the weights after the first update, then `average = decay * average + (1 - decay) * weights`. It
    is in fp32, of weights in fp64 in fp64, and in shards where the weights are.
    """

    def __init__(self, decay: float) -> None:
        self.decay, self.num_updates = decay, 0
        self._weights: dict[str, Tensor] = {}
        self._averages: dict[str, Tensor] = {}

    def begin(self, module: nn.Module) -> None:
        """See the base class."""
        self._weights, self._averages = {}, {}
        for name, weight in module.named_parameters():
            if weight.requires_grad:
                # In bf16 a change by a thousandth of the difference would be lost in rounding.
                wide = torch.promote_types(weight.dtype, torch.float32)
                plain = plain_name(name)
                self._weights[plain] = weight
                self._averages[plain] = weight.detach().to(wide, copy=True)

    def after_update(self, step: int) -> None:
        """See the base class."""
        decay = self.decay
        if self.num_updates == 0:
            decay = 0.0
        update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call] # untyped in torch
        averages = [*map(local_part, self._averages.values())]
        weights = [*map(local_part, self._weights.values())]
        if all(a.dtype == w.dtype for a, w in zip(averages, weights, strict=True)):
            update(averages, weights, self.num_updates)
        else:
            # One by one, so that no copy of all weights is made.
            for average, weight in zip(averages, weights, strict=True):
                update([average], [weight.to(average.dtype)], self.num_updates)
        self.num_updates += 1

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Give what is here of each weight, and of its average."""
        for name, weight in self._weights.items():
            yield local_part(weight), local_part(self._averages[name])

    def state(self) -> State:
        """See the base class; `weights` by plain name."""
        return {"updates": self.num_updates, "weights": self._averages}

    def load(self, state: State) -> None:
        """See the base class; of weights that were frozen before, the average begins now."""
        self.num_updates = int(state["updates"])
        for name in self._averages.keys() & state["weights"].keys():
            local_part(self._averages[name]).copy_(local_part(state["weights"][name]))
