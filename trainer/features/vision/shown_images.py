"""Draw the images of the first samples of a run in one picture, for `train plan data.show=N`.

Those with the largest loss are drawn one by one, for the page of the run.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from trainer.assemble.features import Feature
from trainer.core.format import shown_path
from trainer.core.micro_batch import Fields
from trainer.core.rows import Row, row
from trainer.data.shown import ShownSample

if TYPE_CHECKING:
    from PIL.Image import Image

_SIDE, _LINE, _GAP = 128, 16, 4
"""Pixels of a tile's side, at least, of a line of text, and between tiles."""

_MOST_SIDE = 256  # pixels of an image that is drawn alone


@final
class ShownImages(Feature):
    """Draws samples that are images, of whatever data set."""

    def shown(self, samples: Sequence[ShownSample], folder: Path) -> Sequence[Row]:
        """See the base class."""
        picture = folder / "samples.png"
        labelled = [(each.fields, (each.learned() or "").strip("[]")) for each in samples]
        if not draw_images(labelled, picture):
            return ()
        return [row("images", shown_path(picture), shown_images=str(picture))]

    def picture(self, sample: ShownSample) -> bytes | None:
        """See the base class."""
        if (image := _image_of(sample.fields)) is None:
            return None
        low, high = float(image.min()), float(image.max())
        tile, png = _tile(image, low, high - low or 1.0, _SIDE), io.BytesIO()
        tile.thumbnail((_MOST_SIDE, _MOST_SIDE))
        tile.save(png, "PNG")
        return png.getvalue()


def draw_images(samples: Sequence[tuple[Fields, str]], path: Path) -> bool:
    """Write the images of samples, each collated alone, with a word about each, into a PNG.

    Numbers are drawn from the least, black, to the largest of all images, white. Gives whether
    there were images: of every sample the first field `(1, channels, height, width)` with one or
    three channels.
    """
    from PIL import Image, ImageDraw  # noqa: PLC0415 - for images alone; matplotlib brings it

    images = list[Tensor]()
    for fields, _ in samples:
        if (found := _image_of(fields)) is None:
            return False
        images.append(found)
    if not images:
        return False
    low = min(float(image.min()) for image in images)
    span = max(float(image.max()) for image in images) - low or 1.0
    side = max(_SIDE, *(max(image.shape[1:]) for image in images))
    columns = math.ceil(math.sqrt(len(images)))
    width, height = side + _GAP, side + _LINE + _GAP
    rows = math.ceil(len(images) / columns)
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    draw = ImageDraw.Draw(sheet)
    for k, (image, (_, word)) in enumerate(zip(images, samples, strict=True)):
        place = k % columns * width, k // columns * height
        sheet.paste(_tile(image, low, span, side), place)
        # These letters are in every font of Pillow's.
        text = word.encode("latin-1", "replace").decode("latin-1")
        # A letter of it is about 6 pixels wide.
        draw.text((place[0], place[1] + side + 1), text[: side // 6], fill="black")
    sheet.save(path)
    return True


def _tile(image: Tensor, low: float, span: float, side: int) -> Image:
    """Draw an image `(channels, height, width)`, enlarged to at most `side` pixels."""
    from PIL import Image  # noqa: PLC0415 - for images alone

    pixels = ((image - low) * (255 / span)).round().to(torch.uint8).expand(3, -1, -1)
    tile = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    # By a whole number, so that each pixel is a square of its own.
    scale = max(1, side // max(tile.size))
    return tile.resize((tile.width * scale, tile.height * scale), Image.Resampling.NEAREST)


def _image_of(fields: Fields) -> Tensor | None:
    """Give the image of a sample that was collated alone; None where no field looks like one."""
    for name, field in fields.items():
        if "mask" in name or field.dtype == torch.bool or field.is_complex():
            continue
        if field.dim() == 4 and field.shape[1] in (1, 3):  # noqa: PLR2004
            return field[0].float()
    return None
