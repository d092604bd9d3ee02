"""Count what a run computes, on fake tensors, and have its parts go by what shows there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainer.assemble.run import Run
from trainer.core.micro_batch import to_device
from trainer.data.collate import LABELS
from trainer.data.loader import Request
from trainer.data.samples import INPUT_IDS, SOURCE
from trainer.models import output_layer
from trainer.models.bind import BOUNDARIES, unnamed_fields
from trainer.models.first_weights import is_on_meta
from trainer.objectives.base import sums_of, weights_of
from trainer.objectives.metrics import check_classes
from trainer.tune.flops import ComputeCounts, count_compute
from trainer.tune.packed_documents import unpacked
from trainer.tune.predict import CannotRunFake
from trainer.tune.workload import Tiled, Workload, restoring


def count_run(
    run: Run, work: Workload, main: Mapping[str, Any] | None = None
) -> ComputeCounts | None:
    """Count what the longest samples compute; None where the model cannot run fake.

    The loaders then compare numbers with what shows there, and losses know the output layer. Of
    `main`, what the main rank found, its counts are taken.
    """
    if run.model.spec.asks_for_output:
        _note_output_layer(run)
    counts: ComputeCounts | None = None
    if main is None:
        counts = _counted(run, work)
    elif main["counts"]:
        counts = ComputeCounts(**main["counts"])
    if counts is None:
        return None
    if LABELS in counts.limits:
        check_classes(run.model.objective.named_metrics, counts.limits[LABELS])
    loader, lengths = run.data.loader, run.data.lengths
    for each in [loader, *(part.loader for part in run.data.held_out.values())]:
        each.limit(counts.limits)
    if counts.limits:
        loader.load(Request((lengths.argmax(),), 0, lengths.max()))  # the example was without
    if counts.gives_logits:  # the main rank's layer knows
        setattr(output_layer.candidate(run.model.module), output_layer.IS_LAST, True)
    return counts


def unread_fields(run: Run, counts: ComputeCounts | None) -> list[str]:
    """Warn of what the samples bring, and neither the model's forward nor the objective reads."""
    if counts is None or not counts.unread:
        return []
    kinds = f"forward of {type(run.model.module).__name__} nor {type(run.model.objective).__name__}"
    return [
        f"data: {', '.join(counts.unread)} of the samples is read by neither {kinds} in training, "
        "and changes nothing: leave it out, or use a model or an objective that reads it"
    ]


def _note_output_layer(run: Run) -> None:
    """Find the output layer of a model that does not name it, by the loss of a sample."""
    module, objective = run.model.module, run.model.objective
    is_coupled = objective.coupling.kind == "batch"
    if output_layer.declared_output(module) is None and not is_on_meta(module) and not is_coupled:
        fields = to_device(run.example, run.world.device)
        with restoring(module, objective):
            sums = sums_of(objective, run.model.call, fields, weights_of(objective, fields))
            output_layer.note_output_matrices(module, sums.losses.values())


def _counted(run: Run, work: Workload) -> ComputeCounts | None:
    data, example, longest = run.data.train, run.example, run.data.lengths.max()
    if BOUNDARIES in example:
        # Documents side by side, whose attention has a formula, stand in for a packed row.
        work = replace(work, make_fields=Tiled(unpacked(example), longest))
    with data.isolated_rng():
        brought = example if data.facts.collate else data.read(0, seed=run.config.seed, epoch=0)
    # `input_ids` are counted, also where nothing else reads them.
    others = [n for n in brought if n in example and n != INPUT_IDS and SOURCE not in n]
    counts = count_compute(work, longest, unnamed_fields(run.model.module, others))
    if counts is None and is_on_meta(run.model.module) and run.model.weights is None:
        raise CannotRunFake("the model was built without weights")
    return counts
