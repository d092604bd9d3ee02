"""Choose the kernel by which a model of transformers attends: one by documents of a packed row.

Its own `sdpa` scores every pair of positions of the row, and masks what lies in other documents.
On a CPU that is most of the time of a row of several thousand tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

BY_DOCUMENT = "sdpa_by_document"
"""Its name among the kernels of transformers."""
_OTHER = ("sliding_window", "softcap", "position_bias", "s_aux")
"""Arguments of an attention that is more than causal."""


def attend_by_document(module: nn.Module) -> Callable[[], None] | None:
    """Have a model attend so, and give what undoes it; None where its attention is another one."""
    config: Any = getattr(module, "config", None)
    is_plain = getattr(config, "_attn_implementation", None) == "sdpa" and not config.sub_configs
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    kinds = {*(getattr(config, "layer_types", None) or ())}
    if not is_plain or any(windows) or kinds - {"full_attention"}:
        return None
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415
    from transformers.masking_utils import sdpa_mask  # noqa: PLC0415

    AttentionInterface.register(BY_DOCUMENT, _attend)
    AttentionMaskInterface.register(BY_DOCUMENT, sdpa_mask)
    with suppress(RuntimeError):
        _choose(BY_DOCUMENT, module)
        return partial(_choose, "sdpa", module)
    return None


def kernels_of(module: nn.Module) -> Mapping[str, Callable[[nn.Module], None]]:
    """Give what has a model, or a copy of it, attend by each kernel that needs no other library."""
    if not hasattr(module, "set_attn_implementation"):
        return {}
    return {f"attn_implementation={name}": partial(_choose, name) for name in ("eager", "sdpa")}


def _choose(name: str, module: Any) -> None:  # noqa: ANN401 - of an untyped library
    module.set_attn_implementation(name)
    # transformers warns, and keeps the kernel, where a model does not take the one chosen.
    if module.config._attn_implementation != name:
        raise RuntimeError(f"{type(module).__name__} has no {name}")


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,  # noqa: ANN401 - as transformers passes them on
) -> tuple[Tensor, None]:
    """Attend within each document, `(1, heads, time, head_dim)` to `(1, time, heads, head_dim)`.

    A row whose bounds are not given or do not fill it, and a fake one, is left to the mask.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: PLC0415

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        attended: Tensor = sdpa_attention_forward(module, query, key, value, mask, **options)[0]
        return attended

    bounds: Tensor | None = options.get("cu_seq_lens_q")
    lengths = list[int]()
    if bounds is not None and not is_fake(bounds):
        lengths = [*filter(None, bounds.diff().tolist())]
    is_plain = all(options.get(name) is None for name in _OTHER)
    if not is_plain or sum(lengths) != query.shape[2] or sum(lengths) != key.shape[2]:
        return attend(query, key, value, attention_mask), None
    queries, keys = torch.split(query, lengths, dim=2), torch.split(key, lengths, dim=2)
    pieces = zip(queries, keys, torch.split(value, lengths, dim=2), strict=True)
    return torch.cat([attend(*piece, None) for piece in pieces], dim=1), None
