"""A split by formula holds every sample once, spreads what is held out, and keeps the order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.part import HeldOutPart, TrainPart
from trainer.data.samples import held_out_count
from trainer.data.view import DataView, split_by_seed
from trainer.plan.permutation import DRAWN_WHOLE


@given(whole=st.integers(2, 300), data=st.data(), seed=st.integers(0, 2**40))
def test_every_sample_is_on_one_side_and_both_keep_the_order(whole, data, seed):
    held_out = data.draw(st.integers(1, whole - 1))
    sides = [Part(whole, held_out, seed) for Part in (HeldOutPart, TrainPart)]
    listed = [side(np.arange(len(side))).tolist() for side in sides]
    assert [len(side) for side in sides] == [held_out, whole - held_out]
    assert listed == [sorted(each) for each in listed]
    assert sorted(listed[0] + listed[1]) == list(range(whole))


def test_every_sample_is_held_out_as_often_over_seeds():
    counts = np.zeros(1000)
    for seed in range(2000):
        counts[HeldOutPart(1000, 50, seed)(np.arange(50))] += 1
    assert np.abs(counts - 100).max() < 5 * np.sqrt(100)
    chosen = HeldOutPart(1000, 50, 0)(np.arange(50)) % 20
    assert len(set(chosen.tolist())) > 10, "no fixed place in its stretch"


def test_the_last_places_of_ten_billion_samples_are_exact():
    whole = 10**10
    for held_out in (1, whole // 20, whole // 11):
        side, rest = HeldOutPart(whole, held_out, 0), TrainPart(whole, held_out, 0)
        last = side(np.arange(held_out - 1, held_out))
        near = (
            rest(np.arange(len(rest) - 2 * whole // held_out, len(rest))) if held_out > 1 else last
        )
        assert 0 <= last[0] < whole
        assert held_out == 1 or (last[0] not in near and near[-1] >= whole - 2)
        assert (np.diff(near) > 0).all()


class Rows:
    """Samples without tokens, of any number."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return {"row": [i]}


def test_a_view_of_a_billion_samples_reads_those_that_are_asked_for():
    train, held_out = (split_by_seed(Rows(10**9), side, 0.05, 1) for side in ("train", "held_out"))
    assert (len(train), len(held_out)) == (95 * 10**7, 5 * 10**7)
    assert (train.lengths.sum(), held_out.lengths[-1:].tolist()) == (len(train), [1])
    sample = train.read(len(train) - 1, seed=0, epoch=0)["row"]
    assert int(sample) == train.original_ids([len(train) - 1])[0] >= 10**9 - 2
    assert train.fingerprint != held_out.fingerprint
    assert split_by_seed(Rows(10**9), "train", 0.05, 1).fingerprint == train.fingerprint
    nothing, everything = (
        split_by_seed(Rows(10**9), side, 0.0, 1) for side in ("held_out", "train")
    )
    assert (len(nothing), len(everything)) == (0, 10**9)


def test_version_1_lists_what_version_2_finds_by_formula():
    count = DRAWN_WHOLE + 1
    for size, is_same in ((count - 1, True), (count, False)):
        sides = [
            split_by_seed(DataView(Rows(size), version=v), "held_out", 0.01, 0) for v in (1, 2)
        ]
        first, second = (side.original_ids(range(len(side))).tolist() for side in sides)
        assert len(first) == len(second) == held_out_count(size, 0.01)
        assert (first == second) is is_same
        assert (sides[0].fingerprint == sides[1].fingerprint) is is_same
