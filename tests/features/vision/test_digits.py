"""The digits are images from 0 to 1 with their classes."""

import torch

from trainer.features.vision.digits import Digits


def test_every_digit_is_an_image_from_0_to_1_with_its_class():
    digits = Digits()
    samples = [digits[i] for i in range(len(digits))]
    assert len(samples) == len(digits.lengths) == 1797
    images = torch.stack([sample["pixel_values"] for sample in samples])
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    labels = torch.stack([sample["labels"] for sample in samples])
    assert labels.unique().tolist() == [*range(digits.num_classes)]
    assert len(digits.label_names) == digits.num_classes
