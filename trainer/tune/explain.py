"""Say for a person why a size was chosen, or why none fits."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, NoReturn

from trainer.core.errors import DoesNotFitError
from trainer.core.format import size
from trainer.plan.memory import Shape
from trainer.tune.memory_limit import ASKED, MEBI
from trainer.tune.request import Candidate
from trainer.tune.speed import NEAR_BEST

if TYPE_CHECKING:
    from trainer.tune.tuner import MemoryVariant


def describe_choice(best: MemoryVariant, row: Candidate, fastest_s: float) -> str:
    """Say how the choice is known, for a person to read; `fastest_s` is the best of all steps."""
    request, slower = best.request, best.times[row.max_tokens] / fastest_s - 1.0
    how = best.how if request.fixed_cap is None else "not timed: deterministic"
    if math.isinf(best.noise) and len(best.rows) > 1:
        how += ", too slow to compare sizes: the most usual one is taken"
    elif slower > NEAR_BEST:
        how += f", {slower:.0%} above the fastest row, which is within the noise of timings"
        how += f" ({best.noise:.0%}): of such rows the most usual one is taken"
    method = [best.facts.method, how, request.limit.source]
    if row.max_tokens < request.single_sample_cap:
        method.insert(
            0, f"longer samples, up to {request.single_sample_cap:,}, get a micro-batch each"
        )
    return "; ".join(method)


def refuse(variant: MemoryVariant) -> NoReturn:
    """Say what does not fit, and what would.

    Raises:
        DoesNotFitError: always.
    """
    request, limit, there = variant.request, variant.request.limit, variant.limit_bytes
    count, longest = request.single
    needed = limit.with_overhead(variant.peak(request.single))
    lengths = range(1, longest)
    fits = bisect_right(
        lengths, there, key=lambda n: limit.with_overhead(variant.peak(Shape(count, n)))
    )
    remedies = []
    if limit.source.startswith(ASKED):
        enough = (needed + limit.inputs) / (1 - limit.reserve)
        # What is left is rounded down to a byte.
        remedies.append(f"type accum.memory={math.ceil((enough + 1) / MEBI)}MiB or more")
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
    raise DoesNotFitError(
        f"{what} needs {size(needed)}, and {size(there)} are available "
        f"({limit.source}{inputs}): {', or '.join([*remedies, 'use a smaller model'])}"
    )
