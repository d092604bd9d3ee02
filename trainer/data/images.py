"""Read images from a folder with a folder for each class."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.config.components import Augmentations, Count, ExistingPath, PerChannel
from trainer.core.errors import ConfigError, DataError
from trainer.core.format import expanded
from trainer.core.rows import Row, RunFacts
from trainer.data.augment import Augment
from trainer.data.collate import LABELS
from trainer.data.files import RUNS, Listing, files_at, progress, reading
from trainer.data.samples import HELD_OUT, HELD_OUT_NAMES, PIXEL_VALUES, TRAIN

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of red, green and blue from 0 to 1, which most pretrained models expect."""


@final
class ImageFolders:
    """Images in a folder with a folder for each class: `path/cat/1.jpg`.

    Where `path` has a folder `train` with folders in it, that and the first there is of `val`,
    `valid`, `validation`, `dev`, `eval` and `test` are the two parts: `path/train/cat/1.jpg`.

    Args:
        path: the folder.
        size: pixels of a side. The shorter side of an image is scaled to it, and the centre cut.
        mean: what is subtracted from red, green and blue from 0 to 1.
        std: what is divided by then.
        augment: callables on an image from 0 to 1, which change those that are trained on.
        label_names: the classes in the order of their numbers; None is the folders' order.

    Raises:
        ConfigError: numbers are missing for a channel, or an augmentation is not callable.
        DataError: there are no classes, or no images.
    """

    def __init__(
        self,
        path: ExistingPath,
        size: Count = 64,
        mean: PerChannel = IMAGENET_MEAN,
        std: PerChannel = IMAGENET_STD,
        augment: Augmentations = (),
        label_names: Sequence[str] | None = None,
    ) -> None:
        for name, numbers in (("mean", mean), ("std", std)):
            if len(numbers) != len(IMAGENET_MEAN) or (name == "std" and min(numbers) <= 0):
                text = "needs a number each for red, green and blue, of std above 0"
                raise ConfigError(f"data.{name}={[*numbers]}: {text}")
        folder = expanded(path)
        with reading(folder):
            inner = _folders(folder)
            names = [name for name in (TRAIN, *HELD_OUT_NAMES) if name in inner]
            is_parted = TRAIN in names and bool(_folders(folder / TRAIN))
            if not is_parted:
                _refuse_parts(folder, inner)
            self._parts = dict[str, ImageFiles]()
            for name in names[:2] if is_parted else [""]:
                part = ImageFiles(folder / name, size, mean, std, augment, label_names)
                label_names = part.label_names
                self._parts[HELD_OUT if name in names[1:] else TRAIN] = part

    def splits(self) -> Mapping[str, ImageFiles]:
        """Give the parts."""
        return self._parts


@final
class ImageFiles(Dataset[dict[str, Tensor]]):
    """Images of one folder with a folder for each class; see `ImageFolders`."""

    draws_randomness = False

    def __init__(
        self,
        folder: Path,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Sequence[object],
        label_names: Sequence[str] | None,
    ) -> None:
        with progress(f"listing the images of {folder}") as advance:
            listings = {}
            for name in _folders(folder):
                listings[name] = files_at(folder / name, lambda f: f.suffix.lower() in SUFFIXES)
                advance()
        # A folder of nothing but runs, such as `outputs`, is no class.
        found = [name for name, each in listings.items() if each.files or not each.others[RUNS]]
        if not found:
            text = "holds no folder for each class, such as cat/ and dog/ with images in them"
            raise DataError(f"data.path={folder}: {text}")
        self.label_names = [*(label_names or found)]
        self.num_classes = len(self.label_names)
        if self.num_classes == 1:
            text = "the only class; name the folder that has a folder for each"
            raise DataError(f"data.path={folder}: {found[0]} is {text}")
        if odd := [name for name in found if name not in self.label_names]:
            known = ", ".join(self.label_names[:20])
            raise DataError(f"data: {folder / odd[0]}: no class of the training data ({known})")
        self._paths, labels, digest = list[Path](), list[int](), hashlib.sha256()
        for name in found:
            self._paths += (paths := listings[name].files)
            labels += [self.label_names.index(name)] * len(paths)
            for path in paths:
                text = f"{path.relative_to(folder)}|{path.stat().st_size}|"
                digest.update(text.encode(errors="surrogateescape"))
        self._others = sum((Counter(each.others) for each in listings.values()), Counter[str]())
        if not self._paths:
            raise DataError(f"data.path={folder}: no images ({', '.join(sorted(SUFFIXES))})")
        self._labels = torch.tensor(labels)
        self._size = size
        self._mean, self._std = (torch.tensor([*each])[:, None, None] for each in (mean, std))
        self.augment = Augment(augment, mean, std) if augment else None
        self.lengths = np.broadcast_to(np.int64(1), (len(labels),))
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Give an image, `(3, size, size)` float32, and the number of its class."""
        from PIL import Image, ImageOps  # noqa: PLC0415 - for images alone

        with Image.open(self._paths[i]) as image:
            if image.mode[0] in "IF":  # which becomes white beyond 255 in RGB
                raise ValueError(
                    f"its pixels have more than 8 bits (mode {image.mode}); convert it"
                )
            upright = ImageOps.exif_transpose(image).convert("RGB")
        pixels = np.array(
            ImageOps.fit(upright, (self._size, self._size), Image.Resampling.BILINEAR)
        )
        scaled = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
        return {PIXEL_VALUES: (scaled - self._mean) / self._std, LABELS: self._labels[i]}

    def describe_records(self, facts: RunFacts) -> Sequence[Row]:
        """Say what of the folder was passed over."""
        return Listing(others=self._others).describe()

    def name_of(self, i: int) -> str:
        """Name an image by its file."""
        return str(self._paths[i])


def _refuse_parts(folder: Path, classes: Sequence[str]) -> None:
    """Refuse classes that are parts by their names, and hold classes themselves."""
    parts = {TRAIN, "training", *HELD_OUT_NAMES}
    for name in classes:
        if name.lower() in parts and _folders(folder / name):
            text = f"{name} looks like a part and would be a class: rename it, as to"
            raise DataError(f"data.path={folder}: {text} train and val")


def _folders(folder: Path) -> list[str]:
    """List the folders in one, in order of their names."""
    return sorted(each.name for each in folder.iterdir() if each.is_dir() and each.name[0] != ".")
