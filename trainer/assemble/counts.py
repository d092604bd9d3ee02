"""Count what a run computes, on fake tensors, and have its parts go by what shows there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    # The example was loaded without limits: the longest sample is held against them here.
    if counts.limits:
        loader.load(Request((lengths.argmax(),), 0, lengths.max()))
    # On the main rank the count has marked the layer; the others take its answer over.
    if counts.gives_logits:
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
    # A data set that collates itself may name its fields otherwise than its samples do.
    brought: Iterable[str] = example
    if not data.facts.collate:
        with data.isolated_rng():
            brought = data.read(0, seed=run.config.seed, epoch=0)
    others = list[str]()
    for name in brought:
        # `input_ids` are counted, also where nothing else reads them.
        if name in example and name != INPUT_IDS and not name.startswith(SOURCE):
            others.append(name)
    counts = count_compute(work, longest, unnamed_fields(run.model.module, others))
    if counts is None and is_on_meta(run.model.module) and run.model.weights is None:
        raise CannotRunFake("the model was built without weights")
    return counts
