"""Say what the tuner is asked, what it answers, and what does not fit into memory."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import numpy as np
import torch

from trainer.core import gpu
from trainer.core.errors import DoesNotFitError
from trainer.core.format import size
from trainer.plan.cut import Cost, Cut, IntArray, Layout, Plan
from trainer.plan.memory import Shape
from trainer.plan.partition import pad_length
from trainer.tune.memory_limit import MEBI, TYPED_LIMIT, MemoryLimit
from trainer.tune.peak_bytes import MemoryEstimate
from trainer.tune.workload import Workload

# Padded tokens beyond which no device gains speed; larger caps are not tried
LARGEST_TIMED = {"gpu": 131_072, "cpu": 16_384}
# Padded tokens of a micro-batch that keeps a device busy as a rule: taken near the best where
# timings cannot tell, and as the cap where nothing may be timed
NEAR_BEST_TOKENS = {"gpu": 16_384, "cpu": 2048}
# Caps below the longest sample are asked about down to this: no device is faster below
LEAST_CAP = 512


def usual_cap(device: torch.device) -> int:
    """Give the cap that is taken where timings decide nothing, in padded tokens."""
    return NEAR_BEST_TOKENS[gpu.kind_of(device)]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One row of the table that `train plan` prints."""

    max_tokens: int  # cap on the padded tokens of a micro-batch
    predicted_bytes: int  # peak of tensors
    # Forward and backward, until the slowest rank is done; None where nobody knows
    seconds_per_step: float | None
    padding: float  # share of computed positions that hold no token
    micro_batches: float  # per step, over all ranks, the mean of the sampled global batches
    activation_checkpointing: bool
    chosen: bool = False

    def to_json(self, limit: int | None) -> dict[str, Any]:
        """Give what plan.json has of it; `limit` is what tensors may take, where that is known."""
        return {
            "max_tokens": self.max_tokens,
            "micro_batches": round(self.micro_batches),
            "padding": self.padding,
            "predicted_bytes": self.predicted_bytes,
            "predicted_seconds": self.seconds_per_step,
            "fits": limit is None or self.predicted_bytes <= limit,
            "is_chosen": self.chosen,
            "recomputes": self.activation_checkpointing,
        }


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What tuning found; rank 0's counts for all, and a checkpoint holds it."""

    max_tokens: int  # the cap, in padded tokens of a micro-batch of several samples
    single_sample_cap: int  # what a longer sample may take in a micro-batch of its own
    activation_checkpointing: bool
    cost: Cost  # the time model of the cuts
    predicted: MemoryEstimate  # the peak of the sampled steps, no higher than the cap allows
    limit_bytes: int  # what tensors may take
    method: str  # how all this is known, for a person to read
    candidates: tuple[Candidate, ...]  # the caps that were considered, ascending
    choice: str = ""  # in a few words why it is this cap; empty in checkpoints of earlier versions


