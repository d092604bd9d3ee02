"""Loading: the same bits for every number of workers, draws per sample, faults that are named."""

import os
import random
import re
import signal
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from trainer.core.errors import DataError
from trainer.core.signals import SIGNALS
from trainer.data.loader import Loader, Request
from trainer.data.split import split_by_seed
from trainer.data.view import DataView

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


class Ragged(Dataset):
    """Sequences of known lengths; draws nothing."""

    draws_randomness = False
    lengths = np.array(LENGTHS)

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, i):
        tokens = torch.arange(LENGTHS[i]) + 10 * i
        return {"input_ids": tokens, "labels": tokens}


class Flip:
    """A transform with a generator of its own, as augmentation libraries have them."""

    def __init__(self, seed):
        self.rng, self.legacy = np.random.default_rng(seed), np.random.RandomState(seed)

    def __call__(self):
        return [self.rng.random(), self.legacy.normal()]


class Augmented(Ragged):
    """Draws from the global generators, and from its own; one of them is made at the first read."""

    draws_randomness = True

    def __init__(self):
        self.python, self.torch = random.Random(0), torch.Generator().manual_seed(0)
        self.late = None
        self.transforms = [("flips", Flip(0)), Flip(0)]

    def draws(self):
        self.late = self.late or np.random.default_rng(0)
        draws = [float(torch.rand(())), np.random.rand(), random.random(), self.python.random()]
        draws += [float(torch.rand((), generator=self.torch)), self.late.random()]
        return torch.tensor([*draws, *self.transforms[0][1](), *self.transforms[1]()])

    def __getitem__(self, i):
        return super().__getitem__(i) | {"noise": self.draws()}


class Failing(Ragged):
    """Fails on one sample, neither the shortest nor the longest."""

    def __getitem__(self, i):
        if i == 4:
            raise KeyError("no such\nkey")
        return super().__getitem__(i)


@dataclass
class Listed:
    """A data set from a list; neither hashable nor a torch Dataset, as users write them."""

    samples: list
    num_reads: int = 0
    draws_randomness: bool = False

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        self.num_reads += 1
        return self.samples[i]


def request(*ids, epoch=0, packed=False):
    lengths = [LENGTHS[i] for i in ids]
    return Request(ids, epoch, sum(lengths) if packed else max(lengths), packed)


REQUESTS = [
    request(0, 1, 2),
    request(5),
    request(3, 1, 8, 9),
    request(6, 7, epoch=1),
    request(0, 0, epoch=7),
]


@pytest.fixture
def loader_of():
    loaders = []

    def make(dataset, num_workers=0, seed=0, **more):
        loaders.append(Loader(dataset, num_workers=num_workers, seed=seed, **more))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def rng_states():
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]


@pytest.fixture
def augmented():
    dataset = Augmented()
    dataset.draws()  # makes the late generator
    return dataset


def test_order_bits_and_generators_are_the_same_for_every_number_of_workers(loader_of, augmented):
    before = rng_states()
    expected = list(loader_of(augmented).stream(iter(REQUESTS)))
    for num_workers in (1, 2):
        streamed = list(loader_of(augmented, num_workers).stream(iter(REQUESTS)))
        assert len(streamed) == len(expected)
        assert all(map(same, streamed, expected))
    assert rng_states() == before
    resumed = list(loader_of(Augmented()).stream(iter(REQUESTS)))[2:]
    assert all(map(same, expected[2:], resumed)), "as in a process that read other samples before"


def test_a_sample_s_draws_belong_to_seed_epoch_and_id_and_to_nothing_else(loader_of, augmented):
    loader = loader_of(augmented)
    noise = loader.load(request(0, 5, 2))["noise"]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    again = loader.load(request(2, 9, 0))["noise"]
    assert torch.equal(noise[0], again[2])
    assert torch.equal(noise[2], again[0])
    others = [*noise[1:], loader.load(request(0, epoch=1))["noise"][0]]
    others += [loader_of(augmented, seed=s).load(request(0))["noise"][0] for s in (1, 2**32)]
    drawn = torch.stack([noise[0], *others]).flatten().tolist()
    assert len(set(drawn)) == len(drawn), "no draw comes twice"


