"""Collate samples into the fields of one micro-batch: padded, stacked, or packed end to end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from trainer.core.errors import DataError
from trainer.core.micro_batch import IGNORED
from trainer.data.samples import INPUT_IDS, Sample, num_tokens

NameOf = Callable[[int], str]
"""Names the sample at a position of the micro-batch, for messages."""

Limits = Mapping[str, int]
"""What token ids and labels are below, where that is known: compared before a device sees them,
since an index out of range poisons a GPU, and on the CPU its error names no sample."""

LABELS = "labels"
WEIGHT = "weight"
"""How often the loss terms of a sample count, or each label of it: a number of 0 or more."""
ATTENTION_MASK = "attention_mask"
PACKING = ("position_ids", "cu_seqlens", "max_seqlen")
"""What comes with packed samples."""


def aligned_fields(samples: Sequence[Sample], lengths: Sequence[int]) -> frozenset[str]:
    """Find the fields with one entry per token; of unlike lengths none fits by chance.

    The samples, of so many tokens, are the shortest, the longest, and some others.
    """

    def is_aligned(name: str) -> bool:
        fits, fitting = list[bool](), set[int]()
        for sample, length in zip(samples, lengths, strict=True):
            field = sample.get(name)
            fits.append(field is not None and field.dim() > 0 and len(field) == length)
            if fits[-1]:
                fitting.add(length)
        is_rule = 2 * sum(fits) > len(fits)
        if len(set(lengths)) == 1:
            return is_rule
        # One that fits most samples is faulty in the others, also in the shortest.
        return len(fitting) > 1 and (is_rule or all(fits[:2]))

    return frozenset(filter(is_aligned, samples[0]))


def pad_samples(
    samples: Sequence[Sample],
    aligned: Collection[str],
    pad_to: int,
    name_of: NameOf,
    pad_token: int = 0,
) -> dict[str, Tensor]:
    """Stack samples, padding on the right where they differ.

    Fields that are `aligned`, with one entry per token, are padded to `pad_to` tokens; others to
    the longest of the micro-batch, where they differ at all. Gives every field, `(n, ...)`: padded
    with -100 in `labels`, which are int64 unless they are real numbers, with `pad_token` in
    `input_ids`, else with 0. With `input_ids` comes `attention_mask`, `(n, pad_to)` int64, 1 on
    tokens, unless the samples bring one. Names, dtypes or shapes that differ are a DataError, as is
    a longer sample.
    """
    fields = {}
    for name, column in _columns(samples, name_of).items():
        if len({value.shape for value in column}) == 1:
            field = torch.stack(column)
        else:
            field = pad_sequence(column, batch_first=True, padding_value=_fill(name, pad_token))
        if name in aligned and pad_to:
            if field.shape[1] > pad_to:
                k = max(range(len(column)), key=lambda k: len(column[k]))
                raise DataError(_too_long(f"{name_of(k)}, {len(column[k])} tokens,", pad_to))
            field = _grow(field, pad_to, _fill(name, pad_token))
        fields[name] = field
    if INPUT_IDS in aligned and ATTENTION_MASK not in fields:
        lengths = [sample[INPUT_IDS].size(0) for sample in samples]
        mask = fields[ATTENTION_MASK] = torch.ones(len(samples), pad_to, dtype=torch.int64)
        if min(lengths) < pad_to:
            mask.copy_(torch.arange(pad_to) < torch.tensor(lengths)[:, None])
    return fields


def stack_rows(pad_token: int, samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Stack samples of rows, `(rows, time)`, padded on the right to the longest."""
    longest = max(sample[INPUT_IDS].shape[1] for sample in samples)
    stacked = dict[str, Tensor]()
    for name, first in samples[0].items():
        column = [sample[name] for sample in samples]
        # One number, as the right choice, is not padded.
        if first.dim():
            column = [_grow(field, longest, _fill(name, pad_token)) for field in column]
        stacked[name] = torch.stack(column)
    return stacked


