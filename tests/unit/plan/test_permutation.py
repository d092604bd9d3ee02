"""A keyed bijection permutes as a drawn permutation does, and a few numbers are permuted anyhow."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.plan.permutation import Bijection, drawn_whole

LARGE = 70_000
SIGMAS = 5.0  # one of three million sound statistics lies beyond


@given(count=st.integers(1, 500), key=st.text(max_size=5))
def test_every_number_has_one_place_for_any_count(count, key):
    bijection = Bijection(count, key)
    assert sorted(bijection(np.arange(count)).tolist()) == list(range(count))


def test_a_place_is_found_alone_and_in_any_company_up_to_billions():
    for count in (LARGE, 10**9, 2**40 + 1):
        bijection = Bijection(count, "0\x1f0")
        places = np.concatenate([np.arange(500), count - 1 - np.arange(500)])
        found = bijection(places)
        assert found.min() >= 0
        assert found.max() < count
        assert len(np.unique(found)) == len(places)
        assert bijection(places[::-7]).tolist() == found[::-7].tolist()
        assert bijection(places[123:124])[0] == found[123]


def test_the_permutation_is_the_same_on_every_machine_and_numpy():
    pinned = [656844963, 528615318, 375572691, 310929580]
    assert Bijection(10**9, "0\x1f0")(np.arange(4)).tolist() == pinned
    assert drawn_whole(10, "0\x1f0").tolist() == [8, 0, 1, 9, 5, 6, 2, 7, 4, 3]


def test_numbers_go_everywhere_and_neighbours_part_and_what_does_not_mix_is_seen():
    for value in statistics(lambda key: Bijection(LARGE, key)(np.arange(LARGE))).values():
        assert abs(value) < SIGMAS
    for value in statistics(lambda _: np.arange(LARGE)).values():
        assert abs(value) > SIGMAS


def chi_square(counts):
    """How many standard deviations the statistic of equal counts lies off its mean."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2.0 * freedom)


def statistics(draw):
    """How many standard deviations 40 permutations lie off what random ones show."""
    keys, bins = 40, 64
    drawn = np.array([draw(str(key)) for key in range(keys)])
    size = -(-LARGE // bins)
    blocks = [
        np.bincount(p[b * size : (b + 1) * size] // size, minlength=bins)
        for p in drawn
        for b in range(bins - 1)
    ]
    where = np.array(blocks).reshape(keys, bins - 1, bins)[:, :, : bins - 1]
    fixed = (drawn == np.arange(LARGE)).sum()
    neighbours = (np.abs(np.diff(drawn)) == 1).sum()
    steps = np.diff(drawn) % LARGE * bins // LARGE
    pairs = np.diff(drawn, axis=0) % LARGE * bins // LARGE
    low = np.bincount(((drawn[:, :-1] & 7) * 8 + (drawn[:, 1:] & 7)).ravel(), minlength=64)
    return {
        "where stretches of places go, over keys": chi_square(where.sum(0)),
        "where they go, of one key": max(map(chi_square, where), key=abs),
        # Poisson of mean 1, and of mean 2: neighbours on either side.
        "numbers in their own place": (fixed - keys) / np.sqrt(keys),
        "neighbours that stay neighbours": (neighbours - 2 * keys) / np.sqrt(2 * keys),
        "distances between neighbours": chi_square(np.bincount(steps.ravel(), minlength=bins)),
        # Neighbouring seeds and epochs are other keys.
        "one place under two keys": chi_square(np.bincount(pairs.ravel(), minlength=bins)),
        "low bits of neighbours": chi_square(low),
    }