def test_packed_padded_and_empty_requests_hold_their_tokens_and_no_others(loader_of):
    loader = loader_of(Ragged())
    padded = loader.load(request(0, 5, 1))
    packed = loader.load(request(0, 5, 1, packed=True))
    tokens = padded["input_ids"][padded["attention_mask"].bool()]
    assert packed["input_ids"][0].tolist() == tokens.tolist()
    assert packed["cu_seqlens"].tolist() == [0, 3, 12, 13]
    padded = loader.load(Request((), 0, 0))
    shapes = {name: tuple(field.shape) for name, field in padded.items()}
    assert shapes == dict.fromkeys(("input_ids", "labels", "attention_mask"), (0, 3))
    packed = loader.load(Request((), 0, 0, packed=True))
    assert packed["cu_seqlens"].tolist() == [0, 3]
    assert packed["labels"].tolist() == [[-100] * 3]
    assert len(loader_of(Collating()).load(Request((), 0, 0))["sum"]) == 0


# Workers, and their ends


class Signals(Ragged):
    """Fields large enough to travel by shared memory, whose owner may be gone."""

    def __getitem__(self, i):
        ignored = [signal.getsignal(s) == signal.SIG_IGN for s in SIGNALS]
        return {"image": torch.zeros(3000, 8), "ignored": ignored, "pid": os.getpid()}


def test_workers_ignore_the_signals_that_ask_the_run_to_stop(loader_of):
    stream = loader_of(Signals(), 1).stream(iter([request(0)] * 20))
    fields = next(stream)
    assert fields["ignored"].all()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(int(fields["pid"][0]), number)
    assert {int(fields["pid"][0]) for fields in stream} == {int(fields["pid"][0])}


def test_a_worker_that_is_killed_is_a_data_error_and_raises_nothing_elsewhere(loader_of):
    handler = signal.getsignal(signal.SIGCHLD)
    loader = loader_of(Signals(), 2)
    stream = loader.stream(iter([request(i % 10) for i in range(40)]))

    def kill_and_go_on():
        for k, fields in enumerate(stream):
            if k == 5:
                os.kill(int(fields["pid"][0]), signal.SIGKILL)

    with pytest.raises(DataError, match=r"a DataLoader worker died: .*SIGKILL.*num_workers=0"):
        kill_and_go_on()
    loader.close()
    assert signal.getsignal(signal.SIGCHLD) is handler, "which PyTorch's would raise through"
    stream = loader.stream(iter([request(0)] * 4))
    os.kill(int(next(stream)["pid"][0]), signal.SIGKILL)
    loader.close()


def test_an_error_in_the_data_set_names_sample_cause_and_place_in_one_line(loader_of):
    with pytest.raises(DataError) as caught:
        list(loader_of(Failing(), 1).stream(iter([request(0), request(3, 4)])))
    pattern = r"data: sample 4 of Failing: KeyError: 'no such\\nkey' \(test_loader\.py:\d+\)"
    assert re.fullmatch(pattern, str(caught.value))
    split = split_by_seed(Failing(), "train", 0.3, 0)  # which keeps the ids of the whole
    with pytest.raises(DataError, match="sample 4 of Failing: KeyError"):
        loader_of(split).load(Request((ids_of(split).index(4),), 0, 9))


# What samples may be


def test_numbers_lists_and_arrays_of_any_stride_become_tensors_and_others_say_why(loader_of):
    row = np.arange(6, dtype=np.float32)
    row.flags.writeable = False
    sample = {
        **{"whole": 1, "real": 0.5, "list": [1, 2], "frozen": row, "scalar": np.int64(3)},
        "flipped": row[::-1],
        "turned": row.reshape(2, 3)[:, ::-1],
        "foreign": row.astype(">f4"),
        "number": np.array(3, dtype=">i8"),
        "flipped_foreign": row.astype(">f8")[::-1],
    }
    fields = loader_of(Listed([sample])).load(Request((0,), 0, 1))
    for name, value in sample.items():
        assert fields[name][0].tolist() == np.asarray(value).tolist()
    for value, why in ((np.array(["a"]), "numpy.str_"), ([[1], [2, 3]], "length"), (2**70, "")):
        text = rf"field 'x' is a .*, which cannot become a dense tensor \(.*{why}.*\); return"
        with pytest.raises(DataError, match=text):
            loader_of(Listed([{"x": value}])).load(Request((0,), 0, 1))


class GradientsOff(Ragged):
    def __getitem__(self, i):
        torch.set_grad_enabled(False)
        return super().__getitem__(i)

    def collate(self, samples):
        torch.set_grad_enabled(False)
        return {"size": torch.tensor([len(s) for s in samples])}


