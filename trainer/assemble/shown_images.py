"""Draw the images of samples, as the model sees them, in one picture with their classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from trainer.core.micro_batch import Fields

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
