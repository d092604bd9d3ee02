"""Open images, and make the pixels that a model takes: by its own processor, or by size and mean.

A processor is of transformers: a preprocessor_config.json, or a part of a processor_config.json.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from trainer.core.errors import ConfigError
from trainer.core.hub_cache import model_files, model_folder

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What is read, as Pillow names it; it starts other programs for some of the rest."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of red, green and blue from 0 to 1, which most pretrained models expect."""
# Pillow's of an image that is refused here; it refuses one of the double size itself.
warnings.filterwarnings("ignore", message="Image size .* exceeds limit")

_PROCESSOR, _NESTED = "preprocessor_config.json", "processor_config.json"


def is_image(path: Path) -> bool:
    """Whether a file is an image: by its suffix or, where that says nothing, by its contents."""
    from PIL import Image  # noqa: PLC0415 - for images alone

    # By the suffix no file is opened, which for a million of them would take minutes.
    if Image.registered_extensions().get(path.suffix.lower()) in FORMATS:
        return True
    with suppress(Exception), Image.open(path, formats=FORMATS):
        return True
    return False


def open_image(path: Path) -> Any:  # noqa: ANN401 - of an untyped library
    """Read an image, upright, in red, green and blue.

    An OSError where it is of none of the formats, or broken; a ValueError where it is too large.
    """
    from PIL import Image, ImageOps  # noqa: PLC0415 - for images alone

    with Image.open(path, formats=FORMATS) as image:
        # The size stands in the head of the file: it is refused before it is unpacked.
        if image.width * image.height > (most := Image.MAX_IMAGE_PIXELS or math.inf):
            raise ValueError(f"{image.width} x {image.height} is above {most:,} pixels; shrink it")
        # In RGB all of their values beyond 255 would become white.
        if image.mode[0] in "IF":
            raise ValueError(f"its pixels have more than 8 bits (mode {image.mode}); convert it")
        return ImageOps.exif_transpose(image).convert("RGB")


def image_fault(error: Exception) -> str:
    """Say why an image cannot be read, in words that are the same for others of that fault."""
    from PIL import UnidentifiedImageError  # noqa: PLC0415 - for images alone

    if isinstance(error, UnidentifiedImageError):
        return f"no image of {', '.join(FORMATS)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # How many bytes are left differs from image to image.
    return re.sub(r" \(\d+ bytes[^)]*\)", "", " ".join(str(error).split()))


@final
@dataclass(frozen=True)
class Pixels:
    """Makes pixels of an image, `(3, height, width)` float32: by a processor, if there is one."""

    size: tuple[int, int]  # height and width
    mean: Sequence[float]  # what is subtracted from red, green and blue from 0 to 1
    std: Sequence[float]  # what is divided by then
    processor: Any = None  # of transformers

    def __call__(self, image: Any) -> Tensor:  # noqa: ANN401 - as `open_image` gives it
        """Scale and normalise; without a processor, the centre of the image alone."""
        from PIL import Image, ImageOps  # noqa: PLC0415 - for images alone

        if self.processor is not None:
            made: Tensor = self.processor(image, return_tensors="pt")["pixel_values"][0]
            return made
        # Pillow has the width first.
        fitted = np.array(ImageOps.fit(image, self.size[::-1], Image.Resampling.BILINEAR))
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        return ((torch.from_numpy(fitted).float() / 255 - mean) / std).permute(2, 0, 1)

    def describe(self) -> str:
        """Say how large an image becomes, what is taken off it, and by what."""
        mean = " ".join(f"{each:.4g}" for each in self.mean)
        std = " ".join(f"{each:.4g}" for each in self.std)
        by = f", by {type(self.processor).__name__}" if self.processor else ""
        return f"{self.size[0]} x {self.size[1]} pixels, mean {mean}, std {std}{by}"

    def to_json(self) -> str:
        """Give the preprocessor_config.json of what does the same."""
        if self.processor is not None:
            return str(self.processor.to_json_string())
        settings = {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": min(self.size)},
            "crop_size": dict(zip(("height", "width"), self.size, strict=True)),
            "resample": 2,  # bilinear
            "image_mean": [*self.mean],
            "image_std": [*self.std],
        }
        return json.dumps(settings, indent=2)


def pixels_of(
    size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    processor: str | None = None,
    model_path: str | None = None,
    **_: object,  # other arguments of the data
) -> Pixels:
    """Take a processor or, where size, mean or std are others than its own, none."""
    for name, numbers in (("mean", mean), ("std", std)):
        if numbers and (len(numbers) != len(IMAGENET_MEAN) or (numbers is std and min(std) <= 0)):
            text = "needs a number each for red, green and blue, of std above 0"
            raise ConfigError(f"data.{name}={[*numbers]}: {text}")
    found = None
    # Where all three are typed none has to be loaded.
    if processor or None in (size, mean, std):
        found = processor_pixels(processor, model_path)
    own = found or Pixels((64, 64), IMAGENET_MEAN, IMAGENET_STD)
    sides = (size, size) if size else own.size
    typed = Pixels(sides, mean or own.mean, std or own.std)
    # Those of a processor are found by what it makes of black and white, and so are rounded.
    if sides == own.size and np.allclose([typed.mean, typed.std], [own.mean, own.std]):
        return own
    return typed


def processor_pixels(processor: str | None, model_path: str | None) -> Pixels | None:
    """Load an image processor, or else that of the model, if it has one; runs no code of theirs."""
    source = processor or model_path
    if source is None or not (processor or model_files(source, _PROCESSOR, _NESTED)):
        return None
    from PIL import Image  # noqa: PLC0415 - for images alone
    from transformers import AutoImageProcessor  # noqa: PLC0415 - seconds, for this alone

    load: Any = AutoImageProcessor.from_pretrained
    try:
        found = load(model_folder(source), trust_remote_code=False)
        make = Pixels((0, 0), (), (), found)
        # What becomes of black and of white is the normalisation, whatever its settings are.
        black, white = make(Image.new("RGB", (48, 32))), make(Image.new("RGB", (32, 48), "white"))
        channels, height, width = black.shape
    except (OSError, LookupError, RuntimeError, TypeError, ValueError, ImportError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"data.processor={source}: cannot be used: {text}") from error
    if channels != len(IMAGENET_MEAN) or black.shape != white.shape:
        text = (
            f"{type(found).__name__} gives images of several sizes; type data.size, data.mean and"
        )
        raise ConfigError(f"data.processor={source}: {text} data.std in its place")
    # In the middle, which no padding reaches
    low, high = black[:, height // 2, width // 2], white[:, height // 2, width // 2]
    # It maps a value v from 0 to 1 to (v - mean) / std: black, 0, to `low`, white, 1, to `high`.
    mean, std = (0 - low / (high - low)).tolist(), (1 / (high - low)).tolist()
    return Pixels((height, width), mean, std, found)


def write_processor(folder: Path, **settings: Any) -> None:  # noqa: ANN401 - as `pixels_of` has it
    """Write what makes the pixels into a folder of weights, as transformers reads it."""
    # transformers would read the pixels' settings there first.
    (folder / _NESTED).unlink(missing_ok=True)
    (folder / _PROCESSOR).write_text(pixels_of(**settings).to_json())
