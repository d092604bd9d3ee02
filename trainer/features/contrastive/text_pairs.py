"""Embed both texts of a pair by one encoder, and make one embedding of those of its tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.components import Pooling
from trainer.core.micro_batch import Fields, output_part
from trainer.data.collate import ATTENTION_MASK, text_rows
from trainer.data.samples import INPUT_IDS, PIXEL_VALUES
from trainer.models.facts import noted_facts
from trainer.objectives.base import ModelCall, at_least_single

NEGATIVES = "negatives"


def embed(model: ModelCall, fields: Fields) -> Any:  # noqa: ANN401 - models return what they like
    """Run a model; one that pools texts once for all those of samples, `(samples, texts, time)`.

    Gives then `query` and `document`, `(samples, width)`, of its `last_hidden_state`, and
    `negatives`, `(samples, texts - 2, width)`, where there are more; of samples of one text a
    `query` alone; else what the model gives.
    """
    ids = fields.get(INPUT_IDS)
    module = getattr(model, "module", None)
    pooling = noted_facts(module).pooling if isinstance(module, nn.Module) else None
    if pooling is None or ids is None or ids.ndim != 3:  # noqa: PLR2004
        return model(fields)
    rows = text_rows(fields)
    hidden = output_part(model(rows), "last_hidden_state")
    texts = pooled(hidden, rows[ATTENTION_MASK], pooling).view(*ids.shape[:2], -1)
    found = dict(zip(("query", "document"), texts.unbind(1), strict=False))
    if texts.shape[1] > len(found):
        found[NEGATIVES] = texts[:, 2:]
    return found


def content_digests(fields: Fields) -> Tensor | None:
    """Give a number for each text and image of each sample, the same for equal contents.

    `(samples, contents)` int64, whatever the padding is; None where there are no contents.
    """
    ids, mask = fields.get(INPUT_IDS), fields.get(ATTENTION_MASK)
    pixels, found = fields.get(PIXEL_VALUES), list[Tensor]()
    # Padding becomes 0, which no token is, and so adds nothing.
    if ids is not None and mask is not None and ids.shape == mask.shape:
        found.append(((ids + 1) * mask).view(len(ids), -1, ids.shape[-1]))
    # The bits of fp64, which holds every value of a narrower type
    if pixels is not None:
        found.append(pixels.double().flatten(1).view(torch.int64)[:, None])
    for place, contents in enumerate(found):
        # Numbers are summed by factors that look drawn, one for each place: by the constants of
        # splitmix64 (Steele et al. 2014) without their top bit. int64 wraps around.
        factors = torch.arange(1, 1 + contents.shape[-1], device=contents.device)
        for multiplier in (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9):
            factors = factors * multiplier
            factors = factors ^ (factors >> 29)
        found[place] = (contents * factors).sum(-1)
    return torch.cat(found, 1) if found else None


def pooled(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Make one embedding of those of a text's tokens, in fp32 at least.

    `hidden` is `(texts, time, width)`, padded on the right; `mask`, `(texts, time)`, is 1 on
    tokens, of which each text has one at least.
    """
    hidden = at_least_single(hidden)
    if pooling == "cls":
        return hidden[:, 0]
    counts = mask.sum(1)
    if pooling == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), counts - 1]
    return torch.einsum("btw,bt->bw", hidden, mask.to(hidden.dtype)) / counts[:, None]
