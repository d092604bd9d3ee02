"""Say for a person why a size was chosen, or why none fits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NoReturn

from trainer.core.errors import DoesNotFitError
from trainer.core.format import size
from trainer.plan.memory import Shape, candidate_caps, largest_cap
from trainer.tune.memory_limit import ASKED, MEBI
from trainer.tune.tuning import Candidate

if TYPE_CHECKING:
    from trainer.tune.tuner import MemoryVariant

NEAR_BEST = 0.03  # steps that differ by less count as equally fast
WORTHWHILE = 0.97  # of the time, that a compiled micro-batch must take less than


def describe_choice(best: MemoryVariant, row: Candidate, fastest_s: float) -> str:
    """Say how the choice is known, for a person to read; `fastest_s` is the best of all steps."""
    request = best.request
    how = best.how if request.fixed_cap is None else "not timed: deterministic"
    if math.isinf(best.margin) and len(best.rows) > 1:
        how += f", one size only, too slow for more: a cap of {row.max_tokens:,} is a guess"
    slower = best.times[row.max_tokens] / fastest_s - 1.0
    if NEAR_BEST < slower < math.inf and not math.isinf(best.margin):
        noise = "could not be repeated" if math.isinf(best.facts.noise) else "are noisy"
        how += (
            f", {slower:.0%} above the fastest row, which tells nothing: timings {noise}, so that "
            f"up to {best.margin:.0%} count as equal, and the most usual size is taken"
        )
    method = [best.facts.method, how, request.limit.source]
    if (share := best.facts.compiled_time) and request.work.compiled and request.timed:
        lengths = max(len(request.layout.shapes), request.layout.max_shapes or 1)
        gained_s = best.times[row.max_tokens] * request.num_steps * (1 / share - 1)
        if share > WORTHWHILE or gained_s < lengths * best.facts.compile_s:
            words = f"compiled, a micro-batch takes {share:.0%} of its time without"
            method.append(f"{words}, and every length compiles: compile=false ends sooner")
    if row.max_tokens < request.single_sample_cap:
        method.insert(
            0, f"longer samples, up to {request.single_sample_cap:,}, get a micro-batch each"
        )
    return "; ".join(method)


def refuse(variant: MemoryVariant) -> NoReturn:
    """Say what does not fit, and what would, within 4 %.

    Raises:
        DoesNotFitError: always.
    """
    request, limit, there = variant.request, variant.request.limit, variant.limit_bytes
    count, longest = request.single
    needed = variant.peak(request.single).peak_bytes
    fits = largest_cap(
        lambda length: variant.peak(Shape(count, length)).peak_bytes,
        there,
        candidate_caps(1, longest),
    )
    remedies = []
    if limit.source.startswith(ASKED):
        resident = request.work.resident_bytes
        grown = max(0, needed - resident) * variant.ratio
        enough = (resident + grown + limit.inputs) / (1 - limit.reserve)
        # What is left is rounded down to a byte.
        remedies.append(f"type accum.memory={math.ceil((enough + 1) / MEBI)}MiB or more")
    if fits is not None and fits > 1:
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
        f"{what} needs {size(needed)} of tensors, and {size(there)} are available "
        f"({limit.source}{inputs}): {', or '.join([*remedies, 'use a smaller model'])}"
    )
