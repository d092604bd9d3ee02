"""Ask the tuner about a run: what a rank computes, its memory, its cap, its predicted peak."""

from __future__ import annotations

import inspect
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from trainer.assemble.hardware import planned_device, rank_memory
from trainer.assemble.run import Run
from trainer.config.cards import card_of
from trainer.config.messages import clip
from trainer.core.errors import DataError, TrainError
from trainer.core.micro_batch import Fields
from trainer.core.signals import check
from trainer.data.loader import Request
from trainer.models.boundaries import BOUNDARIES
from trainer.models.first_weights import is_on_meta
from trainer.plan.cut import Cost, Cut, IntArray, Plan
from trainer.plan.memory import Shape, largest_shapes
from trainer.plan.partition import pad_lengths
from trainer.plan.traffic import MOST_OF_MEMORY
from trainer.training.batches import PREFETCH_LIMIT_BYTES
from trainer.tune.cache import TuningCache, measurement_key
from trainer.tune.flops import ComputeCounts, card_at, card_cost
from trainer.tune.memory_limit import MemoryLimit
from trainer.tune.packing import unpacked
from trainer.tune.predict import Predictor
from trainer.tune.request import Tuning, TuningRequest, usual_cap
from trainer.tune.speed import meter_for
from trainer.tune.tensors import MemoryEstimate
from trainer.tune.tuner import tune
from trainer.tune.workload import Tiled, Workload, measured_dims, restoring


def workload_of(run: Run) -> Workload:
    """Give what tuning computes: model, loss, optimizer, and micro-batches of any shape."""
    world, setup = run.world, run.model.setup
    ranks = partial(setup.fake_ranks, world.size, run.model.bind, world.device)
    tiled = _tiled(run)
    return Workload(
        model=run.model.module,
        bind=run.model.bind,
        objective=run.model.objective,
        make_optimizer=run.model.spec.build,
        make_fields=tiled,
        shortest=tiled.shortest,
        ema_decay=run.config.ema.decay,
        device=world.device,
        compiled=run.config.compile,
        weights=run.model.weights,
        sync=setup.sync,
        fake_ranks=ranks if run.is_sharded or setup.mode == "ddp" else None,
    )


def _tiled(run: Run) -> Tiled:
    """Make shapes out of the longest sample; others show which dimensions follow its length."""
    example, lengths = run.example, run.data.lengths
    module, device, longest = run.model.module, run.world.device, lengths.max()
    is_away = planned_device(run.config, run.world).type != device.type
    # Without that kernel boundaries are looked at, and a model on the meta device runs fake alone.
    has_kernel = not is_away and (not is_on_meta(module) or device.type != "cpu")
    boundaries = inspect.signature(module.forward).parameters.get(BOUNDARIES)
    is_optional = boundaries is None or boundaries.default is not boundaries.empty
    if not has_kernel and is_optional and BOUNDARIES in example:
        # The kernel that takes all documents of a packed row at once is a GPU's. Where that is not
        # here, documents side by side, which take as much, stand in for it.
        example = unpacked(example)
    if BOUNDARIES in example:
        return Tiled(example, longest)

    def load(i: int) -> Fields | None:
        # What cannot be read is refused, or passed over, where its step needs it.
        request = Request((i,), 0, int(lengths[i]), run.layout.packed)
        with suppress(DataError):
            fields = run.data.loader.load(request)
            return unpacked(fields) if request.packed else fields
        return None

    some = lengths.sample()
    dims = measured_dims(lengths[some], lambda place: load(int(some[place])))
    return Tiled(example, longest, dims)


def device_cost(run: Run, counts: ComputeCounts | None) -> Cost:
    """Give the time model of the device by arithmetic; on a CPU it is a constant."""
    if planned_device(run.config, run.world).type == "cpu":
        return run.layout.cost
    here, named = run.world.device, card_of(run.config.device)
    card = card_at(here) or named
    cost = card_cost(counts, card, run.model.precision)
    return cost if named else replace(cost, seconds_per_token=None)


