"""Hold out a share of samples, say how the sides were parted, and find what is in both."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, final

import numpy as np
import numpy.typing as npt

from trainer.core.errors import DataError
from trainer.core.format import plural
from trainer.core.world import rng_key
from trainer.data.files import progress
from trainer.data.samples import KeyArray, Samples, without_marks
from trainer.data.view import DataView, feed_sample
from trainer.plan.cut import IntArray
from trainer.plan.lengths import IdsOf, picked
from trainer.plan.permutation import DRAWN_WHOLE, below, mixed

TRAIN = "train"
HELD_OUT = "held_out"
HELD_OUT_NAMES = (HELD_OUT, "validation", "val", "valid", "dev", "eval", "test")
"""What a held-out part may be called, the first one first, beside one called `train`."""

HOLDOUT = 0.05
"""Share that is held out where nobody says."""

LISTED_IDS = 100_000
"""Most held-out ids that are listed."""

COMPARED = 512
"""Most held-out samples that are looked for in training; of those three times as many are read."""

COMPARED_S = 5.0
"""Most seconds that reading one part may take for it; of slow samples fewer are compared."""

SHARED_SHARE = 0.1
"""Share of held-out samples that may be trained on, too, before it is a warning."""

SHARE_TOLERANCE = 0.05
"""How far the share held out may be from the one asked for, beyond a factor of two."""

OWN_PART = ""
"""The name of the run's own held-out part, whose figures have no name before theirs."""


@final
@dataclass(frozen=True, kw_only=True)
class HeldOutOverlap:
    """What comparing samples of both parts by their contents found."""

    held_out: int  # samples of the held-out part that were looked for
    training: int  # samples of the training part that they were looked for among
    found: int  # how many of the former are there; all of them, if all samples were compared


@final
@dataclass(frozen=True, kw_only=True)
class Split:
    """How training and held-out samples were parted."""

    rule: str  # in words
    holdout: float | None  # share that was asked for; None where the data bring their own parts
    seed: int  # `data.split_seed`.
    overlap: HeldOutOverlap | None = None  # of the contents; None where they were not compared
    # Likewise of each named held-out set
    sets: Mapping[str, HeldOutOverlap | None] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # what a person must know about it

    def to_json(self, train: DataView, parts: Mapping[str, DataView]) -> dict[str, Any]:
        """Give splits.json: the rule, the counts, and the held-out ids up to `LISTED_IDS`.

        `parts` are the held-out ones by name; the run's own has none.
        """
        held_out = parts.get(OWN_PART)
        ids, num_held_out = list[int](), 0
        if held_out is not None:
            ids, num_held_out = _listed(held_out), len(held_out)
        sources, sets = dict[str, Any](), dict[str, Any]()
        for name, view in parts.items():
            if name != OWN_PART and name not in self.sets:
                sources[name] = {"num_samples": len(view), "held_out": _listed(view)}
        for name, found in self.sets.items():
            overlap = found and asdict(found)
            sets[name] = {"num_samples": len(parts[name]), "overlap": overlap}
        return {
            "rule": self.rule,
            "holdout": self.holdout,
            "split_seed": self.seed,
            "num_training": len(train),
            "num_held_out": num_held_out,
            "num_listed": len(ids),
            "held_out": ids,
            "overlap": self.overlap and asdict(self.overlap),
            "sources": sources,
            "sets": sets,
        }


def _listed(view: DataView) -> list[int]:
    """Give the ids of samples, up to `LISTED_IDS`."""
    ids: list[int] = view.original_ids(np.arange(min(len(view), LISTED_IDS))).tolist()
    return ids


def have_equal_contents(first: DataView, second: DataView) -> bool:
    """Whether two data sets have as many samples, and equal ones wherever they are compared."""
    if len(first) != len(second) or len(first) == 0:
        return False
    hashes = _hashes(first, first.spaced(COMPARED))
    others = _hashes(second, hashes)
    return bool(others) and all(hashes[i] == other for i, other in others.items())


def find_overlap(train: DataView, held_out: DataView) -> HeldOutOverlap:
    """Look for held-out samples in training, by their contents.

    Costs the reading of at most four times `COMPARED` samples, and twice `COMPARED_S`.
    Beyond, samples at even distances are compared, which finds parts that share much. Of data that
    draw at random only what is at the same place in both can be recognised.
    """
    wanted = _hashes(held_out, held_out.spaced(COMPARED))
    among = {*train.spaced(3 * COMPARED)}
    # A part that is the beginning of the other one lies at the same places.
    for i in wanted:
        if i < len(train):
            among.add(i)
    hashes = _hashes(train, among)
    there = set(hashes.values())
    found = sum(each in there for each in wanted.values())
    return HeldOutOverlap(held_out=len(wanted), training=len(hashes), found=found)


