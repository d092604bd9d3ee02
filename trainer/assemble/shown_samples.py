"""Show samples as the model gets them: decoded, with what is learned in brackets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.assemble.run import Run
from trainer.core.format import plural, printable_lines, shown_path
from trainer.core.micro_batch import IGNORED, Fields
from trainer.core.rows import Row, join_parts, row
from trainer.data.collate import LABELS
from trainer.data.loader import Loader, Request
from trainer.data.samples import INPUT_IDS, faults_of
from trainer.data.shown import ShownSample
from trainer.models.task import task_of
from trainer.objectives.base import Objective, weights_of
from trainer.parallel.base import Parallel
from trainer.training.predictions import predict

MOST_WORST = 8  # samples of a part that are written with their texts


def shown_samples(run: Run, folder: Path) -> list[Row]:
    """Describe the first `data.show` samples of step 1, for a person and for plan.json.

    Images are drawn in one picture in a folder, that of the run.
    """
    count, source = run.config.data.show, run.data
    if not count:
        return []
    view, rows, records = run.data.train, list[Row](), list[dict[str, Any]]()
    drawn = list[tuple[Fields, str]]()
    for i in source.order.next(source.order.start).ids[:count].tolist():
        shown, text = _loaded(run, source.loader, i)
        tokens = plural(source.lengths[i], "token")
        terms = None if shown.terms is None else plural(sum(shown.terms), "loss term")
        name = join_parts(view.name_of(i), shown.terms is not None and tokens, terms)
        rows.append(row("sample", f"{name}\n{text}", in_plan=True))
        drawn.append((shown.fields, (shown.learned() or "").strip("[]")))
        records.append({"id": int(view.original_ids([i])[0]), "text": text})
    picture = folder / IMAGES_FILE
    if records and draw_images(drawn, picture):
        rows.append(row("images", shown_path(picture), in_plan=True, shown_images=str(picture)))
    return [*rows, row(shown_samples=records)]


def predict_parts(run: Run, model: Parallel) -> dict[str, list[dict[str, Any]]]:
    """Give the predictions of each part that is held out, but of those that others join."""
    parts, objective, world = run.data.held_out, run.model.objective, run.world
    joined = {name for part in parts.values() for name in part.joins}
    return {n: predict(model, objective, parts[n], world) for n in parts if n not in joined}


def worst_samples(
    run: Run, predicted: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """Give the predictions of each part with the largest loss, NaN first, and their texts."""
    found = []
    for name, lines in predicted.items():
        part = run.data.held_out[name]
        view, places = part.loader.dataset, part.chosen(0, part.num_samples)
        place_of = dict(zip(view.original_ids(places).tolist(), places.tolist(), strict=True))
        measured = [line for line in lines if line["loss"] is not None]
        for line in sorted(measured, key=_by_loss)[:MOST_WORST]:
            _, text = _loaded(run, part.loader, place_of[line["id"]])
            found.append({**({"set": name} if name else {}), **line, "text": text})
    return found


def _by_loss(line: Mapping[str, Any]) -> tuple[bool, float]:
    """Order predictions from the worst on; a loss that is not finite has no order of its own."""
    loss = line["loss"]
    return (True, -loss) if math.isfinite(loss) else (False, 0.0)


def _loaded(run: Run, loader: Loader, place: int) -> tuple[ShownSample, str]:
    """Load one sample, with its text."""
    view, has_targets = loader.dataset, task_of(run.model.module) == "seq2seq_lm"
    fields = loader.load(Request(ids=(place,), epoch=0, pad_to=int(view.lengths[place])))
    shown = ShownSample(
        fields=fields,
        decode=view.optional("decode") or (lambda ids: "".join(f"{each} " for each in ids)),
        names=view.optional("label_names"),
        terms=_terms(fields, run.model.objective, has_targets=has_targets),
    )
    with faults_of(f"`decode` of {view.kind}"):
        return shown, printable_lines(shown.text())


def _terms(fields: Fields, objective: Objective, *, has_targets: bool) -> list[bool] | None:
    """Mark the tokens of one sample that are loss terms; None where labels are not of tokens."""
    ids, labels = fields.get(INPUT_IDS), fields.get(LABELS)
    if ids is None or labels is None or ids.shape != labels.shape or has_targets:
        return None
    terms: list[bool] = (labels != IGNORED).flatten().tolist()
    counts = weights_of(objective, fields).values()
    if terms[0] and sum(terms) - 1 in counts and sum(terms) not in counts:
        terms[0] = False  # the objective predicts each token from those before
    return terms


IMAGES_FILE = "samples.png"
_SIDE, _LINE, _GAP = 128, 16, 4
"""Pixels of a tile's side, at least, of a line of text, and between tiles."""


def draw_images(samples: Sequence[tuple[Fields, str]], path: Path) -> bool:
    """Write the images of samples, each collated alone, with a word about each, into a PNG.

    Numbers are drawn from the least, black, to the largest of all images, white. Gives whether
    there were images: of every sample the first field `(1, channels, height, width)` with one or
    three channels.
    """
    from PIL import Image, ImageDraw  # noqa: PLC0415 - for images alone; matplotlib brings it

    fields = [[f for n, f in each.items() if _is_image(n, f)] for each, _ in samples]
    images = [found[0][0].float() for found in fields if found]
    if not images or len(images) < len(samples):
        return False
    low = min(float(image.min()) for image in images)
    span = max(float(image.max()) for image in images) - low or 1.0
    side = max(_SIDE, *(max(image.shape[1:]) for image in images))
    columns = math.ceil(math.sqrt(len(images)))
    width, height = side + _GAP, side + _LINE + _GAP
    rows = math.ceil(len(images) / columns)
    page = Image.new("RGB", (columns * width, rows * height), "white")
    draw = ImageDraw.Draw(page)
    for k, (image, (_, word)) in enumerate(zip(images, samples, strict=True)):
        pixels = ((image - low) * (255 / span)).round().to(torch.uint8).expand(3, -1, -1)
        tile = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        scale = side // max(tile.size)
        place = k % columns * width, k // columns * height
        tile = tile.resize((tile.width * scale, tile.height * scale), Image.Resampling.NEAREST)
        page.paste(tile, place)
        text = word.encode("latin-1", "replace").decode("latin-1")  # what every font has
        draw.text((place[0], place[1] + side + 1), text[: side // 6], fill="black")
    page.save(path)
    return True


def _is_image(name: str, field: Tensor) -> bool:
    if "mask" in name or field.dtype == torch.bool or field.is_complex():
        return False
    return field.dim() == 4 and field.shape[1] in (1, 3)  # noqa: PLR2004
