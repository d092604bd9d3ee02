"""Which samples of which source stand at each place, where weights change."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.features.mixture.schedule import SourceSchedule

WEIGHTS = st.tuples(*[st.sampled_from([0, 0.5, 1, 2.25, 7])] * 3).filter(any)


@given(
    sizes=st.tuples(*[st.integers(1, 60)] * 3),
    weights=st.lists(WEIGHTS, min_size=1, max_size=3),
    length=st.integers(0, 200),
    seed=st.integers(0, 9),
)
def test_shares_are_those_of_each_stage_and_a_source_repeats_nothing_before_all_came(
    sizes, weights, length, seed
):
    begins = [length * i for i in range(len(weights))] if length else [0]
    stages = {
        begin: dict(zip("abc", each, strict=True))
        for begin, each in zip(begins, weights, strict=False)
    }
    named = dict(zip("abc", sizes, strict=True))
    places = np.arange(begins[-1] + 300)
    ids = SourceSchedule(named, stages)(seed, places)
    sources = np.searchsorted(np.cumsum(sizes), ids, side="right")
    for begin, end in zip(begins, [*begins[1:], len(places)], strict=True):
        shares = np.array([float(Fraction(w)) for w in stages[begin].values()])
        so_far = np.cumsum(sources[begin:end, None] == np.arange(3), axis=0)
        exact = np.arange(1, end - begin + 1)[:, None] * shares / shares.sum()
        assert np.abs(so_far - exact).max(initial=0) < 1.01, "at every place of the stage"
    for source, size in enumerate(sizes):
        own = ids[sources == source]
        for start in range(0, len(own), size):
            part = own[start : start + size]
            assert len({*part.tolist()}) == len(part)
    # Of any places alone, as a run that goes on asks.
    some = np.random.default_rng(seed).permutation(places)[:40]
    assert (SourceSchedule(named, stages)(seed, some) == ids[some]).all()
