"""Ask the tuner about a run: the cap of its micro-batches, or the peak under a cut as typed."""

from __future__ import annotations

import logging
import sys
import time

from trainer.assemble.run import Run
from trainer.config.messages import clip
from trainer.core.errors import TrainError
from trainer.core.signals import check
from trainer.plan.cut import IntArray, Plan
from trainer.plan.memory import dearest_shapes
from trainer.plan.traffic import MOST_OF_MEMORY
from trainer.tune.cache import TuningCache, measurement_key
from trainer.tune.flops import ComputeCounts
from trainer.tune.memory_limit import MemoryLimit
from trainer.tune.peak_bytes import MemoryEstimate
from trainer.tune.request import Tuning, TuningRequest, usual_cap
from trainer.tune.speed import meter_for
from trainer.tune.tuner import predict_stated, tune
from trainer.tune.workload import Workload

_log = logging.getLogger(__name__)


def tune_run(
    run: Run,
    work: Workload,
    counts: ComputeCounts | None,
    limit: MemoryLimit,
    batches: list[IntArray],
    *,
    is_here: bool,
) -> Tuning:
    """Tune, for a machine that is here, or for one on which nothing can, or may, be timed."""
    config, lengths, cut = run.config, run.data.lengths, run.cut
    longest = lengths.argmax()
    # A window holds a sharded model whole, so it can be timed where that fits; one that is only
    # ever gathered block by block may be too large.
    whole = 2 * sum(p.nbytes for p in run.model.module.parameters())
    fits = run.model.weights is None or whole <= limit.bytes * MOST_OF_MEMORY
    device, fixed_cap = run.planned_device, None
    # Two measurements of one machine differ, and would give two cuts.
    if config.deterministic:
        fixed_cap = usual_cap(device)
    request = TuningRequest(
        work=work,
        batches=batches,
        longest=lengths.max(),
        shortest=max(lengths.min(), work.make_fields.shortest),
        cut_at=cut.tuned,
        layout=run.layout,
        limit=limit,
        most_samples=min(run.data.order.most_samples, getattr(cut, "micro", None) or sys.maxsize),
        recompute=config.activation_checkpointing,
        timed=is_here and fits and not config.deterministic,
        as_needed=not is_here and device.type != "cpu",
        fixed_cap=fixed_cap,
        num_steps=run.data.total_steps,
        longest_id=int(run.data.train.original_ids([longest])[0]),
    )
    cache = _open_cache(run, work, counts)
    return tune(request, cache, _clock, meter_for(work.model.device))


def _clock() -> float:
    """Read the clock, between two timings, where a signal may end them all."""
    check()
    return time.perf_counter()


def predict_sampled(
    run: Run,
    work: Workload,
    counts: ComputeCounts | None,
    plans: tuple[Plan, ...],
    warnings: list[str],
) -> MemoryEstimate | None:
    """Predict the peak of the dearest micro-batch of any step; None where that cannot be."""
    shapes = dearest_shapes(run.cut, plans, run.layout, run.data.lengths.max())
    recompute = run.config.activation_checkpointing is True
    try:
        return predict_stated(work, shapes, _open_cache(run, work, counts), recompute=recompute)
    except TrainError:
        raise
    except Exception as error:
        # A fault of the model's own shows again, in full, in the step that follows.
        _log.info("memory not predicted: %r", error)
        reason = str(error) or type(error).__name__
        warnings.append(clip(f"memory not predicted, as a trial of the model failed: {reason}"))
        return None


def _open_cache(run: Run, work: Workload, counts: ComputeCounts | None) -> TuningCache:
    """Open the cache for everything that measurements and predictions depend on."""
    model, setup, world = run.config.model, run.model.setup, run.world
    situation = {
        "own lengths": repr(work.make_fields.dims),
        "component": [model.target, repr(sorted(model.params.items()))],
        "ranks": [world.size, setup.replicas, setup.sync.name],
    }
    longest = run.data.lengths.max()
    return TuningCache.open(measurement_key(work, longest, counts) | situation)
