"""Draw from several sources by weights that change after so many samples.

Which sample stands at a place follows from the place, the sizes, the weights and the seed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import floor, lcm
from typing import final

import numpy as np

from trainer.core.format import number, percent
from trainer.core.rows import Row, row
from trainer.plan.cut import IntArray
from trainer.plan.permutation import permutation_of

MOST_OF_BLOCK = 10**5
"""Samples of the longest block; weights of more digits than it holds are rounded to it."""


def nearest_counts(length: int, weights: Mapping[str, Fraction]) -> dict[str, int]:
    """Part a number by weights, rounded by the largest remainder."""
    total = sum(weights.values(), Fraction(0))
    exact = {name: length * weight / total for name, weight in weights.items()}
    counts = {name: floor(share) for name, share in exact.items()}
    left = length - sum(counts.values())
    # Stable: of equal remainders the first source gets the sample.
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[:left]:
        counts[name] += 1
    return counts


@final
@dataclass(frozen=True)
class MixtureStage:
    """Places in a row that are drawn by the same weights: blocks with as many of each source.

    Within a block sources take turns as seats are given to parties (Webster, Sainte-Lague): the
    k-th of n samples of a source comes at (k - 1/2) / n of the block. So every stretch has nearly
    the same shares.
    """

    begin: int  # the first place
    before: IntArray  # samples of each source before it, (sources,)
    counts: IntArray  # samples of each source in a block, (sources,)
    turns: IntArray  # the source at each place of a block, (block,)
    within: IntArray  # samples of that source before it in the block, (block,)

    def drawn_at(self, places: IntArray) -> tuple[IntArray, IntArray]:
        """Give the source at each place, and how many samples of it come before."""
        blocks, rest = np.divmod(places - self.begin, len(self.turns))
        sources = self.turns[rest]
        numbers: IntArray = blocks * self.counts[sources] + self.within[rest]
        return sources, self.before[sources] + numbers

    def counts_before(self, place: int) -> IntArray:
        """Give the samples of each source before a place, (sources,)."""
        blocks, rest = divmod(place - self.begin, len(self.turns))
        first = np.bincount(self.turns[:rest], minlength=len(self.counts))
        found: IntArray = self.before + blocks * self.counts + first
        return found


@final
class SourceSchedule:
    """The samples of several sources, one source after the other, at each place of a run.

    A source goes on in a stage where it stood in the one before. Its samples come in a permutation
    of its own, and in another one once all of them have come.
    """

    def __init__(self, sizes: Mapping[str, int], stages: Mapping[int, Mapping[str, float]]) -> None:
        self._sizes = np.array([*sizes.values()])
        self._firsts = np.cumsum([0, *self._sizes])
        self.stages, before = list[MixtureStage](), np.zeros(len(sizes), dtype=np.int64)
        for begin, weights in stages.items():
            if self.stages:
                before = self.stages[-1].counts_before(begin)
            # By the decimals that were typed: as a float 0.1 is no tenth.
            shares = {name: Fraction(str(weights.get(name, 0))) for name in sizes}
            whole = sum(shares.values())
            block = min(lcm(*((s / whole).denominator for s in shares.values())), MOST_OF_BLOCK)
            counts = np.array([*nearest_counts(block, shares).values()])
            numbers = np.concatenate([*map(np.arange, counts)])
            sources = np.repeat(np.arange(len(counts)), counts)
            order = np.argsort((numbers + 0.5) / counts[sources], kind="stable")
            self.stages.append(MixtureStage(begin, before, counts, sources[order], numbers[order]))
        # Of each source, the number and the permutation of its pass over the data
        self._passes = dict[int, tuple[int, Callable[[IntArray], IntArray]]]()

    def __call__(self, seed: int, places: IntArray) -> IntArray:
        """Give the samples at some places, `(places,)`, in constant time for each."""
        found, begins = np.zeros_like(places), [stage.begin for stage in self.stages]
        stages = np.searchsorted(begins, places, side="right") - 1
        for stage in np.unique(stages):
            mask = stages == stage
            sources, numbers = self.stages[stage].drawn_at(places[mask])
            passes, rest = np.divmod(numbers, self._sizes[sources])
            ids = np.zeros_like(rest)
            for source, turn in np.unique(np.stack([sources, passes]), axis=1).T.tolist():
                own = (sources == source) & (passes == turn)
                known, permutation = self._passes.get(source, (None, None))
                if permutation is None or known != turn:
                    key = f"{seed}\x1f{source}\x1f{turn}"
                    permutation = permutation_of(int(self._sizes[source]), key)
                    self._passes[source] = turn, permutation
                ids[own] = self._firsts[source] + permutation(rest[own])
            found[mask] = ids
        return found

    def rows(self, names: Sequence[str]) -> list[Row]:
        """Describe the stages: shares, and samples of each source up to the next."""
        rows, records = list[Row](), list[dict[str, object]]()
        for stage, following in pairwise([*self.stages, None]):
            assert stage is not None
            shares = dict(zip(names, (stage.counts / len(stage.turns)).tolist(), strict=True))
            text, samples = ", ".join(f"{name} {percent(s)}" for name, s in shares.items()), None
            if following is not None:
                found = (following.before - stage.before).tolist()
                samples = dict(zip(names, found, strict=True))
                text += f": {', '.join(f'{number(n)} {name}' for name, n in samples.items())}"
            label = "" if rows else "weights"
            text = f"from sample {number(stage.begin)}: {text}"
            rows.append(row(label, text, group="asked"))
            records.append({"begin": stage.begin, "shares": shares, "samples": samples})
        return [*rows, row(mixture_stages=records)]
