"""Tell a model where packed documents begin, in the words that its forward takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from trainer.core.micro_batch import Fields

BOUNDARIES = "cu_seqlens"
"""The field that says where packed documents begin."""
BOUNDARY_FIELDS = ("cu_seq_lens_q", "position_ids")
"""Parameters by which a forward without it may learn the same; whether it does is to be tried."""


def uses_flash(module: nn.Module) -> bool | None:
    """Whether a Hugging Face model attends by FlashAttention; None for any other model."""
    attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return None if attention is None else "flash" in attention


def with_boundaries(fields: Fields, names: Collection[str]) -> Mapping[str, Any]:
    """Give fields to a forward of these parameters; only those of packed rows change.

    A forward that names `cu_seqlens` gets it, and `max_seqlen` as a number. Any other gets what
    Hugging Face's do: no mask and no cache, with which they look for boundaries in `position_ids`,
    and the four arguments that spare FlashAttention a search for them, and a wait, in every layer.
    What a data set's own `collate` gives stays as it is.
    """
    if BOUNDARIES not in fields or "max_seqlen" not in fields or fields["max_seqlen"].numel():
        return fields
    given: dict[str, Any] = dict(fields)
    bounds = fields[BOUNDARIES]
    longest = given["max_seqlen"] = fields["max_seqlen"].shape[0]
    if BOUNDARIES in names:
        return given
    for name in (BOUNDARIES, "max_seqlen", "attention_mask"):
        given.pop(name, None)
    given |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    given |= {"max_length_q": longest, "max_length_k": longest}
    return given | {"use_cache": False}
