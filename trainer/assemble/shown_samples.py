"""Show samples as the model gets them: decoded, with what is learned in brackets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.assemble.run import Run
from trainer.core.durable import make_folders, write_file_atomic
from trainer.core.format import plural, printable_lines
from trainer.core.micro_batch import IGNORED
from trainer.core.rows import Row, join_parts, row
from trainer.data.collate import LABELS, WEIGHT
from trainer.data.loader import Loader, Request
from trainer.data.samples import INPUT_IDS, faults_of
from trainer.data.shown import ShownSample
from trainer.models.facts import facts_of
from trainer.objectives.base import weights_of
from trainer.parallel.base import Parallel
from trainer.training.predictions import predict

MOST_WORST = 8  # samples of a part that are written with their texts


def shown_samples(run: Run, folder: Path) -> list[Row]:
    """Describe the first `data.show` samples of step 1, for a person and for plan.json.

    Features may show them in another way, in a folder, that of the run.
    """
    count, source = run.config.data.show, run.data
    if not count:
        return []
    view, rows, records = run.data.train, list[Row](), list[dict[str, Any]]()
    samples = list[ShownSample]()
    for i in source.order.next(source.order.start).ids[:count].tolist():
        shown, text = _loaded(run, source.loader, i)
        counts = list[str]()
        if shown.terms is not None:
            counts.append(plural(source.lengths[i], "token"))
            counts.append(plural(sum(shown.terms), "loss term"))
        weight = shown.fields.get(WEIGHT)
        if weight is not None and weight.numel() == 1:
            counts.append(f"weight {float(weight):g}")
        name = join_parts(view.name_of(i), *counts)
        rows.append(row("sample", f"{name}\n{text}"))
        samples.append(shown)
        records.append({"id": int(view.original_ids([i])[0]), "text": text})
    for feature in run.features:
        rows += feature.shown(samples, folder)
    return [*rows, row(shown_samples=records)]


def predict_parts(run: Run, model: Parallel) -> dict[str, list[dict[str, Any]]]:
    """Give the predictions of each part that is held out, but of those that others join."""
    parts, objective, world = run.data.held_out, run.model.objective, run.world
    joined = set[str]()
    for part in parts.values():
        joined.update(part.joins)
    predicted = dict[str, list[dict[str, Any]]]()
    for name, part in parts.items():
        if name not in joined:
            predicted[name] = predict(model, objective, part, world)
            for feature in run.features:
                feature.complete(name, predicted[name])
    return predicted


def worst_samples(
    run: Run, predicted: Mapping[str, Sequence[Mapping[str, Any]]], pictures: Path
) -> list[dict[str, Any]]:
    """Give the predictions of each part with the largest loss, NaN first, and their texts.

    What a feature can draw is a file in the folder `pictures`, which each line names.
    """
    found = list[dict[str, Any]]()
    for name, lines in predicted.items():
        part = run.data.held_out[name]
        view, places = part.loader.dataset, part.chosen(0, part.num_samples)
        place_of = dict(zip(view.original_ids(places).tolist(), places.tolist(), strict=True))
        measured = [line for line in lines if line["loss"] is not None]
        for line in sorted(measured, key=_by_loss)[:MOST_WORST]:
            shown, text = _loaded(run, part.loader, place_of[line["id"]])
            entry = {**line, "text": text}
            if (picture := _picture(run, shown)) is not None:
                make_folders(pictures)
                write_file_atomic(pictures / f"{len(found)}.png", picture)
                entry["picture"] = f"{pictures.name}/{len(found)}.png"
            if name:
                entry = {"set": name, **entry}
            found.append(entry)
    return found


def _picture(run: Run, sample: ShownSample) -> bytes | None:
    """Have a sample drawn by the first feature that can."""
    for feature in run.features:
        if (picture := feature.picture(sample)) is not None:
            return picture
    return None


def _by_loss(line: Mapping[str, Any]) -> tuple[bool, float]:
    """Order predictions from the worst on; a loss that is not finite has no order of its own."""
    loss = line["loss"]
    # False sorts before True.
    if not math.isfinite(loss):
        return False, 0.0
    return True, -loss


def _loaded(run: Run, loader: Loader, place: int) -> tuple[ShownSample, str]:
    """Load one sample, with its text; its terms are the tokens that are learned."""
    view, objective = loader.dataset, run.model.objective
    fields = loader.load(Request(ids=(place,), epoch=0, pad_to=int(view.lengths[place])))
    ids, labels = fields.get(INPUT_IDS), fields.get(LABELS)
    terms: list[bool] | None = None
    # Labels of another shape, or of sequences of their own, are not of tokens.
    has_targets = facts_of(run.model.module).has_targets
    if ids is not None and labels is not None and ids.shape == labels.shape and not has_targets:
        terms = (labels != IGNORED).flatten().tolist()
        unweighted = {name: field for name, field in fields.items() if name != WEIGHT}
        counts = weights_of(objective, unweighted).values()
        # An objective that predicts each token from those before counts one fewer.
        if terms[0] and sum(terms) - 1 in counts and sum(terms) not in counts:
            terms[0] = False
    shown = ShownSample(
        fields=fields,
        decode=view.facts.decode or (lambda ids: "".join(f"{each} " for each in ids)),
        names=view.facts.label_names,
        terms=terms,
    )
    with faults_of(f"`decode` of {view.kind}"):
        return shown, printable_lines(shown.text())
