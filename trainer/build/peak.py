"""Predict the peak of the sampled steps of a run whose cut is not tuned, by what is remembered."""

from __future__ import annotations

import numpy as np

from trainer.build.parts import Parts
from trainer.config.messages import clip
from trainer.core.errors import TrainError
from trainer.plan.cut import Plan
from trainer.plan.cuts import Fixed, LayoutInvariant
from trainer.plan.memory import Shape, largest_shapes
from trainer.plan.partition import pad
from trainer.tune.cache import TuningCache, describe
from trainer.tune.forward import Forward
from trainer.tune.predict import Predictor
from trainer.tune.tensors import MemoryEstimate
from trainer.tune.workload import Workload, restoring


def open_cache(parts: Parts, work: Workload, forward: Forward | None) -> TuningCache:
    """Open the cache for everything that measurements and predictions depend on."""
    model, setup = parts.config.model, parts.parallel
    situation = {
        "own lengths": repr(getattr(work.make_fields, "dims", None)),
        "component": [model.target, repr(sorted(model.params.items()))],
        "ranks": [parts.world.size, setup.replicas, work.sync.name, setup.buckets(work.device)],
    }
    described = describe(work, parts.source.lengths.max(), parts.precision, forward)
    return TuningCache.open(described | situation)


def predict_sampled(
    parts: Parts,
    work: Workload,
    forward: Forward | None,
    plans: tuple[Plan, ...],
    warnings: list[str],
) -> MemoryEstimate | None:
    """Predict the peak of the dearest micro-batch of any step; None where that cannot be."""
    shapes, recompute = _dearest(parts, plans), parts.config.activation_checkpointing is True
    try:
        cache = open_cache(parts, work, forward)
        facts = cache.facts[recompute]
        if unknown := [shape for shape in shapes if shape not in facts.peaks]:
            # One that the run has, not one sample alone: BatchNorm of single values needs two.
            smallest = min(shapes, key=lambda shape: shape.num_samples)
            with restoring(parts.module, parts.objective):
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


def _dearest(parts: Parts, plans: tuple[Plan, ...]) -> tuple[Shape, ...]:
    """Name shapes of which one needs the most memory of the sampled steps.

    Under a fixed cut it is that of all steps: the longest sample of the data may come with a whole
    micro-batch of others.
    """
    shapes = largest_shapes(plans)
    if isinstance(parts.cut, Fixed | LayoutInvariant) and not parts.layout.packed:
        longest = pad(np.array([parts.source.lengths.max()]), parts.layout)
        return (
            Shape(max(len(ids) for p in plans for own in p.ranks for ids in own), int(longest[0])),
        )
    return shapes
