"""Collate samples into the fields of one micro-batch: padded, stacked, or packed end to end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from trainer.core.errors import DataError
from trainer.data.samples import INPUT_IDS, Sample

NameOf = Callable[[int], str]
"""Names the sample at a position of the micro-batch, for messages."""

LABELS = "labels"
ATTENTION_MASK = "attention_mask"
IGNORED_LABEL = -100
"""What `torch.nn.functional.cross_entropy` leaves out by default."""


def aligned_fields(samples: Sequence[Sample], lengths: Sequence[int]) -> frozenset[str]:
    """Find the fields that hold one entry per token.

    Given samples of different lengths, a field that merely happens to be as long as one of them
    (ten classes, ten tokens) is told from one that follows.

    Args:
        samples: some of the data set, the shortest and the longest for choice.
        lengths: tokens of each.
    """
    return frozenset(
        name
        for name in samples[0]
        if all(
            name in sample and sample[name].dim() > 0 and len(sample[name]) == length
            for sample, length in zip(samples, lengths, strict=True)
        )
    )


def pad(
    samples: Sequence[Sample], aligned: Collection[str], pad_to: int, name_of: NameOf
) -> dict[str, Tensor]:
    """Stack samples, padding on the right where they differ.

    Args:
        samples: `n >= 1` of them.
        aligned: fields with one entry per token, padded to `pad_to`; others are padded to the
            longest of the micro-batch, where they differ at all.
        pad_to: padded length in tokens.
        name_of: names a sample for a message.

    Returns:
        Every field, `(n, ...)`: padded with -100 in `labels`, which are int64 unless they are real
        numbers, else with 0. With `input_ids`
        comes `attention_mask`, `(n, pad_to)` int64, 1 on tokens, unless the samples bring one.

    Raises:
        DataError: names, dtypes or shapes differ, or a sample is longer than `pad_to`; names
            field and sample.
    """
    fields = {}
    for name in _common_names(samples, name_of):
        columns = _column(name, samples, name_of)
        fields[name] = _padded(name, columns, pad_to if name in aligned else 0, name_of)
    if INPUT_IDS in aligned and ATTENTION_MASK not in fields:
        lengths = np.array([len(sample[INPUT_IDS]) for sample in samples])
        on_tokens = np.arange(pad_to) < lengths[:, None]
        fields[ATTENTION_MASK] = torch.from_numpy(on_tokens.astype(np.int64))
    return fields


def pack(
    samples: Sequence[Sample], aligned: Collection[str], pad_to: int, name_of: NameOf
) -> dict[str, Tensor]:
    """Lay samples end to end in one row, for models that take document boundaries.

    The label at the first position of every sample becomes -100: the objective shifts, so it
    would be predicted from the sample before. What `pad_to` asks beyond the samples is filled
    as padding is, and counts as one more segment.

    Args:
        samples: `n >= 1` of them.
        aligned: fields with one entry per token.
        pad_to: positions of the row.
        name_of: names a sample for a message.

    Returns:
        Every field, `(1, pad_to, ...)`; `position_ids`, `(1, pad_to)` int64, from 0 in every
        segment; `cu_seqlens`, `(segments + 1,)` int32, where segments begin and the last ends.

    Raises:
        DataError: names or dtypes differ, a field has not one entry per token, or the samples
            do not fit the row; names field and sample.
    """
    names = _common_names(samples, name_of)
    if others := [name for name in names if name not in aligned]:
        raise DataError(
            f"data: field {others[0]!r} has not one entry per token, so samples cannot be packed "
            f"end to end; use padded micro-batches"
        )
    lengths = [len(sample[names[0]]) for sample in samples]
    spare = pad_to - sum(lengths)
    if spare < 0:
        raise DataError(_too_long(f"{len(samples)} samples from {name_of(0)} on", pad_to))
    segments = torch.tensor([*lengths, spare] if spare else lengths)
    ends = segments.cumsum(0)
    begins = ends - segments
    fields = {}
    for name in names:
        row = torch.cat(_column(name, samples, name_of))
        fields[name] = _grown(row[None], pad_to, _fill(name))
    positions = torch.arange(pad_to) - begins.repeat_interleave(segments)
    fields["position_ids"] = positions[None]
    fields["cu_seqlens"] = F.pad(ends, (1, 0)).int()
    return fields


def _fill(name: str) -> int:
    return IGNORED_LABEL if name == LABELS else 0


def _common_names(samples: Sequence[Sample], name_of: NameOf) -> list[str]:
    names = samples[0].keys()
    for position, sample in enumerate(samples):
        if sample.keys() != names:
            odd = sorted(sample.keys() ^ names)
            raise DataError(
                f"data: {name_of(position)} and {name_of(0)} differ in the fields they have: "
                f"{', '.join(map(repr, odd))}"
            )
    return list(names)


def _column(name: str, samples: Sequence[Sample], name_of: NameOf) -> list[Tensor]:
    """Take one field of every sample.

    Raises:
        DataError: dtypes differ, or token ids are not integers.
    """
    column = [sample[name] for sample in samples]
    first = column[0].dtype
    if len({value.dtype for value in column}) > 1:
        position = next(k for k, value in enumerate(column) if value.dtype != first)
        raise DataError(
            f"data: field {name!r} is {column[position].dtype} in {name_of(position)} "
            f"but {first} in {name_of(0)}"
        )
    if name == INPUT_IDS and (first.is_floating_point or first.is_complex):
        raise DataError(f"data: field {name!r} is {first} in {name_of(0)}; it must be integer")
    if name not in {INPUT_IDS, LABELS} or first.is_floating_point or first.is_complex:
        return column
    # Losses take no other integers, embeddings few, and -100 has no place in bool or uint8.
    return [value.long() for value in column]


def _padded(name: str, column: list[Tensor], pad_to: int, name_of: NameOf) -> Tensor:
    """Stack one field, padded to `pad_to` or, where that is 0, to the longest.

    Raises:
        DataError: the longest is longer than `pad_to`, or other dimensions than the first differ.
    """
    shapes = {value.shape for value in column}
    if len(shapes) == 1:
        stacked = torch.stack(column)
    else:
        if len({(len(shape), shape[1:]) for shape in shapes}) > 1:
            raise DataError(_other_dims(name, column, name_of))
        stacked = pad_sequence(column, batch_first=True, padding_value=_fill(name))
    if pad_to == 0:
        return stacked
    if stacked.shape[1] > pad_to:
        longest = max(range(len(column)), key=lambda position: len(column[position]))
        raise DataError(_too_long(f"{name_of(longest)}, {len(column[longest])} tokens,", pad_to))
    return _grown(stacked, pad_to, _fill(name))


def _other_dims(name: str, column: list[Tensor], name_of: NameOf) -> str:
    first = column[0].shape
    position = next(
        k
        for k, value in enumerate(column)
        if value.dim() != len(first) or value.shape[1:] != first[1:]
    )
    return (
        f"data: field {name!r} has shape {tuple(column[position].shape)} in {name_of(position)} "
        f"but {tuple(first)} in {name_of(0)}; only the first dimension may differ, or give the "
        f"data set a `collate`"
    )


def _grown(field: Tensor, length: int, fill: int) -> Tensor:
    """Pad dimension 1 on the right to `length`."""
    missing = length - field.shape[1]
    if missing == 0:
        return field
    return F.pad(field, (0, 0) * (field.dim() - 2) + (0, missing), value=fill)


def _too_long(what: str, pad_to: int) -> str:
    return (
        f"data: {what} cannot be padded to {pad_to} tokens; "
        f"`lengths` of the data set must be the tokens of each sample"
    )
