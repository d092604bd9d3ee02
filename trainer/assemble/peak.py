"""Predict the peak of the sampled steps of a run whose cut is not tuned, by what is remembered."""

from __future__ import annotations

import numpy as np

from trainer.assemble.components import Components
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


def open_cache(components: Components, work: Workload, forward: Forward | None) -> TuningCache:
    """Open the cache for everything that measurements and predictions depend on."""
    model, setup = components.config.model, components.parallel
    situation = {
        "own lengths": repr(getattr(work.make_fields, "dims", None)),
        "component": [model.target, repr(sorted(model.params.items()))],
        "ranks": [
            components.world.size,
            setup.replicas,
            work.sync.name,
            setup.buckets(work.device),
        ],
    }
    described = describe(work, components.source.lengths.max(), components.precision, forward)
    return TuningCache.open(described | situation)


def predict_sampled(
    components: Components,
    work: Workload,
    forward: Forward | None,
    plans: tuple[Plan, ...],
    warnings: list[str],
) -> MemoryEstimate | None:
    """Predict the peak of the dearest micro-batch of any step; None where that cannot be."""
    shapes, recompute = (
        _dearest(components, plans),
        components.config.activation_checkpointing is True,
    )
    try:
        cache = open_cache(components, work, forward)
        facts = cache.facts[recompute]
        if unknown := [shape for shape in shapes if shape not in facts.peaks]:
            # One that the run has, not one sample alone: statistics over samples need two.
            smallest = min(shapes, key=lambda shape: shape.num_samples)
            with restoring(components.module, components.objective):
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


def _dearest(components: Components, plans: tuple[Plan, ...]) -> tuple[Shape, ...]:
    """Name shapes of which one needs the most memory of the sampled steps.

    Under a fixed cut it is that of all steps: the longest sample of the data may come with a whole
    micro-batch of others.
    """
    shapes = largest_shapes(plans)
    if isinstance(components.cut, Fixed | LayoutInvariant) and not components.layout.packed:
        longest = pad(np.array([components.source.lengths.max()]), components.layout)
        return (
            Shape(max(len(ids) for p in plans for own in p.ranks for ids in own), int(longest[0])),
        )
    return shapes
