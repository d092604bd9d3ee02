"""A decoder-only transformer, readable from top to bottom.

Two families from one set of blocks: the modern one (rotary positions, RMSNorm, SwiGLU, no biases)
and, by options, GPT-2 (learned positions, LayerNorm, GELU, biases).
"""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config.components import Count, Natural, Positive, Share
from trainer.core.errors import ConfigError
from trainer.models.attention import Documents, causal_attention, computed_in, has_varlen_kernel

Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines, each `(batch or 1, time, 1, 1, head_dim)`."""


@final
class GPT(nn.Module):
    """Predicts the next token from the tokens before it.

    Samples are padded on the right. Under causal attention no token looks to its right, so no
    real position ever sees padding and no mask is needed; what is computed at padded positions
    is ignored by the objective. What the arguments mean stands in `conf/model/gpt_tiny.yaml`.
    """

    draws_on_meta: ClassVar[bool] = True
    """Whether the constructor draws on the meta device what it draws on the CPU."""
    logits_from_output_layer: ClassVar[bool] = True
    """Whether `forward` gives what `get_output_embeddings` gives, and nothing else."""

    def __init__(  # noqa: PLR0913 - the shape of a transformer has this many numbers
        self,
        vocab_size: Count = 258,
        width: Count = 96,
        num_layers: Natural = 2,
        num_heads: Count = 3,
        max_length: Count = 256,
        mlp_width: Count | None = None,
        dropout: Share = 0.0,
        *,
        tied: bool = False,
        norm: Literal["rms", "layer"] = "rms",
        mlp: Literal["swiglu", "gelu"] = "swiglu",
        positions: Literal["rotary", "learned"] = "rotary",
        bias: bool = False,
        init_std: Positive | None = None,
    ) -> None:
        super().__init__()
        _refuse_uneven_heads(width, num_heads, is_rotary=positions == "rotary")
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.head_dim = width // num_heads
        self.embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = None
        if positions == "learned":
            self.position_embedding = nn.Embedding(max_length, width)
        self.dropout = nn.Dropout(dropout)
        make_norm = nn.RMSNorm if norm == "rms" else partial(nn.LayerNorm, bias=bias)
        make_mlp = SwiGLU if mlp == "swiglu" else GELU
        self.blocks = nn.ModuleList(
            Block(
                make_norm(width),
                Attention(width, num_heads, dropout, bias=bias),
                make_norm(width),
                make_mlp(width, mlp_width, bias=bias),
                dropout,
            )
            for _ in range(num_layers)
        )
        self.norm = make_norm(width)
        self.head = TiedHead(self.embedding) if tied else nn.Linear(width, vocab_size, bias=False)
        self.init_weights(init_std)

    @torch.no_grad()
    def init_weights(self, std: float | None = None) -> None:
        """Draw fresh weights from the default generator, in the order of the modules.

        Normal; with a deviation of `std` everywhere, or of `1 / sqrt(fan_in)`, which keeps the
        variance of what passes through (LeCun et al. 1998, eq. 16). A look-up is a product with
        a one-hot vector, so an embedding has a fan-in of one; tied, it counts as the output layer.
        Layers that write into the residual stream are smaller by the root of their number, so
        that its variance does not grow with depth (Radford et al. 2019, section 2.3).
        """
        depth_scale = 1.0 / math.sqrt(2 * max(1, len(self.blocks)))
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                is_gain = not name.endswith("bias")
                nn.init.constant_(parameter, float(is_gain))
                continue
            is_lookup = name == "position_embedding.weight" or (
                name == "embedding.weight" and isinstance(self.head, nn.Linear)
            )
            fan_in = parameter.shape[1]
            if is_lookup:
                fan_in = 1
            own = std or 1.0 / math.sqrt(fan_in)
            if name.endswith(("attention.out.weight", "mlp.out.weight")):
                own *= depth_scale
            nn.init.normal_(parameter, std=own)

    def has_packed_kernel(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether one kernel takes all documents of a packed row; `accum.packed=auto` asks."""
        return has_varlen_kernel(device, dtype, self.head_dim, self.dropout.p)

    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Score the next token at every position: `(batch, time)` to logits, `(.., .., vocab)`.

        Where documents are packed into one row, `cu_seqlens`, `(documents + 1,)`, says where each
        begins, and the end of the last; none sees another. `max_seqlen` is the longest's tokens,
        where they fill the row. Positions count from the start of each document.
        """
        time = input_ids.shape[1]
        longest = max_seqlen or time
        if longest > self.max_length and (cu_seqlens is None or max_seqlen):
            raise ConfigError(
                f"model.max_length: {self.max_length} is less than the {longest} tokens of a "
                f"sample; raise it to {longest}, or type data.max_length={self.max_length}"
            )
        dtype = computed_in(self.embedding.weight)
        documents = None
        if cu_seqlens is not None:
            dropout = self.dropout.p if self.training else 0.0
            has_kernel = has_varlen_kernel(input_ids.device, dtype, self.head_dim, dropout)
            documents = Documents(cu_seqlens, time, max_seqlen, has_kernel=has_kernel)
        if position_ids is None:
            position_ids = torch.arange(time, device=input_ids.device)[None]
            if documents is not None:
                position_ids = documents.positions(position_ids)

        x = self.embedding(input_ids)
        rotation = None
        if self.position_embedding is None:
            rotation = rotary_tables(position_ids, self.head_dim, dtype)
        else:
            x = x + self.position_embedding(position_ids)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, rotation, documents)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def get_output_embeddings(self) -> nn.Linear | TiedHead:
        """Give the layer whose outputs are the logits, as Hugging Face's models do."""
        return self.head


