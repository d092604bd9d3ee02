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
from trainer.core.errors import DataError
from trainer.core.format import expanded, plural
from trainer.core.rows import Row, RunFacts, join_parts, row
from trainer.data.collate import LABELS
from trainer.data.files import RUNS, Listing, files_at, progress, reading
from trainer.data.samples import PIXEL_VALUES
from trainer.data.split import HELD_OUT, HELD_OUT_NAMES, TRAIN
from trainer.features.vision import pixels
from trainer.features.vision.augment import Augment


@final
class ImageFolders:
    """Images in a folder with a folder for each class: `path/cat/1.jpg`.

    Where `path` has a folder `train` with folders in it, that and the first there is of `val`,
    `valid`, `validation`, `dev`, `eval` and `test` are the two parts: `path/train/cat/1.jpg`.

    Args:
        path: the folder.
        size: pixels of a side, to which the shorter side is scaled and the centre cut.
        mean: what is subtracted from red, green and blue from 0 to 1.
        std: what is divided by then.
        augment: callables on an image from 0 to 1, which change those that are trained on.
        processor: folder of a preprocessor_config.json, or a name on the hub; None is that of the
            model, if it has one. It makes the pixels, unless size, mean or std are others than its
            own. Without one, they are 64 and ImageNet's where None.
        model_path: what the model is loaded from or configured by.
        label_names: the classes in the order of their numbers; None is the folders' order.

    Raises:
        ConfigError: numbers are missing for a channel, an augmentation is not callable, or the
            processor cannot be used.
        DataError: there are no classes, or one has no images.
    """

    def __init__(
        self,
        path: ExistingPath,
        size: Count | None = None,
        mean: PerChannel | None = None,
        std: PerChannel | None = None,
        augment: Augmentations = (),
        processor: ExistingPath | None = None,
        model_path: str | None = None,
        label_names: Sequence[str] | None = None,
    ) -> None:
        make = pixels.pixels_of(size, mean, std, processor, model_path)
        folder = expanded(path)
        with reading(folder):
            inner = _folders(folder)
            names = [name for name in (TRAIN, *HELD_OUT_NAMES) if name in inner]
            is_parted = TRAIN in names and bool(_folders(folder / TRAIN))
            for name in () if is_parted else inner:
                if name.lower() in {"training", *HELD_OUT_NAMES, TRAIN} and _folders(folder / name):
                    text = f"{name} looks like a part and would be a class: rename it, as to"
                    raise DataError(f"data.path={folder}: {text} train and val")
            self._parts = dict[str, ImageFiles]()
            for name in names[:2] if is_parted else [""]:
                part = ImageFiles(folder / name, make, augment, label_names)
                label_names = part.label_names
                self._parts[HELD_OUT if name in names[1:] else TRAIN] = part

    def splits(self) -> Mapping[str, ImageFiles]:
        """Give the parts."""
        return self._parts

    write_processor = staticmethod(pixels.write_processor)


@final
class ImageFiles(Dataset[dict[str, Tensor]]):
    """Images of one folder with a folder for each class; see `ImageFolders`."""

    draws_randomness = False

    def __init__(
        self,
        folder: Path,
        make: pixels.Pixels,
        augment: Sequence[object],
        label_names: Sequence[str] | None,
    ) -> None:
        with progress(f"listing the images of {folder}") as advance:
            listings = {}
            for name in _folders(folder):
                listings[name] = files_at(folder / name, pixels.is_image)
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
        self._others = sum((each.others for each in listings.values()), Counter[str]())
        for name in found:
            listing = listings[name]
            if not listing.files:
                others = (plural(count, noun) for noun, count in listing.others.items())
                text = f"no image of {', '.join(pixels.FORMATS)} ({join_parts(*others)})"
                raise DataError(
                    f"data.path={folder / name}: {text}; convert them, or remove the folder"
                )
            self._paths += listing.files
            labels += [self.label_names.index(name)] * len(listing.files)
            for path in listing.files:
                text = f"{path.relative_to(folder)}|{path.stat().st_size}|"
                digest.update(text.encode(errors="surrogateescape"))
        digest.update(make.to_json().encode() if make.processor else b"")
        self._labels, self._make = torch.tensor(labels), make
        self.augment = Augment(augment, make.mean, make.std) if augment else None
        self.lengths = np.broadcast_to(np.int64(1), (len(labels),))
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Give an image, `(3, height, width)` float32, and the number of its class."""
        image = self._make(pixels.open_image(self._paths[i]))
        return {PIXEL_VALUES: image, LABELS: self._labels[i]}

    def name_of(self, i: int) -> str:
        """Name an image by its file."""
        return str(self._paths[i])

    def describe_records(self, facts: RunFacts) -> Sequence[Row]:
        """Say what becomes of an image, and which files are none."""
        text = self._make.describe()
        return [row("", text, pixels=text), *Listing(others=self._others).describe()]


def _folders(folder: Path) -> list[str]:
    """List the folders in one, in order of their names."""
    return sorted(each.name for each in folder.iterdir() if each.is_dir() and each.name[0] != ".")