def text_rows(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give `input_ids`, `(samples, texts, time)`, and all of its shape as `(rows, time)`."""
    shape = fields[INPUT_IDS].shape
    return {n: field.flatten(0, 1) for n, field in fields.items() if field.shape == shape}


def pack_samples(
    samples: Sequence[Sample],
    aligned: Collection[str],
    pad_to: int,
    name_of: NameOf,
    pad_token: int = 0,
) -> dict[str, Tensor]:
    """Lay samples end to end in one row, for models that take document boundaries.

    Labels stay: the objective shifts them within each document. What `pad_to` asks beyond the
    samples is filled as padding is, in segments no longer than the longest sample: attention
    kernels write nothing beyond the length they are given, and positions have no more entries.
    Gives every field, `(1, pad_to, ...)`; `position_ids`, `(1, pad_to)` int64, from 0 in every
    segment; `cu_seqlens`, `(segments + 1,)` int32, where segments begin and the last ends;
    `max_seqlen`, `(longest segment, 0)`: a shape is known on the host wherever its tensor is.
    Fields must have one entry per token, and the samples fit the row.
    """
    columns = _columns(samples, name_of)
    for name in columns:
        if name not in aligned and name != WEIGHT:
            raise DataError(
                f"data: field {name!r} does not have one entry per token, so samples cannot be "
                f"packed end to end; use padded micro-batches"
            )
    lengths = [*map(len, next(columns[name] for name in columns if name in aligned))]
    if WEIGHT in columns.keys() - {*aligned}:
        columns[WEIGHT] = [each.expand(n) for each, n in zip(columns[WEIGHT], lengths, strict=True)]
    spare = pad_to - sum(lengths)
    if spare < 0:
        raise DataError(_too_long(f"{len(samples)} samples from {name_of(0)} on", pad_to))
    longest = max(1, *lengths)
    whole, rest = divmod(spare, longest)
    sizes = [*lengths, *[longest] * whole]
    if rest:
        sizes.append(rest)
    segments = torch.tensor(sizes)
    ends = segments.cumsum(0)
    fields = {}
    for name, column in columns.items():
        row = torch.cat(column)[None]
        fields[name] = _grow(row, pad_to, _fill(name, pad_token))
    positions = torch.arange(pad_to) - (ends - segments).repeat_interleave(segments)
    fields["position_ids"] = positions[None]
    fields["cu_seqlens"] = F.pad(ends, (1, 0)).int()
    fields["max_seqlen"] = torch.empty(longest, 0)
    return fields


def _columns(samples: Sequence[Sample], name_of: NameOf) -> dict[str, list[Tensor]]:
    """Turn samples into one list per field; refuse what cannot be joined."""
    first = samples[0]
    for k, sample in enumerate(samples):
        if sample.keys() != first.keys():
            odd = ", ".join(map(repr, sorted(sample.keys() ^ first.keys())))
            raise DataError(
                f"data: {name_of(k)} and {name_of(0)} differ in the fields they have: {odd}"
            )
    columns = {name: [sample[name] for sample in samples] for name in first}
    for name, column in columns.items():
        _refuse_unlike(name, column, name_of)
    for name in {INPUT_IDS, LABELS} & first.keys():
        dtype = first[name].dtype
        if dtype == torch.int64:
            continue
        if not (dtype.is_floating_point or dtype.is_complex):
            # Losses take no other integers, embeddings few, and -100 has no place in bool or uint8.
            columns[name] = [*map(Tensor.long, columns[name])]
        elif name == INPUT_IDS:
            raise DataError(f"data: field {name!r} is {dtype} in {name_of(0)}; it must be integer")
    return columns


def _refuse_unlike(name: str, column: Sequence[Tensor], name_of: NameOf) -> None:
    """Refuse a field whose dtype, or shape behind the first dimension, is not that of the first."""
    first = column[0]
    form = first.dtype, first.dim(), first.shape[1:]
    for k, value in enumerate(column):
        if (value.dtype, value.dim(), value.shape[1:]) != form:
            raise DataError(
                f"data: field {name!r} is {value.dtype} of shape {tuple(value.shape)} in "
                f"{name_of(k)} but {first.dtype} of shape {tuple(first.shape)} in {name_of(0)}; "
                "only the first dimension may differ, or give the data set a `collate`"
            )


def _fill(name: str, pad_token: int) -> int:
    return {LABELS: IGNORED, INPUT_IDS: pad_token}.get(name, 0)


def _grow(field: Tensor, length: int, fill: int) -> Tensor:
    """Pad dimension 1 on the right to `length`."""
    missing = length - field.shape[1]
    if not missing:
        return field
    # F.pad counts dimensions from the last one, a pair of sides each.
    return F.pad(field, (0, 0) * (field.dim() - 2) + (0, missing), value=fill)


def _too_long(what: str, pad_to: int) -> str:
    return f"data: {what} cannot be padded to {pad_to} tokens; `lengths` must be token counts"


def num_rows(fields: Mapping[str, Tensor], samples: Sequence[Sample]) -> int:
    """Count the rows that a `collate` made of samples: those of the field with the most.

    Samples that lie end to end count each: in one row that has room for all their tokens, or in
    several with the positions of their tokens.
    """
    tokens = sum(num_tokens(sample) or 0 for sample in samples)
    rows, in_one_row = 0, False
    for field in fields.values():
        if field.dim():
            rows = max(rows, len(field))
            in_one_row |= len(field) == 1 and field.dim() > 1 and field.shape[1] >= tokens
    if PACKING[0] in fields or (tokens > 0 and in_one_row):
        return max(rows, len(samples))
    return rows


def value_out_of_range(fields: Mapping[str, Tensor], limits: Limits) -> str | None:
    """Name the first value out of range, its place and the range; None where all are in it."""
    if (given := fields.get(WEIGHT)) is not None:
        wrong = ~((given >= 0) & (given < torch.inf))
        if wrong.any():
            return f"{WEIGHT} holds {float(given[wrong][0])}; give finite numbers, 0 or more"
    for name, limit in limits.items():
        values = fields.get(name)
        if values is None or values.is_floating_point() or values.is_complex():
            continue  # refused, or meant, elsewhere
        wrong = (values < 0) | (values >= limit)
        what, hint = "vocabulary is", ": is the tokenizer that of another model?"
        if name == LABELS:
            wrong &= values != IGNORED
            what, hint = "classes, but for -100, are", ""
        if wrong.any():
            at: list[int] = wrong.nonzero()[0].tolist()
            value, place = values[tuple(at)].tolist(), ""
            # A field without dimensions has no position to name.
            if at:
                place = f" at position {', '.join(map(str, at))}"
            return f"{name} holds {value}{place}, and the model's {what} 0 to {limit - 1}{hint}"
    return None
