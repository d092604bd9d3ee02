"""A residual network with BatchNorm, for images of any size."""

from __future__ import annotations

from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config.components import Count
from trainer.models.check import required


@final
class ResNet(nn.Module):
    """Classifies images (He et al. 2016, with the small first layer that they use for CIFAR).

    Every stage halves height and width and doubles the channels. `width=64 depth=2 stages=4
    stride=4` is about their ResNet-18 for photographs.

    Args:
        num_classes: classes; None is as many as the data have.
        channels: of an image; None is as many as the data's have.
        width: channels of the first stage.
        depth: blocks of each stage, of two convolutions each.
        stages: of blocks.
        stride: of the first convolution.

    Raises:
        ConfigError: a number is missing that the data do not have.
    """

    task = "image_classification"

    def __init__(
        self,
        num_classes: Count | None = None,
        channels: Count | None = None,
        width: Count = 32,
        depth: Count = 1,
        stages: Count = 3,
        stride: Count = 1,
    ) -> None:
        super().__init__()
        channels = required("channels", channels)
        # The kernel is wider than the stride, so that every pixel counts. A norm behind a
        # convolution takes off any bias.
        self.stem = nn.Conv2d(channels, width, 2 * stride + 1, stride, stride, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        widths = list[int]()
        for stage in range(stages):
            widths += [width * 2**stage] * depth
        before = [width, *widths]
        self.blocks = nn.ModuleList(map(ResidualBlock, before, widths))
        self.head = nn.Linear(widths[-1], required("num_classes", num_classes))
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                # Keeps the size of gradients through ReLU (He et al. 2015, 1502.01852).
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Map images, `(batch, channels, height, width)`, to logits, `(batch, classes)`."""
        x = self.stem_norm(self.stem(pixel_values)).relu()
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


@final
class ResidualBlock(nn.Module):
    """Two convolutions whose result is added to what they get; more channels halve the image."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        stride = 1 if channels == width else 2
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.stride, self.added = stride, width - channels

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, channels, height, width)` to as many, or to half the size, of `width`."""
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        # Without weights of its own: every second pixel, and channels of zeros (He et al., 4.2).
        x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        return F.relu(x + y)
