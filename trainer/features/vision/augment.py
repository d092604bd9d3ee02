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
        transforms = [transforms] if isinstance(transforms, str) else transforms
        transforms = [each() if _is_bound_class(each) else each for each in transforms]
        if odd := [each for each in transforms if not callable(each)]:
            raise ConfigError(
                f"data.augment: {odd[0]!r} is not callable; name a class, e.g. "
                "{_target_: torchvision.transforms.v2.RandomHorizontalFlip}"
            )
        self._transforms: Sequence[Callable[[Tensor], Tensor]] = transforms
        self._mean, self._std = (torch.tensor(each)[:, None, None] for each in (mean, std))

    def __call__(self, sample: Sample) -> dict[str, Any]:
        """Give the sample with its image changed, with the mean and deviation that it had."""
        image = (sample[PIXEL_VALUES] * self._std + self._mean).clamp(0, 1)
        for transform in self._transforms:
            image = transform(image)
        return {**sample, PIXEL_VALUES: (image - self._mean) / self._std}


def _is_bound_class(each: object) -> bool:
    """Whether it is a class, bound as a name alone is, that is still to be built."""
    return isinstance(each, partial) and inspect.isclass(each.func)
