"""A plain vision transformer, for images of any size that patches divide."""

from __future__ import annotations

import math
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config.components import Count
from trainer.core.errors import ConfigError
from trainer.models.check import required

# Longest wavelength of a position, in patches, over 2 pi
PERIOD = 10_000.0


@final
class ViT(nn.Module):
    """Classifies images cut into patches (Beyer et al. 2022, "Better plain ViT baselines").

    Positions are sines and cosines of row and column, and what is classified is the mean over
    patches, so that no weight depends on the size of an image.

    Args:
        num_classes: classes; None is as many as the data have.
        channels: of an image; None is as many as the data's have.
        patch_size: pixels of a patch's side.
        width: channels of the residual stream; a multiple of 4, and of `num_heads`.
        depth: blocks.
        num_heads: attention heads.

    Raises:
        ConfigError: a number is missing that the data do not have, or the width does not divide.
    """

    task = "image_classification"

    def __init__(
        self,
        num_classes: Count | None = None,
        channels: Count | None = None,
        patch_size: Count = 4,
        width: Count = 64,
        depth: Count = 4,
        num_heads: Count = 4,
    ) -> None:
        super().__init__()
        # A position has a sine and a cosine of row and of column
        each = math.lcm(4, num_heads)
        if width % each:
            raise ConfigError(
                f"model.width={width}: must be a multiple of 4 and of model.num_heads={num_heads}; "
                f"nearest: model.width={max(1, round(width / each)) * each}"
            )
        self.patches = nn.Conv2d(required("channels", channels), width, patch_size, patch_size)
        self.blocks = nn.ModuleList(EncoderBlock(width, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, required("num_classes", num_classes))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Map images, `(batch, channels, height, width)`, to logits, `(batch, classes)`.

        Raises:
            ConfigError: patches do not divide height and width.
        """
        size, patch = pixel_values.shape[2:], self.patches.kernel_size
        if any(side % each for side, each in zip(size, patch, strict=True)):
            raise ConfigError(
                f"model.patch_size={patch[0]}: does not divide images of {size[0]} x {size[1]} "
                "pixels; choose one that does, or another data.size"
            )
        grid = self.patches(pixel_values)
        x = grid.flatten(2).transpose(1, 2) + positions_of_grid(grid)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x.mean(1)))
        return logits


def positions_of_grid(grid: Tensor) -> Tensor:
    """Give sines and cosines of column and row, `(height * width, channels)`, for a grid."""
    _, channels, height, width = grid.shape
    rates = torch.arange(channels // 4, device=grid.device) / max(1, channels // 4 - 1)
    rates = (-math.log(PERIOD) * rates).exp()
    of_rows = torch.arange(height, device=grid.device)
    of_columns = torch.arange(width, device=grid.device)
    rows, columns = torch.meshgrid(of_rows, of_columns, indexing="ij")
    # A quarter of the channels each; computed in float32, which bf16 is too coarse for.
    x, y = columns.flatten()[:, None] * rates, rows.flatten()[:, None] * rates
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], 1).to(grid.dtype)


@final
class EncoderBlock(nn.Module):
    """Attention over all patches, then an MLP, each on the normalised stream and added to it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fused_matrices = {"qkv.weight": (width, width, width)}
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, patches, width)` to the same shape."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        # `(3, batch, heads, patches, channels of a head)`
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        y: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return y
