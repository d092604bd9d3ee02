"""What users bring that a plan has something to say about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.lib.run_toys import Descent, Net, Squared
from trainer.core.micro_batch import Fields
from trainer.objectives.base import Objective, Sums, logits_of


class Mean(Squared):
    """Divides its sum by the samples of the micro-batch, as a loss with reduction="mean" does."""

    def sums(self, model: Any, fields: Fields) -> Sums:
        losses = super().sums(model, fields).losses
        return Sums(losses={name: loss / len(fields["labels"]) for name, loss in losses.items()})


class Unweighted(Squared):
    """Sums a term that it does not weigh."""

    def sums(self, model: Any, fields: Fields) -> Sums:
        losses = super().sums(model, fields).losses
        return Sums(losses={**losses, "second": next(iter(losses.values()))})


class Pairs(Objective):
    """Pulls the two samples of a pair together; one that is left over, to zero."""

    def __init__(self, group_size: int = 2) -> None:
        self.group_size = group_size

    def weights(self, fields: Fields) -> Mapping[str, float]:
        return {"pairs": float(-(-len(fields["labels"]) // 2))}

    def sums(self, model: Any, fields: Fields) -> Sums:
        is_token = fields["labels"] >= 0
        logits = logits_of(model({"input_ids": fields["input_ids"]})).square().sum(-1)
        scores = torch.where(is_token, logits, 0.0).sum(-1)
        left = scores[1::2]
        first = scores[::2]
        apart = first - nn.functional.pad(left, (0, len(first) - len(left)))
        return Sums(losses={"pairs": apart.square().sum() * 1e-3})


class InBackward(Descent):
    """Steps as soon as a gradient is there, as optimizers fused into backward do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(self._update)

    @torch.no_grad()
    def _update(self, parameter: Tensor) -> None:
        parameter.add_(parameter.grad, alpha=-self.defaults["lr"])
        parameter.grad = None


class Bounded(Net):
    """Takes document boundaries."""

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return super().forward(input_ids)
