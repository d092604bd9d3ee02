"""Choose the sync policy once the plan is known: how often it reduces, and what hides that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from trainer.build.parallel import ParallelSetup, planned_device
from trainer.build.prepare import Prepared, prepare_on_main
from trainer.parallel.sync import Deferred
from trainer.plan.traffic import Network, Work
from trainer.tune.speed import Clock


def choose_sync(
    prepared: Prepared,
    network: Network | None,
    saved: Mapping[str, Any] | None,
    clock: Clock,
) -> Prepared:
    """Weigh the sync policies with what the plan and the network tell. Collective.

    Args:
        prepared: planned for the policy that memory alone speaks for.
        network: between the ranks; None where it is not here.
        saved: as for `prepare`, in case that another policy asks for another plan.
        clock: likewise.
    """
    parts = prepared.parts
    setup = parts.parallel.weighed(_work_of(prepared), network)
    lockstep = setup.sync.lockstep and parts.world.size > 1
    layout = replace(parts.layout, lockstep=lockstep)
    if lockstep != parts.layout.lockstep:
        changed = replace(parts, parallel=setup, layout=layout)
        prepared = prepare_on_main(changed, saved, clock)
    if lockstep:
        setup = replace(setup, retry_with=parts.world.on_main(lambda: _fitting(prepared, setup)))
    return replace(prepared, parts=replace(prepared.parts, parallel=setup, layout=layout))


def _fitting(prepared: Prepared, setup: ParallelSetup) -> str | None:
    """Name the policy that could replay the step and whose predicted peak fits, if one does."""
    if prepared.predicted is None or prepared.limit_bytes is None or setup.bulk is None:
        return None
    more = setup.bulk.unsharded(lockstep=False) - setup.bulk.unsharded(lockstep=True)
    fits = prepared.predicted.peak_bytes + more <= prepared.limit_bytes
    return f"sync={Deferred.name}" if fits else None


def _work_of(prepared: Prepared) -> Work:
    """Say what a rank computes in the mean step, as far as it is known before the first."""
    parts = prepared.parts
    count = fmean(plan.accum_steps for plan in prepared.plans)
    seconds = step_seconds(prepared)
    is_gpu = planned_device(parts.config, parts.world).type == "cuda"
    return Work(
        micro_batches=count,
        seconds=None if seconds is None else seconds / count,
        overlaps=is_gpu,
        scatters_whole=not is_gpu,
    )


def step_seconds(prepared: Prepared) -> float | None:
    """Give the time that tuning predicts for a step; None where nothing was timed."""
    rows = () if prepared.tuning is None else prepared.tuning.candidates
    return next((row.seconds_per_step for row in rows if row.chosen), None)