def split_warnings(split: Split, train: DataView, held_out: DataView) -> Iterable[str]:
    """Warn of samples on both sides, and of a share far from the one asked for."""
    yield from overlap_warning("data", split.overlap, train)
    if asked := split.holdout:
        parts = {
            "tokens": (held_out.lengths.sum(), train.lengths.sum()),
            "samples": (len(held_out), len(train)),
        }
        for unit, (out, rest) in parts.items():
            share = out / (out + rest)
            if abs(share - asked) > SHARE_TOLERANCE and not asked / 2 <= share <= 2 * asked:
                yield (
                    f"data.holdout={asked:g}: {share:.0%} of the {unit} are held out "
                    f"({split.rule}); divide the data into more and smaller pieces, or set another "
                    "share"
                )
                return


def overlap_warning(key: str, shared: HeldOutOverlap | None, train: DataView) -> Iterable[str]:
    """Warn of samples that are evaluated and trained on, by the key that gives them."""
    # A copy in another source may not be known
    allowed = 0 if train.sources else SHARED_SHARE
    if shared is not None and shared.found > allowed * shared.held_out:
        yield (
            f"{key}: {shared.found:,} of {plural(shared.held_out, 'held-out sample')} that were "
            f"compared are trained on too (among {shared.training:,} of {len(train):,}), so the "
            "held-out loss is too good; see splits.json"
        )


def _hashes(data: DataView, places: Iterable[int]) -> dict[int, bytes]:
    hashes: dict[int, bytes] = {}
    started = time.monotonic()
    label = f"comparing training and held-out samples of {data.kind}"
    with data.isolated_rng(), progress(label) as advance:
        for i, sample in data.probe(sorted(places), seed=0):
            advance()
            digest = hashlib.blake2b(digest_size=16)
            # What is trained on may say more of its source.
            feed_sample(digest.update, without_marks(sample))
            hashes[i] = digest.digest()
            if time.monotonic() - started > COMPARED_S:
                break
    return hashes


def split_by_seed(dataset: Samples | DataView, split: str, holdout: float, seed: int) -> DataView:
    """Take one side of a data set that brings no split: `holdout` of its samples, or the rest.

    `holdout` is the share held out, at least one sample; 0 leaves `held_out` empty. Gives a view in
    the data set's own order; both sides of one view share its measured lengths. Beyond
    `DRAWN_WHOLE` samples a formula says what is in it, and no list.
    """
    whole = DataView.of(dataset)
    if len(whole) == 0:
        raise DataError(f"data: {whole.kind} holds no samples")
    settings = f"{split}|{holdout!r}|{seed}"
    count = held_out_count(len(whole), holdout)
    is_held_out, size, chosen = False, len(whole) - count, train_ids
    if split == HELD_OUT:
        is_held_out, size, chosen = True, count, held_out_ids
    ids_of: IdsOf | None = None
    if count and len(whole) > DRAWN_WHOLE:
        ids_of = partial(chosen, len(whole), count, seed)
    elif count:
        mask = held_out_mask(np.arange(len(whole), dtype=np.uint64), holdout, seed)
        ids_of = partial(picked, np.flatnonzero(mask == is_held_out))
    return DataView(whole, size, ids_of, settings)


def held_out_count(count: int, holdout: float) -> int:
    """Round the held-out share of `count` things; of two or more, one is on either side."""
    if holdout == 0.0 or count <= 1:
        return 0
    return min(max(round(count * holdout), 1), count - 1)


def held_out_ids(whole: int, held_out: int, seed: int, places: IntArray) -> IntArray:
    """Give the samples at some places of the held-out side: one of each of `held_out` stretches.

    The stretches of `whole` samples differ by one in size. Both sides keep the order of the data,
    and neither is a list; `whole * held_out` is below 2^63.
    """
    begins, ends = places * whole // held_out, (places + 1) * whole // held_out
    draws = mixed(places.astype(np.uint64) ^ np.uint64(rng_key("holdout", seed)))
    found: IntArray = begins + below(draws, (ends - begins).astype(np.uint64)).astype(np.int64)
    return found


def train_ids(whole: int, held_out: int, seed: int, places: IntArray) -> IntArray:
    """Give the samples at some places of the side that `held_out_ids` leaves."""
    # Before stretch `s` lie `floor(s whole / held_out)` samples, all but `s` of them ours.
    stretches = ((places + 1) * held_out - 1) // (whole - held_out)
    found: IntArray = places + stretches
    return found + (found >= held_out_ids(whole, held_out, seed, stretches))


def held_out_mask(keys: KeyArray, holdout: float, seed: int) -> npt.NDArray[np.bool_]:
    """Mark the samples that are held out, `(samples,)`; those that share a key stay together.

    The distinct keys are ranked by a hash of (seed, key), and the first of them are held out: the
    share is exact in keys, and which ones are held out depends neither on the order of the samples
    nor on the number of copies.
    """
    distinct = np.unique(keys)
    draws = mixed(distinct ^ np.uint64(rng_key("holdout", seed)))
    count = held_out_count(len(distinct), holdout)
    chosen = distinct[np.argsort(draws, kind="stable")[:count]]
    return np.isin(keys, chosen)