@final
@dataclass(frozen=True, kw_only=True)
class TuningRequest:
    """What is to be tuned."""

    work: Workload  # one rank's model, loss, optimizer and data
    batches: Sequence[IntArray]  # lengths of the samples of a few global batches
    longest: int  # tokens of the longest sample of the data
    shortest: int
    # Gives the cut under a cap, a time model, and the padded tokens that one sample alone may have
    cut_at: Callable[[int, Cost, int], Cut]
    layout: Layout  # its cost counts where nothing is timed
    limit: MemoryLimit  # of one rank
    most_samples: int  # of any micro-batch, as `accum.micro` and the steps of the run allow
    recompute: bool | Literal["auto"] = False  # activation checkpointing: off, on, or to be weighed
    timed: bool = True  # False for a machine that is not this one, and under `deterministic`
    # Whether the cap is no larger than what the layout's cost has a use for in these batches
    as_needed: bool = False
    # The cap wherever it fits, whatever would be faster; None: the fastest, or the largest
    fixed_cap: int | None = None
    num_steps: int = 1000  # of the run, for the time that tuning may take
    longest_id: int = 0  # the longest sample, for the message when it does not fit

    def padded(self, length: int) -> int:
        """Round a length up as the layout asks."""
        return pad_length(length, self.layout)

    @property
    def single(self) -> Shape:
        """The least that any step needs: one sample, or one group, of the greatest length."""
        return Shape(min(self.layout.group_size, self.most_samples), self.padded(self.longest))

    def fullest(self, cap: int) -> Shape:
        """As many of the longest samples as a cap allows, and no fewer than any step needs."""
        count, length = self.single
        return Shape(max(count, min(self.most_samples, cap // length)), length)

    @property
    def single_sample_cap(self) -> int:
        """What the longest sample takes, or the largest group: it must fit, whatever the cap."""
        return self.single.num_samples * self.single.length

    @property
    def smallest_cap(self) -> int:
        """The least cap worth asking about: what is longer than it is alone."""
        cap = self.single_sample_cap
        while cap % 2 == 0 and cap // 2 >= max(self.typical, LEAST_CAP):
            cap //= 2
        return cap

    @property
    def top(self) -> int:
        """The largest cap worth asking about: one rank's share as one micro-batch."""
        share = -(-max(map(len, self.batches)) // self.layout.world_size)
        whole = min(share, self.most_samples) * self.padded(self.longest)
        bound = self.fixed_cap
        if self.timed:
            bound = LARGEST_TIMED[gpu.kind_of(self.work.model.device)]
        if self.as_needed:
            bound = max(plan.max_positions for plan in self.plans_under(whole, self.layout.cost))
        return max(self.single_sample_cap, min(whole, bound or whole))

    def plans_under(self, cap: int, cost: Cost) -> list[Plan]:
        """Cut the sampled batches under a cap, at the least cost."""
        cut = self.cut_at(cap, cost, self.single_sample_cap)
        layout = replace(self.layout, cost=cost)
        return [cut.cut(lengths, layout) for lengths in self.batches]

    @property
    def typical(self) -> int:
        """The length below which samples hold half of all tokens, padded."""
        ascending = np.sort(np.concatenate(self.batches))
        middle = np.searchsorted(np.cumsum(ascending), ascending.sum() / 2)
        return self.padded(int(ascending[middle]))


def does_not_fit(
    request: TuningRequest, there: int, peak: Callable[[Shape], MemoryEstimate]
) -> DoesNotFitError:
    """Say what does not fit into the bytes that are there, by the peak of a shape."""
    limit, (count, longest) = request.limit, request.single
    needed = limit.with_overhead(peak(request.single))
    # The number of lengths that fit is the longest of them, since they begin at 1.
    fits = bisect_right(
        range(1, longest), there, key=lambda n: limit.with_overhead(peak(Shape(count, n)))
    )
    remedies = []
    if limit.source.startswith(TYPED_LIMIT):
        enough = (needed + limit.inputs) / (1 - limit.reserve)
        # What is left is rounded down to a byte.
        remedies.append(f"type accum.memory={math.ceil((enough + 1) / MEBI)}MiB or more")
    # Samples of a step wait in memory.
    if there < needed <= there + limit.inputs:
        remedies.append("take a smaller batch.global")
    if fits > 1:
        remedies.append(f"shorten it, data.max_length={fits} being the longest that fits")
    if request.recompute is False:
        remedies.append("try activation_checkpointing=true")
    inputs = f", {size(limit.inputs)} for inputs" if limit.inputs else ""
    sample = f"sample {request.longest_id} of {request.longest} tokens"
    what = f"{sample} does not fit, even alone: a step with it"
    if count > 1:
        what = (
            f"a group of {count} samples, which no cut divides, does not fit, even alone, where "
            f"they are as long as {sample}: a step with it"
        )
        remedies.append("use smaller groups")
    return DoesNotFitError(
        f"{what} needs {size(needed)}, and {size(there)} are available "
        f"({limit.source}{inputs}): {', or '.join([*remedies, 'use a smaller model'])}"
    )