def test_a_data_set_that_leaves_gradients_off_changes_no_training(loader_of):
    try:
        view = DataView(GradientsOff())
        assert view.fingerprint
        assert torch.is_grad_enabled()
        loader_of(view).load(request(0))
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


class Numbered(Listed):
    """Four samples of two, the third with a number beyond."""

    def __init__(self):
        row = [0, 4]
        super().__init__([{"labels": row} for row in (row, row, [1, 5], row)])


class Stacked(Numbered):
    def collate(self, samples):
        return {"labels": torch.stack([s["labels"] for s in samples]) * 2}


def test_numbers_beyond_a_table_are_named_before_any_device_sees_them(loader_of):
    loader, three = loader_of(Numbered()), Request((0, 1, 2), 0, 1)
    loader.limit({"labels": 5})
    loader.limit({"labels": 9})  # what is known stays
    text = r"sample 2 of Numbered: labels holds 5 at position 1, and .* but for -100, are 0 to 4"
    with pytest.raises(DataError, match=text):
        loader.load(three)
    own = loader_of(Stacked(), limits={"labels": 10})
    own.load(Request((0, 1), 0, 1))
    with pytest.raises(DataError, match=r"`collate` of Stacked: labels holds 10 at position 2, 1,"):
        own.load(three)


# A `collate` of the data set's own


class Collating(Augmented):
    def collate(self, samples):
        return {"sum": torch.stack([s["input_ids"].sum() for s in samples]), "noise": torch.rand(2)}


def test_a_collate_of_the_data_set_s_own_is_used_and_drawn_for_reproducibly(loader_of):
    here, there = loader_of(Collating()), loader_of(Collating(), 1)
    requests = [request(0, 1), request(1, 0), request(0, 1, epoch=1)]
    expected = [here.load(r) for r in requests]
    assert expected[0]["sum"].tolist() == [3, 10]
    assert all(map(same, there.stream(iter(requests)), expected))
    assert len({tuple(fields["noise"].tolist()) for fields in expected}) == 3


class FewRows(Ragged):
    def __init__(self, collate):
        self.collate = collate


def stacked(samples):
    return {"size": torch.tensor([len(s["labels"]) for s in samples])}


def laid_end_to_end(samples):
    row = torch.cat([s["input_ids"] for s in samples])[None]
    return {"input_ids": row, "labels": row}


def in_rows_with_positions(samples):
    rows = torch.stack([laid_end_to_end(samples)["input_ids"][0][:2]] * 2)
    return {"input_ids": rows, "labels": rows, "position_ids": rows}


def test_a_collate_that_loses_samples_is_refused_and_one_that_packs_them_is_not(loader_of):
    for collate in (stacked, laid_end_to_end, in_rows_with_positions):
        loaded = loader_of(FewRows(collate)).load(request(0, 5, 1))
        assert same(loaded, collate([Ragged()[i] for i in (0, 5, 1)]))
    for collate in (stacked, laid_end_to_end):
        loader = loader_of(FewRows(lambda samples, collate=collate: collate(samples[1:])))
        text = r"`collate` of FewRows gives \d rows for 3 samples \(0, 5, 1, \.\.\.\): give one"
        with pytest.raises(DataError, match=text):
            loader.load(request(0, 5, 1))


# Lengths


class Cropping(Listed):
    """Crops at random, so that its samples have other lengths in other epochs."""

    def __getitem__(self, i):
        return {"input_ids": torch.arange(random.randint(1, 40))}

    def collate(self, samples):
        return stacked([{"labels": s["input_ids"]} for s in samples])


def test_a_sample_that_changes_its_length_is_called_that(loader_of):
    dataset = Cropping([None] * 3, draws_randomness=True)
    view = DataView(dataset)
    planned = view.lengths[:].tolist()
    loader = loader_of(view)
    loader.load(Request((0, 1, 2), 0, 40))  # as it was measured
    text = rf"sample 1 of Cropping has \d+ tokens, but had {planned[1]} when it was measured: it ch"
    with pytest.raises(DataError, match=text):
        loader.load(Request((1,), 1, 40))
    dataset.lengths = [40] * 3  # at most: what `collate` makes of them is its own
    loader_of(dataset).load(Request((1,), 1, 40))


