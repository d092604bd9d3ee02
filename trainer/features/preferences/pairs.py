"""Compute both rows of every pair by one call of a model, and the log-probabilities of answers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.core.errors import ConfigError
from trainer.core.micro_batch import IGNORED, Fields
from trainer.data.collate import text_rows
from trainer.data.samples import INPUT_IDS
from trainer.models.bind import ModelRun
from trainer.objectives.base import at_least_single, logits_of, without_labels
from trainer.objectives.next_token import LEAST_BYTES, shifted_labels

ROWS_OF_PAIR = 2  # of a pair: the chosen row, then the rejected one


def pair_rows(fields: Fields, key: str) -> dict[str, Tensor]:
    """Put the rows of pairs, `(samples, 2, time)`, under each other: `(2 * samples, time)`."""
    ids = fields.get(INPUT_IDS)
    if ids is None or ids.dim() != 3 or ids.shape[1] != ROWS_OF_PAIR:  # noqa: PLR2004 - (samples, 2, time)
        shape = "none" if ids is None else f"of shape {tuple(ids.shape)}"
        raise ConfigError(
            f"{key}: takes pairs, input_ids of (samples, 2, time), and the data give {shape}: give "
            "records with chosen and rejected to data=hf"
        )
    return text_rows(fields)


def answer_logps(model: ModelRun, rows: Fields) -> Tensor:
    """Sum the log-probabilities of the labels of each row, in nats: `(samples, 2)`.

    In fp32 at least. Where the logits of all positions are large, they are there for a part of the
    rows at a time, and are computed once more in backward.
    """
    targets, inputs, layer = shifted_labels(rows), without_labels(rows), model.output_layer
    if layer is None or 4 * targets.numel() * len(layer.weight) < LEAST_BYTES:
        return _logps(logits_of(model(inputs)), targets).view(-1, ROWS_OF_PAIR)
    hidden = logits_of(model.without_output_layer(inputs))
    # In shards the layer is whole only once the model ran.
    matrix = layer.weight, layer.bias
    step = max(1, LEAST_BYTES // (4 * targets.shape[1] * len(matrix[0])))
    found = list[Tensor]()
    pieces = zip(torch.split(hidden, step), torch.split(targets, step), strict=True)
    for part, own in pieces:
        found.append(checkpoint(_logps_of_layer, part, own, *matrix, use_reentrant=False))
    return torch.cat(found).view(-1, ROWS_OF_PAIR)


def _logps_of_layer(hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Backward may run within autocast, or not.
    with torch.autocast(hidden.device.type, enabled=False):
        bias = bias if bias is None else bias.to(hidden.dtype)
        return _logps(F.linear(hidden, weight.to(hidden.dtype), bias), targets)


def _logps(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over each row, `(rows,)`; a position without a target adds 0."""
    logits = at_least_single(logits)
    losses = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return -losses.view(targets.shape).sum(1)


def answer_lengths(rows: Fields) -> Tensor:
    """Count the labels of each row that are predicted, `(samples, 2)`; one at least."""
    return (shifted_labels(rows) != IGNORED).sum(1).clamp(min=1).view(-1, ROWS_OF_PAIR)
