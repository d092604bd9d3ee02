"""Change the images that are trained on, by callables of torchvision or one's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from trainer.core.errors import ConfigError
from trainer.data.samples import PIXEL_VALUES, Sample


@final
class Augment:
    """Applies callables to the image of a sample, one after the other.

    The loader seeds PyTorch, NumPy and Python for each sample and epoch before it asks: what a
    callable draws from them is the same for every cut, rank, worker and resumption. A callable
    takes an image, `(channels, height, width)` from 0 to 1, and gives one. `mean` and `std` are
    what was subtracted from it, by channel, and what it was divided by then.
    """

    def __init__(
        self, transforms: Sequence[Any], mean: Sequence[float] = (0,), std: Sequence[float] = (1,)
    ) -> None:
        if isinstance(transforms, str):
            transforms = [transforms]
        self._transforms: list[Callable[[Tensor], Tensor]] = []
        for each in transforms:
            # A class that is named without arguments is still to be built.
            transform = each
            if isinstance(each, partial) and inspect.isclass(each.func):
                transform = each()
            if not callable(transform):
                raise ConfigError(
                    f"data.augment: {transform!r} is not callable; name a class, e.g. "
                    "{_target_: torchvision.transforms.v2.RandomHorizontalFlip}"
                )
            self._transforms.append(transform)
        # Over rows and columns; of one number it is that of all channels.
        self._mean = torch.tensor(mean)[:, None, None]
        self._std = torch.tensor(std)[:, None, None]

    def __call__(self, sample: Sample) -> dict[str, Any]:
        """Give the sample with its image changed, with the mean and deviation that it had."""
        image = (sample[PIXEL_VALUES] * self._std + self._mean).clamp(0, 1)
        for transform in self._transforms:
            image = transform(image)
        return {**sample, PIXEL_VALUES: (image - self._mean) / self._std}
