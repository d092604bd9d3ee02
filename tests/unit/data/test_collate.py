"""Samples become fields: padded, stacked or packed, or a data error that names the sample."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.core.errors import DataError
from trainer.data.collate import aligned_fields, pack_samples, pad_samples

TOKENS = frozenset({"input_ids", "labels"})
sequences = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=6)


def text(*ids):
    tokens = torch.tensor(ids)
    return {"input_ids": tokens, "labels": tokens}


def name(position):
    return f"sample {position + 10}"


def padded(*samples, aligned=TOKENS, pad_to=0):
    return pad_samples(samples, aligned, pad_to, name)


@given(ids=sequences, more=st.integers(0, 3))
def test_sequences_are_padded_on_the_right_with_a_mask(ids, more):
    pad_to = max(map(len, ids)) + more
    fields = padded(*(text(*sample) for sample in ids), pad_to=pad_to)
    for row, sample in enumerate(ids):
        missing = pad_to - len(sample)
        assert fields["input_ids"][row].tolist() == sample + [0] * missing
        assert fields["labels"][row].tolist() == sample + [-100] * missing
        assert fields["attention_mask"][row].tolist() == [1] * len(sample) + [0] * missing
    assert fields["attention_mask"].dtype == fields["input_ids"].dtype == torch.int64


def test_ids_are_padded_with_the_token_that_the_data_state():
    samples = text(1, 2), text(3)
    for join, lengths in ((pad_samples, 3), (pack_samples, 4)):
        ids = join(samples, TOKENS, lengths, name, 7)["input_ids"]
        assert (ids == 7).sum() == ids.numel() - 3


def test_every_field_is_padded_to_its_own_length_and_what_needs_none_stays_as_it_is():
    samples = [
        {"input_ids": torch.arange(n), "speech": torch.ones(n, 2), "boxes": torch.ones(n + k, 4)}
        for k, n in enumerate((2, 3))
    ]
    fields = padded(*samples, aligned={"input_ids", "speech"}, pad_to=5)
    assert fields["speech"].shape == (2, 5, 2)
    assert fields["speech"].sum((1, 2)).tolist() == [4.0, 6.0]
    assert fields["boxes"].shape == (2, 4, 4)
    masked = text(1, 2) | {"attention_mask": torch.tensor([1, 0])}
    fields = padded(masked, aligned=TOKENS | {"attention_mask"}, pad_to=3)
    assert fields["attention_mask"].tolist() == [[1, 0, 0]], "of the sample's own"
    images = [{"pixels": torch.ones(1, 2, 2), "labels": torch.tensor(k)} for k in (3, 4)]
    fields = padded(*images, aligned=(), pad_to=8)
    assert fields.keys() == {"pixels", "labels"}
    assert fields["pixels"].shape == (2, 1, 2, 2)
    assert fields["labels"].tolist() == [3, 4]
    sample = {"input_ids": torch.tensor([1]).int(), "labels": torch.tensor(1).byte()}
    fields = padded(sample, aligned={"input_ids"}, pad_to=1)
    assert fields["input_ids"].dtype == fields["labels"].dtype == torch.int64, "losses take it"
    assert padded({"labels": torch.tensor([0.5])}, aligned=())["labels"].dtype == torch.float32


def test_fields_of_tokens_are_known_by_their_lengths_in_unlike_samples():
    more = {"classes": torch.ones(3), "id": torch.tensor(1)}
    samples = [{"input_ids": torch.arange(n), "types": torch.arange(n), **more} for n in (3, 7)]
    assert aligned_fields(samples, [3, 7]) == {"input_ids", "types"}
    # Most documents fill `max_length`, which is as long as a field of fixed size.
    full = [{"input_ids": torch.arange(n), "classes": torch.ones(7)} for n in (3, 7, 7, 7)]
    assert aligned_fields(full, [3, 7, 7, 7]) == {"input_ids"}
    boxes = [{"input_ids": torch.arange(4), "boxes": torch.ones(n, 4)} for n in (4, 4, 2, 3, 5)]
    assert aligned_fields(boxes, [4] * 5) == {"input_ids"}
    # One that lacks an entry in the shortest sample still belongs to tokens.
    rows = [(1, 0), (7, 7), (3, 3), (4, 4)]
    short = [{"input_ids": torch.arange(n), "labels": torch.arange(m)} for n, m in rows]
    assert aligned_fields(short, [1, 7, 3, 4]) == {"input_ids", "labels"}


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([{"x": torch.ones(2)}, {"y": torch.ones(2)}], "sample 11 and sample 10 differ.*'x', 'y'"),
        (
            [{"x": torch.ones(2)}, {"x": torch.ones(2).double()}],
            r"'x' is torch\.float64 of .* in sample 11 but torch\.float32 of .* in sample 10",
        ),
        (
            [{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}],
            r"'x' is .* of shape \(2, 4\) in sample 11 but .* \(2, 3\) in sample 10; .*`collate`",
        ),
        ([{"x": torch.ones(2)}, {"x": torch.tensor(1.0)}], r"'x' is .* of shape \(\) in sample 11"),
        ([{"input_ids": torch.ones(2)}], r"'input_ids' is torch\.float32 in sample 10"),
        ([text(1), text(1, 2, 3)], "sample 11, 3 tokens, cannot be padded to 2 tokens"),
    ],
)
def test_samples_that_do_not_fit_together_are_named(samples, text):
    with pytest.raises(DataError, match=text):
        padded(*samples, aligned=TOKENS & samples[0].keys(), pad_to=2)


@given(ids=sequences, spare=st.integers(0, 40))
def test_packing_lays_samples_end_to_end_and_no_label_crosses_a_document(ids, spare):
    total, longest = sum(map(len, ids)), max(map(len, ids))
    fields = pack_samples([text(*sample) for sample in ids], TOKENS, total + spare, name)
    begins = fields["cu_seqlens"].tolist()
    assert fields["cu_seqlens"].dtype == torch.int32
    assert begins[-1] == total + spare
    assert len(begins) == len(ids) + 1 + -(-spare // longest)
    assert fields["cu_seqlens"].diff().max() == len(fields["max_seqlen"]) == longest
    assert fields["position_ids"].max() == longest - 1, "so that no segment outgrows a sample"
    assert all(fields[field].shape == (1, total + spare) for field in (*TOKENS, "position_ids"))
    for begin, sample in zip(begins, ids, strict=False):
        document = slice(begin, begin + len(sample))
        assert fields["input_ids"][0, document].tolist() == sample
        assert fields["labels"][0, document].tolist() == sample
        assert fields["position_ids"][0, document].tolist() == list(range(len(sample)))
    assert fields["input_ids"][0, total:].tolist() == [0] * spare
    assert fields["labels"][0, total:].tolist() == [-100] * spare


def test_what_cannot_be_packed_is_named():
    with pytest.raises(DataError, match="'label' does not have one entry per token"):
        pack_samples([text(1) | {"label": torch.tensor(1)}], TOKENS, 1, name)
    with pytest.raises(DataError, match="2 samples from sample 10 on cannot be padded to 3"):
        pack_samples([text(1, 2), text(1, 2)], TOKENS, 3, name)
