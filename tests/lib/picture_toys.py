"""Draw digits into a folder with a folder for each class, and save what processes images."""

from pathlib import Path

import numpy as np
import transformers
from PIL import Image


def draw_pictures(folder: Path, count: int = 60) -> None:
    """Write the first digits of scikit-learn, enlarged to 16 x 16: `folder/7/7-13.png`."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - a second

    digits = load_digits()
    for i in range(count):
        path = folder / str(digits.target[i]) / f"{digits.target[i]}-{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[i] * (255 / 16)).astype(np.uint8).repeat(2, 0).repeat(2, 1)
        Image.fromarray(pixels).save(path)


def save_processor(folder: Path, side: int = 20, **settings: list[float]) -> Path:
    """Write the preprocessor_config.json of a ViT."""
    size = {"height": side, "width": side}
    transformers.ViTImageProcessorPil(size=size, **settings).save_pretrained(folder)
    return folder


def save_vit(folder: Path, side: int = 20, **settings: list[float]) -> None:
    """Write a ViT of one layer with random weights, and what processes its images."""
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes = small | {"num_attention_heads": 2, "image_size": side, "patch_size": 10}
    config = transformers.ViTConfig(**sizes)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    save_processor(folder, side, **settings)
