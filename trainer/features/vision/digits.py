"""Give handwritten digits, small real images that come with scikit-learn and need no download."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.config.components import Augmentations
from trainer.data.collate import LABELS
from trainer.data.samples import PIXEL_VALUES
from trainer.features.vision.augment import Augment


@final
class Digits(Dataset[dict[str, Tensor]]):
    """The 1,797 digits of scikit-learn, 8 x 8 pixels of one channel.

    `pixel_values` are `(1, 8, 8)` float32 from 0 to 1, `labels` the digit. They are the test part
    of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998, UCI).
    """

    draws_randomness = False
    num_classes = 10
    label_names = tuple("0123456789")

    def __init__(self, augment: Augmentations = ()) -> None:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped] # noqa: PLC0415 - for this data alone

        self.augment = Augment(augment) if augment else None
        digits = load_digits()
        # scikit-learn's pixels are from 0 to 16; `(samples, 1, 8, 8)`.
        self._images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
        self._labels = torch.tensor(digits.target)
        self.lengths = np.broadcast_to(np.int64(1), (len(digits.target),))

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Give an image and its class."""
        return {PIXEL_VALUES: self._images[i], LABELS: self._labels[i]}
