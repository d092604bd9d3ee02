"""Predict tokens: every one from those before it, or what a subclass takes for targets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from trainer.config.components import NonNegative, Share
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import IGNORED, Fields
from trainer.data.collate import ATTENTION_MASK
from trainer.data.samples import INPUT_IDS
from trainer.models.bind import ModelRun
from trainer.objectives.base import (
    ModelCall,
    Objective,
    Sums,
    at_least_single,
    labels_of,
    logits_of,
    without_labels,
)
from trainer.objectives.linear_cross_entropy import linear_cross_entropy
from trainer.objectives.metrics import add_statistics, statistics_of
from trainer.objectives.text_output import TextOutput, continued
from trainer.objectives.weighting import count_of, summed_entropy, weight_of, weighted

LEAST_BYTES = 2**23
"""Logits of a micro-batch in fp32 from which on they are computed in chunks: with fewer a CPU is as
fast with all at once. A matter of shapes alone, so that a run gives the same numbers anywhere."""

in_chunks: ContextVar[bool | None] = ContextVar("in_chunks", default=None)
"""Whether logits are computed in chunks; None leaves that to their size."""


@dataclass(frozen=True, kw_only=True)
class TokenEntropy(Objective):
    """Cross entropy of a token at each position that has a target, in nats.

    The terms are `cross_entropy` and, where asked for, `z_loss`; the metric is `accuracy`.
    """

    metric_names = ("accuracy",)
    class_axis = -1
    label_kind = "classes"
    sums_samples = True

    # Coefficient of the squared log-partition, which keeps logits from drifting (Chowdhery et al.
    # 2022, 2204.02311, section 5); 0 leaves it out, and else all logits of a micro-batch are in
    # memory at once.
    z_loss: NonNegative = 0.0
    label_smoothing: Share = 0.0  # share of the target spread over the vocabulary, in [0, 1)

    @abstractmethod
    def targets(self, fields: Fields) -> Tensor:
        """Give the token at each position of the logits, `(batch, time)` int64; -100 for none."""

    def weight(self, fields: Fields) -> Tensor | None:
        """Give how often each target counts, in their shape; None where each does once."""
        if self.predicts_next:
            return shifted_weight(fields)
        return weight_of(fields, sequences_of(fields))

    def inputs(self, model: ModelCall, fields: Fields) -> Fields:
        """Give what the model is called with: all but labels, of which it would compute a loss."""
        return without_labels(fields)

    def weights(self, fields: Fields) -> Mapping[str, float]:
        """Count the targets, under every name."""
        count = count_of(self.targets(fields), self.weight(fields))
        weights = {"cross_entropy": count, "accuracy": count}
        return {**weights, "z_loss": count} if self.z_loss else weights

    def sums(self, model: ModelCall, fields: Fields) -> Sums:
        """Sum over `(batch, time)`, in float32 at least."""
        targets, weight = self.targets(fields), self.weight(fields)
        fields = self.inputs(model, fields)
        # `isinstance` of a protocol would take 20 us.
        if (layer := getattr(model, "output_layer", None)) is not None:
            if (is_large := in_chunks.get()) is None:
                is_large = 4 * targets.numel() * len(layer.weight) >= LEAST_BYTES
            if is_large and not self.z_loss:
                return self._in_chunks(cast("ModelRun", model), fields, targets, weight)
        return self._from_logits(logits_of(model(fields)), targets, weight)

    def _in_chunks(
        self, model: ModelRun, fields: Fields, targets: Tensor, weight: Tensor | None
    ) -> Sums:
        """Sum from what goes into the output layer, without the logits of all positions."""
        layer, hidden = model.output_layer, logits_of(model.without_output_layer(fields))
        _check_shapes(hidden, targets)
        statistics: dict[str, Tensor] = {}
        wide = torch.promote_types(hidden.dtype, torch.float32)
        terms = torch.empty(targets.shape, dtype=wide, device=hidden.device)
        entropy, hits = linear_cross_entropy(
            hidden.flatten(0, -2),
            # In shards the layer is whole only once the model ran.
            (layer.weight, layer.bias),
            targets.flatten(),
            target_weight=None if weight is None else weight.flatten(),
            label_smoothing=self.label_smoothing,
            backend=model.compiled_by,
            terms=terms.view(-1),
            observe=lambda *chunk: add_statistics(statistics, statistics_of(self, *chunk)),
        )
        metrics = {} if torch.is_grad_enabled() else {"accuracy": hits}
        losses = {"cross_entropy": entropy}
        return Sums(losses=losses, metrics=metrics, statistics=statistics, terms=terms)

    def _from_logits(self, logits: Tensor, targets: Tensor, weight: Tensor | None) -> Sums:
        """Sum the same from logits, `(batch, time, vocab)`, and what is read off them alone."""
        _check_shapes(logits, targets)
        logits, targets = at_least_single(logits).flatten(0, -2), targets.flatten()
        if weight is not None:
            weight = weight.flatten()
        entropy = summed_entropy(logits, targets, weight, label_smoothing=self.label_smoothing)
        losses = {"cross_entropy": entropy}
        if self.z_loss:
            partition = logits.logsumexp(-1).masked_fill(targets == IGNORED, 0.0)
            losses["z_loss"] = self.z_loss * weighted(partition.square(), weight).sum()
        if torch.is_grad_enabled():
            return Sums(losses=losses)
        metrics = {"accuracy": weighted(logits.argmax(-1) == targets, weight).sum()}
        statistics = statistics_of(self, logits, targets, weight)
        return Sums(losses=losses, metrics=metrics, statistics=statistics)


def _check_shapes(logits: Tensor, targets: Tensor) -> None:
    if logits.shape[:-1] != targets.shape:
        raise ConfigError(
            f"model: logits of shape {tuple(logits.shape)} do not match labels of shape "
            f"{tuple(targets.shape)}: (batch, time, vocabulary) is needed"
        )


@dataclass(frozen=True, kw_only=True)
class NextToken(TokenEntropy):
    """Cross entropy of the next token, in nats, summed over the tokens that have one.

    Labels are shifted here: `labels` equal to `input_ids`, with -100 where no loss is wanted, is
    right.
    """

    predicts_next = True

    def targets(self, fields: Fields) -> Tensor:
        """See the base class."""
        return shifted_labels(fields)

    def predict(
        self, model: ModelCall, fields: Fields, text: TextOutput
    ) -> Sequence[Mapping[str, Any]]:
        """Continue samples that have no loss term, as prompts without an answer.

        They may be padded at the end, by their mask.
        """
        labels = fields.get("labels")
        if INPUT_IDS not in fields or (labels is not None and (labels != IGNORED).any()):
            return ()

        def next_logits(ids: Tensor) -> Tensor:
            given = {**without_labels(fields), INPUT_IDS: ids}
            if ATTENTION_MASK in fields:
                given[ATTENTION_MASK] = torch.ones_like(ids)
            return logits_of(model(given))

        begun, found = fields[INPUT_IDS], list[dict[str, Any]]()
        lengths = fields.get(ATTENTION_MASK, torch.ones_like(begun)).sum(1).tolist()
        behind = continued(next_logits, begun, text, lengths)
        for row, length, tokens in zip(begun.tolist(), lengths, behind, strict=True):
            found.append({"prediction": text.text_behind(row[:length], tokens)})
        return found


def shifted_labels(fields: Fields) -> Tensor:
    """Move every label, `(batch, time)`, to the position that predicts it; in int64.

    The last position of each document, also of packed ones, predicts nothing. Its label is -100
    rather than missing: the logits then need not be cut, which would copy them.
    """
    targets = torch.constant_pad_nd(sequences_of(fields)[:, 1:], (0, 1), IGNORED).long()
    if "cu_seqlens" in fields:
        ends = fields["cu_seqlens"][1:].long() - 1
        targets.index_fill_(1, ends, IGNORED)
    return targets


def shifted_weight(fields: Fields) -> Tensor | None:
    """Move how often each label counts to where `shifted_labels` moves the label."""
    weight = weight_of(fields, sequences_of(fields))
    return None if weight is None else torch.constant_pad_nd(weight[:, 1:], (0, 1))


def sequences_of(fields: Fields) -> Tensor:
    """Take the labels, which must be a sequence per sample."""
    labels = labels_of(fields)
    if labels.ndim != 2:  # noqa: PLR2004 - (batch, time)
        raise ConfigError(
            f"objective: labels of shape {tuple(labels.shape)} are not sequences "
            "of tokens, (batch, time); for one number per sample use objective=classify, for pairs "
            "of answers objective=dpo"
        )
    return labels
