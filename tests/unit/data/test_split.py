"""A split by formula holds every sample once, spreads what is held out, and keeps the order."""

import hashlib
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.split import held_out_count, held_out_ids, split_by_seed, train_ids
from trainer.plan.permutation import DRAWN_WHOLE


@given(whole=st.integers(2, 300), data=st.data(), seed=st.integers(0, 2**40))
def test_every_sample_is_on_one_side_and_both_keep_the_order(whole, data, seed):
    held_out = data.draw(st.integers(1, whole - 1))
    first = held_out_ids(whole, held_out, seed, np.arange(held_out)).tolist()
    second = train_ids(whole, held_out, seed, np.arange(whole - held_out)).tolist()
    assert (first, second) == (sorted(first), sorted(second))
    assert sorted(first + second) == list(range(whole))


def test_every_sample_is_held_out_as_often_over_seeds():
    counts = np.zeros(1000)
    for seed in range(2000):
        counts[held_out_ids(1000, 50, seed, np.arange(50))] += 1
    assert np.abs(counts - 100).max() < 5 * np.sqrt(100)
    chosen = held_out_ids(1000, 50, 0, np.arange(50)) % 20
    assert len(set(chosen.tolist())) > 10, "no fixed place in its stretch"


class Rows:
    """Samples without tokens, of any number."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return {"row": [i]}


def parted(count, holdout, seed=1):
    return [split_by_seed(Rows(count), side, holdout, seed) for side in ("train", "held_out")]


def test_a_view_of_a_billion_samples_reads_those_that_are_asked_for():
    train, held_out = parted(10**9, 0.05)
    assert (len(train), len(held_out)) == (95 * 10**7, 5 * 10**7)
    assert (train.lengths.sum(), held_out.lengths[-1:].tolist()) == (len(train), [1])
    sample = train.read(len(train) - 1, seed=0, epoch=0)["row"]
    assert int(sample) == train.original_ids([len(train) - 1])[0] >= 10**9 - 2
    assert train.fingerprint != held_out.fingerprint
    assert parted(10**9, 0.05)[0].fingerprint == train.fingerprint
    assert [*map(len, parted(10**9, 0.0))] == [10**9, 0]


@pytest.mark.parametrize(
    ("size", "digest"), [(40, "171e954b61a7a72e"), (DRAWN_WHOLE + 1, "448e234e8a72fcd4")]
)
def test_what_is_held_out_stays_what_it_was(size, digest):
    ids = [side.original_ids(range(len(side))).astype("<i8") for side in parted(size, 0.05, 3)]
    assert sorted(np.concatenate(ids)) == list(range(size))
    assert len(ids[1]) == held_out_count(size, 0.05)
    assert hashlib.sha256(ids[1].tobytes()).hexdigest()[:16] == digest


def test_a_view_goes_to_another_process_with_its_lengths():
    train, _ = parted(DRAWN_WHOLE + 1, 0.25)  # by a formula, and what is held out of it by a list
    view = split_by_seed(train, "held_out", 0.25, 0)
    assert view.lengths.sum() == len(view)
    there = pickle.loads(pickle.dumps(view))
    assert there.lengths[:].tolist() == view.lengths[:].tolist()
    assert there.original_ids([0, 7]).tolist() == view.original_ids([0, 7]).tolist()
