"""Attend to the left, within samples or within documents that are packed into one row."""

from __future__ import annotations

import inspect
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from trainer.core import gpu

# Some releases of PyTorch take a flag, others a window that has no right side.
_CAUSAL: dict[str, Any] = (
    {"is_causal": True}
    if "is_causal" in inspect.signature(varlen_attn).parameters
    else {"window_size": (-1, 0)}
)

# Of a head, in FlashAttention 2.
MOST_CHANNELS = 256
# In tokens. The probabilities of longer documents are too large to save.
SHORT, BLOCK = 1024, 256


@final
class Documents:
    """Documents laid end to end in one row of length `time`.

    `cu_seqlens`, `(documents + 1,)`, says where each begins, and the end of the last. Where the
    `longest` is not known, positions after the last document form one of their own. One kernel that
    attends within all documents leaves what lies beyond `longest` in a document uninitialised.
    """

    def __init__(
        self, cu_seqlens: Tensor, time: int, longest: int | None, *, has_kernel: bool
    ) -> None:
        if longest is None:
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_full((1,), time)])
        self.bounds = cu_seqlens.to(torch.int32)
        self.longest = time if longest is None else longest
        self.has_kernel = has_kernel
        self.lengths: list[int] = []
        if not has_kernel and not torch.compiler.is_compiling():
            # Waits for the device. There are no empty documents but behind the last.
            self.lengths = [*filter(None, self.bounds.diff().tolist())]

    def positions(self, row: Tensor) -> Tensor:
        """Turn positions in the row, `(1, time)`, into positions within the document."""
        return row - self.bounds[torch.bucketize(row, self.bounds[1:-1], right=True)]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Attend within each document, `(1, time, heads, head_dim)` to the same shape."""
        if self.has_kernel:
            bounds, most = self.bounds, self.longest
            return varlen_attn(q[0], k[0], v[0], bounds, bounds, most, most, **_CAUSAL)[None]  # type: ignore[call-overload] # without return_aux
        if torch.compiler.is_compiling():
            # One graph for all lengths, at the cost of a score for every pair of the row.
            return causal_attention(q, k, v, dropout, self.mask(q.shape[1]))
        pieces = zip(*(torch.split(x, self.lengths, dim=1) for x in (q, k, v)), strict=True)
        return torch.cat([causal_attention(q, k, v, dropout) for q, k, v in pieces], dim=1)

    def mask(self, time: int) -> Tensor:
        """Mark what each position sees, `(time, time)`."""
        index = torch.arange(time, device=self.bounds.device, dtype=torch.int32)
        document = torch.bucketize(index, self.bounds, right=True)
        return (document[:, None] == document) & (index[:, None] >= index)


def computed_in(weight: Tensor) -> torch.dtype:
    """Give the dtype of matrix products with a weight, which autocast may have narrowed."""
    kind = weight.device.type
    if weight.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


def has_varlen_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float
) -> bool:
    """Whether PyTorch's variable-length attention, a flash kernel without dropout, takes these.

    A GPU that is planned for and not here is taken for one that has it.
    """
    is_half = dtype in {torch.float16, torch.bfloat16}
    is_taken = is_half and head_dim % 8 == 0 and head_dim <= MOST_CHANNELS and not dropout
    return gpu.is_gpu(device) and is_taken and _has_flash(device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator] # untyped in torch
def _has_flash(device: torch.device) -> bool:
    is_built = torch.backends.cuda.is_flash_attention_available
    return gpu.has_capability(device, 8, 0) and (is_built() or not gpu.backend().is_available())


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Tensor | None = None
) -> Tensor:
    """Attend to the left, or as masked, `(batch, time, heads, head_dim)` to the same shape."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    is_slow = q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] <= SHORT
    if is_slow and mask is None and not dropout and not torch.compiler.is_compiling():
        return _by_blocks(q, k, v).transpose(1, 2)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
    ).transpose(1, 2)


def _by_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend by products, which bf16 speeds up on a CPU; PyTorch's flash kernel it does not."""
    # Scores are scaled on the side of the queries, which are fewer numbers than the scores.
    queries, keys, values = (x.flatten(0, 1) for x in (q * q.shape[-1] ** -0.5, k, v))
    mask, blocks = q.new_full((q.shape[2], q.shape[2]), -torch.inf).triu(1), []
    for start in range(0, q.shape[2], BLOCK):
        end = start + BLOCK
        scores = torch.baddbmm(mask[start:end, :end], queries[:, start:end], keys[:, :end].mT)
        blocks.append(scores.softmax(-1) @ values[:, :end])
    return torch.cat(blocks, dim=1).view_as(q)
