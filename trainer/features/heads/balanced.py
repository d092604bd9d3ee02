"""Predict tokens, and balance the experts of a mixture over the whole global batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config.components import Count, NonNegative
from trainer.core.coupling import Coupling
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import IGNORED, Fields, output_part
from trainer.objectives.base import ModelCall, Sums, at_least_single, logits_of, without_labels
from trainer.objectives.coupled import CoupledObjective
from trainer.objectives.next_token import shifted_labels, shifted_weight
from trainer.objectives.weighting import count_of, weighted

CORRECTION = "e_score_correction_bias"
"""Of routers that take a sigmoid of their scores and correct it, as DeepSeek-V3 and GLM-4 do."""


@final
@dataclass(frozen=True, kw_only=True)
class BalancedNextToken(CoupledObjective):
    """Cross entropy of the next token, plus the balance loss of Fedus et al. (2101.03961).

    The balance loss is `E * sum_e f_e P_e` as `load_balancing_loss_func` of Mixtral has it:
    `f_e` is how many of the experts that a token takes are `e`, and `P_e` the probability of `e`,
    both a mean over all tokens of the global batch and all layers. Padding is left out.
    """

    coupling = Coupling("batch", why="its balance of experts is over all tokens of a step")

    coefficient: NonNegative = 0.01
    experts_per_token: Count | None = None

    def weights(self, fields: Fields) -> Mapping[str, float]:
        """Count the tokens that have a next one, and all of them."""
        count = count_of(shifted_labels(fields), shifted_weight(fields))
        return {"cross_entropy": count, "balance": float(_real(fields).sum())}

    def rows(self, model: ModelCall, fields: Fields) -> Mapping[str, Tensor]:
        """Sum over the tokens of each sample.

        Gives `cross_entropy` and `tokens`, `(samples,)`; `taken` and `probability` of each expert,
        a mean over layers, `(samples, experts)`.
        """
        if "cu_seqlens" in fields:
            raise ConfigError(
                "objective: BalancedNextToken sums by sample: type accum.packed=false"
            )
        targets = shifted_labels(fields)
        output = model(without_labels(fields))
        logits = at_least_single(logits_of(output))
        entropy = F.cross_entropy(
            logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
        )
        real, num_taken = _real(fields)[..., None], self._num_taken(model)
        if not (routers := output_part(output, "router_logits")):
            raise ConfigError(
                "model: forward gives no router_logits, which BalancedNextToken needs: set "
                "output_router_logits to true in its config, or return a tensor for each layer"
            )
        taken, probability = [], []
        # Each is `(samples * time, experts)`.
        for layer in routers:
            routed = at_least_single(layer).view(*targets.shape, -1).softmax(-1)
            chosen = routed.topk(num_taken, -1).indices
            counts = torch.zeros_like(routed).scatter_(-1, chosen, 1.0)
            taken.append((counts * real).sum(1))
            probability.append((routed * real).sum(1))
        return {
            "cross_entropy": weighted(entropy, shifted_weight(fields)).sum(1),
            "tokens": real.sum((1, 2)).to(logits.dtype),
            "taken": torch.stack(taken).mean(0),
            "probability": torch.stack(probability).mean(0),
        }

    def sums_of_rows(self, rows: Mapping[str, Tensor]) -> Sums:
        """See the base class; the balance is times the tokens, by which it is divided."""
        taken, probability = rows["taken"].sum(0), rows["probability"].sum(0)
        # Counts have no gradient: that of the probabilities, weighted by them, moves the router.
        shares = taken.detach() / rows["tokens"].detach().sum()
        balance = self.coefficient * len(shares) * (shares * probability).sum()
        return Sums(losses={"cross_entropy": rows["cross_entropy"].sum(), "balance": balance})

    def _num_taken(self, model: ModelCall) -> int:
        module = getattr(model, "module", None)
        if isinstance(module, nn.Module):
            for name, _ in chain(module.named_parameters(), module.named_buffers()):
                if name.endswith(CORRECTION):
                    text = f"this model's router corrects its scores by {CORRECTION}"
                    raise ConfigError(
                        "objective: BalancedNextToken takes the experts of largest softmax, and "
                        f"{text}; type objective=next_token"
                    )
        config = getattr(module, "config", None)
        found = self.experts_per_token or getattr(config, "num_experts_per_tok", None)
        if found is None:
            raise ConfigError(
                "objective.experts_per_token=null: the model's config has no num_experts_per_tok: "
                "type how many experts each token takes"
            )
        return int(found)


def _real(fields: Fields) -> Tensor:
    """Mark the tokens that are no padding, `(samples, time)`."""
    mask = fields.get("attention_mask")
    return torch.ones_like(fields["labels"]) if mask is None else mask
