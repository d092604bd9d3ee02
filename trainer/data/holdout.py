"""Choose which samples are held out: a pure function of their keys, the share and the seed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainer.core.world import rng_key

KeyArray = npt.NDArray[np.uint64]

TRAIN = "train"
HELD_OUT = "held_out"


def held_out_count(count: int, holdout: float) -> int:
    """Round the held-out share of `count` things; of two or more, one is on either side."""
    if holdout == 0.0 or count <= 1:
        return 0
    return min(max(round(count * holdout), 1), count - 1)


def held_out_mask(keys: KeyArray, holdout: float, seed: int) -> npt.NDArray[np.bool_]:
    """Mark the samples that are held out, `(samples,)`; those that share a key stay together.

    The distinct keys are ranked by a hash of (seed, key), SplitMix64's finaliser (Steele, Lea,
    Flood 2014), and the first of them are held out: the share is exact in keys, and which ones
    are held out depends neither on the order of the samples nor on the number of copies.
    """
    distinct = np.unique(keys)
    draws = distinct ^ np.uint64(rng_key("holdout", seed))
    draws = (draws ^ (draws >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    draws = (draws ^ (draws >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    draws ^= draws >> np.uint64(31)
    count = held_out_count(len(distinct), holdout)
    chosen = distinct[np.argsort(draws, kind="stable")[:count]]
    return np.isin(keys, chosen)
