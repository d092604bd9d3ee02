"""Read images from a folder with a folder for each class, or any folder where none is asked for."""

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
from trainer.data.lines import name_below
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
        learns: without it all images at the path are read, whatever their folders are.

    Raises:
        ConfigError: numbers are missing for a channel, an augmentation is not callable, or the
            processor cannot be used.
        DataError: there are no classes, or one has no images.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the keys of `data`
        self,
        path: ExistingPath,
        size: Count | None = None,
        mean: PerChannel | None = None,
        std: PerChannel | None = None,
        augment: Augmentations = (),
        processor: ExistingPath | None = None,
        model_path: str | None = None,
        label_names: Sequence[str] | None = None,
        learns: bool = True,
    ) -> None:
        make = pixels.pixels_of(size, mean, std, processor, model_path)
        folder = expanded(path)
        self._parts = dict[str, Dataset[dict[str, Tensor]]]()
        if not learns:
            self._parts[TRAIN] = LooseImages(folder, make)
            return
        with reading(folder):
            inner = _folders(folder)
            parts = {TRAIN: folder}
            if TRAIN in inner and _folders(folder / TRAIN):
                parts = {TRAIN: folder / TRAIN}
                for name in HELD_OUT_NAMES:
                    if name in inner:
                        parts[HELD_OUT] = folder / name
                        break
            else:
                _refuse_parts(folder, inner)
            for side, place in parts.items():
                part = ImageFiles(place, make, augment, label_names)
                # The classes of training count for both
                label_names = part.label_names
                self._parts[side] = part

    def splits(self) -> Mapping[str, Dataset[dict[str, Tensor]]]:
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
        found, self._others = _listed(folder)
        self.label_names = [*(label_names or found)]
        self.num_classes = len(self.label_names)
        if self.num_classes == 1:
            text = "the only class; name the folder that has a folder for each"
            raise DataError(f"data.path={folder}: {next(iter(found))} is {text}")
        for name in found:
            if name not in self.label_names:
                known = ", ".join(self.label_names[:20])
                raise DataError(f"data: {folder / name}: no class of the training data ({known})")
        self._paths, labels, digest = list[Path](), list[int](), hashlib.sha256()
        for name, listing in found.items():
            if not listing.files:
                others = (plural(count, noun) for noun, count in listing.others.items())
                text = f"no image of {', '.join(pixels.FORMATS)} ({join_parts(*others)})"
                raise DataError(
                    f"data.path={folder / name}: {text}; convert them, or remove the folder"
                )
            self._paths += listing.files
            labels += [self.label_names.index(name)] * len(listing.files)
            # Size and not content: reading every image would cost minutes before the first step.
            for path in listing.files:
                text = f"{path.relative_to(folder)}|{path.stat().st_size}|"
                digest.update(text.encode(errors="surrogateescape"))
        if make.processor:
            digest.update(make.to_json().encode())
        self._labels, self._make = torch.tensor(labels), make
        self.augment: Augment | None = None
        if augment:
            self.augment = Augment(augment, make.mean, make.std)
        # An image counts as one token, without memory for each.
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


@final
class LooseImages(Dataset[dict[str, Tensor]]):
    """All images of a folder and those below it, or one image, without classes."""

    draws_randomness = False

    def __init__(self, folder: Path, make: pixels.Pixels) -> None:
        with reading(folder), progress(f"listing the images of {folder}"):
            self._listing = files_at(folder, pixels.is_image, "images")
        if not self._listing.files:
            text = f"no image of {', '.join(pixels.FORMATS)}"
            raise DataError(f"data.path={folder}: {text}; name a folder that holds some")
        self._folder, self._paths, self._make = folder, self._listing.files, make
        self.lengths = np.broadcast_to(np.int64(1), (len(self._paths),))
        digest = hashlib.sha256(make.describe().encode())
        for i, path in enumerate(self._paths):
            text = f"{self.name_of(i)}|{path.stat().st_size}|"
            digest.update(text.encode(errors="surrogateescape"))
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Give an image, `(3, height, width)` float32."""
        try:
            image = pixels.open_image(self._paths[i])
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"data: {self.name_of(i)}: {pixels.image_fault(error)}") from error
        return {PIXEL_VALUES: self._make(image)}

    def collate(self, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Stack images; so none is looked at before its turn, as it may be broken."""
        return {PIXEL_VALUES: torch.stack([sample[PIXEL_VALUES] for sample in samples])}

    def name_of(self, i: int) -> str:
        """Name an image by its file, below the folder."""
        return name_below(self._paths[i], self._folder)

    def describe_records(self, facts: RunFacts) -> Sequence[Row]:
        """Say what becomes of an image, and which files are none."""
        text = self._make.describe()
        return [row("", text, pixels=text), *self._listing.describe()]


def _listed(folder: Path) -> tuple[dict[str, Listing], Counter[str]]:
    """List the images of each class, and count what was passed over in all folders."""
    classes, others = dict[str, Listing](), Counter[str]()
    with progress(f"listing the images of {folder}") as advance:
        for name in _folders(folder):
            listing = files_at(folder / name, pixels.is_image)
            others += listing.others
            # A folder of nothing but runs, such as `outputs`, is no class.
            # One without any file stays, to be refused by its name.
            if listing.files or not listing.others[RUNS]:
                classes[name] = listing
            advance()
    if not classes:
        text = "holds no folder for each class, such as cat/ and dog/ with images in them"
        raise DataError(f"data.path={folder}: {text}")
    return classes, others


def _folders(folder: Path) -> list[str]:
    """List the folders in one, in order of their names."""
    names = list[str]()
    for each in folder.iterdir():
        if each.is_dir() and not each.name.startswith("."):
            names.append(each.name)
    return sorted(names)


def _refuse_parts(folder: Path, inner: Sequence[str]) -> None:
    """Refuse folders that would be classes and look like parts, as one without `train` does."""
    for name in inner:
        if name.lower() in {"training", *HELD_OUT_NAMES, TRAIN} and _folders(folder / name):
            text = f"{name} looks like a part and would be a class: rename it, as to"
            raise DataError(f"data.path={folder}: {text} train and val")