@final
class TiedHead(nn.Module):
    """The output layer whose weight is the embedding's; it has no parameters of its own."""

    bias = None
    is_matrix_product = True  # see models/output_layer.py

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        # In a tuple it is no submodule, which would give its weight a second name.
        self._embedding = (embedding,)

    @property
    def weight(self) -> Tensor:
        """`(vocab, width)`."""
        return self._embedding[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., width)` to `(..., vocab)`."""
        return F.linear(x, self.weight)


@final
class Block(nn.Module):
    """Attention, then MLP, each on the normalised stream and added to it."""

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: Attention,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotation: Rotation | None, documents: Documents | None) -> Tensor:
        """Map `(batch, time, width)` to the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation, documents))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


@final
class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, num_heads: int, dropout: float, *, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.fused_matrices = {"qkv.weight": (width, width, width)}
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, rotation: Rotation | None, documents: Documents | None) -> Tensor:
        """Map `(batch, time, width)` to the same shape."""
        # Split to (batch, time, 3, heads, head_dim), the 3 being query, key and value.
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        if rotation is None:
            q, k, v = qkv.unbind(2)
        else:
            qk, value = qkv.split([2, 1], dim=2)
            cos, sin = (table.to(qk.dtype) for table in rotation)
            # Turns channel pairs (i, i + head_dim / 2). One roll with the sign in the sine table
            # runs in two thirds of the time of splitting halves.
            qk = qk * cos + qk.roll(qk.shape[-1] // 2, dims=-1) * sin
            (q, k), v = qk.unbind(2), value.squeeze(2)
        dropout = self.dropout if self.training else 0.0
        attend = causal_attention if documents is None else documents.attention
        out: Tensor = self.out(attend(q, k, v, dropout).flatten(2))
        return out


@final
class SwiGLU(nn.Module):
    """`out(silu(gate(x)) * up(x))`, gate and up in one product (Shazeer 2020, 2002.05202)."""

    def __init__(self, width: int, hidden: int | None, *, bias: bool) -> None:
        super().__init__()
        # Three matrices of 8/3 of the width cost what GELU's two of 4 times it do.
        hidden = hidden or -(-8 * width // (3 * 32)) * 32
        self.gate_up = nn.Linear(width, 2 * hidden, bias=bias)
        self.fused_matrices = {"gate_up.weight": (hidden, hidden)}
        self.out = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., width)` to the same shape."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.out(F.silu(gate) * up)
        return out


@final
class GELU(nn.Module):
    """`out(gelu(up(x)))` with GPT-2's tanh approximation."""

    def __init__(self, width: int, hidden: int | None, *, bias: bool) -> None:
        super().__init__()
        hidden = hidden or 4 * width
        self.up = nn.Linear(width, hidden, bias=bias)
        self.out = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., width)` to the same shape."""
        out: Tensor = self.out(F.gelu(self.up(x), approximate="tanh"))
        return out


def rotary_tables(position_ids: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation:
    """Compute the angles of rotary position embedding (Su et al. 2021, 2104.09864, eq. 15).

    Computed at every forward, in at least single precision: a buffer would be rounded by
    `.to(bfloat16)`, lost by `to_empty` after the meta device, and saved in checkpoints. Gives
    cosines and signed sines, each `(batch, time, 1, 1, head_dim)`, rounded to `dtype` once for all
    layers.
    """
    precise = torch.promote_types(dtype, torch.float32)
    pair = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=precise)
    angles = position_ids[..., None] * torch.pow(10_000.0, -pair / head_dim)
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    cos, sin = (table.to(dtype)[:, :, None, None] for table in tables)
    return cos, sin


def _refuse_uneven_heads(width: int, num_heads: int, *, is_rotary: bool) -> None:
    """Refuse a width that heads cannot share, and name the nearest sizes that they can.

    Rotary positions turn pairs of channels, so that a head has an even number of them.
    """
    step, what_for = 1, ""
    if is_rotary:
        step, what_for = 2, " of even size, as rotary positions need"
    if width % (num_heads * step) == 0:
        return
    # One head does, if any number, so the nearest is less than twice as many; the smaller of two.
    fits = [n for n in range(1, min(2 * num_heads, width, 1024) + 1) if width % (n * step) == 0]
    near = min(fits, key=lambda n: abs(n - num_heads), default=None)
    other = f" or model.num_heads={near}" if near is not None else ""
    # The nearest width of which every head has as much, and at least one step of it
    width_near = max(1, round(width / num_heads / step)) * num_heads * step
    raise ConfigError(
        f"model.width, model.num_heads: width {width} cannot be split over {num_heads} heads"
        f"{what_for}; nearest: model.width={width_near}{other}"
    )
