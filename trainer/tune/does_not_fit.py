"""Say what does not fit into memory, and what would."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable

from trainer.core.errors import DoesNotFitError
from trainer.core.format import size
from trainer.plan.memory import Shape
from trainer.tune.memory_limit import MEBI, TYPED_LIMIT
from trainer.tune.peak_bytes import MemoryEstimate
from trainer.tune.request import TuningRequest


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