@pytest.mark.parametrize("at", [LENGTHS.index(n) for n in (9, 4)])
def test_labels_that_are_shorter_than_tokens_are_refused_in_whatever_sample(loader_of, at):
    rows = [{"input_ids": list(range(n)), "labels": list(range(n))} for n in LENGTHS]
    del rows[at]["labels"][-1:]
    loader, others = loader_of(Listed(rows)), [i for i in range(len(LENGTHS)) if i != at]
    loader.load(request(*others))
    size, tokens = LENGTHS[at] - 1, LENGTHS[at]
    text = f"field 'labels' has {size} entries in sample {at} of Listed of {tokens} tokens"
    with pytest.raises(DataError, match=text):
        loader.load(request(at, *others))


def test_targets_of_an_encoder_decoder_have_lengths_of_their_own(loader_of):
    samples = [{"input_ids": [1] * 16, "labels": [1] * (9 if i == 3 else 16)} for i in range(12)]
    free = loader_of(Listed(samples))
    free.leave_unaligned({"labels"})
    for loader in (free, free.of(free.dataset, num_workers=0)):
        labels = loader.load(Request((2, 3), 0, 16))["labels"]
        assert (labels != -100).sum(1).tolist() == [16, 9]


def test_lengths_are_measured_once_where_a_data_set_has_none():
    assert DataView(Listed([{"row": [1.0, 2.0]}] * 3)).lengths[:].tolist() == [1, 1, 1]
    assert DataView(Listed([{"input_ids": [[1, 2]]}] * 3)).lengths[:].tolist() == [1, 1, 1]
    assert DataView(Listed([])).lengths[:].tolist() == []
    dataset = Listed([{"input_ids": list(range(n))} for n in LENGTHS])
    whole = DataView(dataset)
    assert whole.lengths[:].tolist() == LENGTHS
    reads = dataset.num_reads
    for side in ("train", "held_out"):
        part = split_by_seed(whole, side, 0.3, 0)
        assert part.lengths[:].tolist() == [LENGTHS[i] for i in ids_of(part)]
    assert dataset.num_reads == reads


def ids_of(view):
    return view.original_ids(range(len(view))).tolist()


@pytest.mark.parametrize(
    ("second", "lengths", "text"),
    [
        ([1], [1], r"shape \(1,\) .* one integer for each of its 2 samples"),
        ([1], [1.0, 2.0], "dtype float64"),
        ([1], [3, 0], "sample 1 of Listed has length 0"),
        ([[1]], None, "sample 1 of Listed lacks"),
    ],
)
def test_lengths_that_cannot_be_right_or_measured_are_refused(second, lengths, text):
    dataset = Listed([{"input_ids": [1]}, {"input_ids": second}])
    dataset.lengths = lengths
    with pytest.raises(DataError, match=text):
        len(DataView(dataset).lengths)


# Splits and fingerprints of data sets that bring none


def test_a_fingerprint_is_the_data_set_s_own_or_follows_class_lengths_and_contents():
    rows = [{"input_ids": [i, i + 1]} for i in range(5)]
    one = Listed(rows)
    longer = Listed([*rows[:4], {"input_ids": [4, 5, 6]}])
    other = Listed([*rows[:4], {"input_ids": [4, 6]}])
    prints = [DataView(each).fingerprint for each in (one, longer, other)]
    prints += [split_by_seed(one, side, 0.3, 0).fingerprint for side in ("train", "held_out")]
    # The first sample of many is always one of those that are looked at.
    prints += [DataView(Listed([{"input_ids": [k] * 2}, *rows * 99])).fingerprint for k in (8, 9)]
    assert len(set(prints)) == len(prints)
    assert DataView(Listed(rows)).fingerprint == prints[0]
    for own in ("mine", lambda: "mine"):
        longer.fingerprint = own
        assert DataView(longer).fingerprint == "mine"


class Drawing(Listed):
    """Says that it draws nothing, and does from the global generator and from its own."""

    lengths, generator = [2] * 9, np.random.default_rng()

    def __getitem__(self, i):
        noise = random.random() + self.generator.normal()
        return super().__getitem__(i) | {"noise": float(noise)}


def test_a_fingerprint_of_data_that_draw_at_random_is_the_same_again():
    states = rng_states()
    found = {DataView(Drawing([{"input_ids": [1, 2]}] * 9)).fingerprint for _ in range(3)}
    assert len(found) == 1
    assert rng_states() == states
