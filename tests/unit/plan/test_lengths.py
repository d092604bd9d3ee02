"""Lengths of all samples are summed up as arrays are, however they are stored and chunked."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.plan import lengths as module
from trainer.plan.lengths import Lengths
from trainer.plan.permutation import DRAWN_WHOLE


@pytest.fixture(autouse=True, scope="module")
def _small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LENGTHS_AT_ONCE", 7)
        yield


@given(
    values=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    dtype=st.sampled_from([np.uint8, np.int32, np.int64]),
)
def test_they_are_what_numpy_finds_in_an_array(values, dtype):
    whole = np.array(values)
    lengths = Lengths(whole.astype(dtype))
    for name in ("min", "max", "argmin", "argmax", "sum", "mean"):
        assert getattr(lengths, name)() == getattr(whole, name)()
    picked = lengths[np.array([len(whole) - 1, 0])]
    assert (picked.dtype, picked.tolist()) == (np.int64, [values[-1], values[0]])
    assert (lengths[3:9].tolist(), lengths[0]) == (values[3:9], values[0])


def test_one_length_of_a_billion_samples_costs_nothing():
    lengths = Lengths(np.broadcast_to(np.int32(3), 10**9))
    assert (len(lengths), lengths.sum(), lengths.max(), lengths.mean()) == (10**9, 3 * 10**9, 3, 3)
    assert lengths[10**9 - 1] == 3
    assert lengths.digest == Lengths(np.broadcast_to(3, 10**9)).digest


def test_a_digest_follows_every_length_and_not_how_they_are_stored():
    values = np.arange(1, 30)
    digests = {Lengths(values.astype(dtype)).digest for dtype in (np.uint8, np.int16, np.int64)}
    assert len(digests) == 1
    swapped = values.copy()
    swapped[[3, 20]] = swapped[[20, 3]]
    for other in (swapped, values[:-1], np.ones(29, int), np.ones(28, int)):
        digests.add(Lengths(other).digest)
    assert len(digests) == 5
    assert Lengths(np.ones(29, np.uint8)).digest == Lengths(np.broadcast_to(1, 29)).digest


def test_a_sample_holds_all_of_a_few_and_the_extremes_of_many():
    assert Lengths(np.array([3, 1, 2])).sample().tolist() == [0, 1, 2]
    values = np.full(10 * DRAWN_WHOLE, 5)
    values[[77_777, 600_001]] = 1, 9
    picked = Lengths(values).sample()
    assert len(picked) <= DRAWN_WHOLE + 2
    assert {77_777, 600_001} <= set(picked.tolist())