def memory_of_rank(run: Run, resident_bytes: int) -> tuple[MemoryLimit | None, bool]:
    """Find the memory of one rank, less what inputs take on a CPU, and whether it is here.

    Those are the inputs of a step, and of the next where that is loaded ahead; a GPU holds one
    micro-batch of them, which the prediction counts.
    """
    config, world, lengths = run.config, run.world, run.data.lengths
    limit, is_here = rank_memory(config, world, resident_bytes)
    if limit is None or planned_device(config, world).type != "cpu":
        return limit, is_here
    per_token = sum(field.nbytes for field in run.example.values()) / float(lengths.max())
    each = 1.0 if config.batch.unit == "tokens" else float(lengths.mean())
    of_step = int(per_token * each * run.data.order.sizes.largest / world.size)
    inputs = of_step * (2 if of_step <= PREFETCH_LIMIT_BYTES else 1)
    return replace(limit, bytes=max(0, limit.bytes - inputs), inputs=inputs), is_here


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
    device = planned_device(config, run.world)
    request = TuningRequest(
        work=work,
        batches=batches,
        longest=lengths.max(),
        shortest=max(lengths.min(), work.shortest),
        cut_at=cut.tuned,
        layout=run.layout,
        limit=limit,
        most_samples=min(run.data.order.most_samples, getattr(cut, "micro", None) or sys.maxsize),
        recompute=config.activation_checkpointing,
        timed=is_here and fits and not config.deterministic,
        as_needed=not is_here and device.type != "cpu",
        fixed_cap=usual_cap(device) if config.deterministic else None,
        num_steps=run.data.total_steps,
        longest_id=int(run.data.train.original_ids([longest])[0]),
    )
    cache = _open_cache(run, work, counts)
    return tune(request, cache, _clock, meter_for(work.device))


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
    shapes = _dearest(run, run.cut, plans)
    recompute = run.config.activation_checkpointing is True
    try:
        cache = _open_cache(run, work, counts)
        facts = cache.facts[recompute]
        if unknown := [shape for shape in shapes if shape not in facts.peaks]:
            # One that the run has, not one sample alone: statistics over samples need two.
            smallest = min(shapes, key=lambda shape: shape.num_samples)
            with restoring(run.model.module, run.model.objective):
                predictor = Predictor(work, smallest, recompute=recompute)
                facts.peaks.update({shape: predictor(shape) for shape in unknown})
            cache.save()
        return max((facts.peaks[shape] for shape in shapes), key=lambda peak: peak.peak_bytes)
    except TrainError:
        raise
    except Exception as error:
        # A fault of the model's own shows again, in full, in the step that follows.
        warnings.append(clip(f"memory not predicted: {type(error).__name__}: {error}"))
        return None


def _dearest(run: Run, cut: Cut, plans: tuple[Plan, ...]) -> tuple[Shape, ...]:
    """Name shapes of which one needs the most memory of the sampled steps.

    Under counts that were typed it is that of all steps: the longest sample of the data may come
    with a whole micro-batch of others.
    """
    if "micro_batch" not in cut.couplings or run.layout.packed:
        return largest_shapes(plans)
    longest = pad_lengths(np.array([run.data.lengths.max()]), run.layout)
    return (Shape(max(len(ids) for p in plans for own in p.ranks for ids in own), int(longest[0])),)


def _open_cache(run: Run, work: Workload, counts: ComputeCounts | None) -> TuningCache:
    """Open the cache for everything that measurements and predictions depend on."""
    model, setup, world = run.config.model, run.model.setup, run.world
    situation = {
        "own lengths": repr(getattr(work.make_fields, "dims", None)),
        "component": [model.target, repr(sorted(model.params.items()))],
        "ranks": [world.size, setup.replicas, work.sync.name],
    }
    longest = run.data.lengths.max()
    return TuningCache.open(measurement_key(work, longest, run.model.precision, counts) | situation)
