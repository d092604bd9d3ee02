"""Say which weights of Hugging Face models are several matrices, or lie transposed."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainer.models.fused import FusedMatrix


def known_fused(module: nn.Module) -> dict[str, FusedMatrix]:
    """Give those that are known by the names of layers, by the name of the parameter."""
    found = dict[str, FusedMatrix]()
    for path, owner in module.named_modules():
        for name, layer in owner.named_children():
            if (each := _fused(name, layer, owner)) is not None:
                found[f"{path}.{name}.weight".removeprefix(".")] = each
    return found


def _fused(name: str, layer: Any, owner: Any) -> FusedMatrix | None:  # noqa: ANN401 - of any class
    kind = type(owner).__name__
    if type(layer).__name__ == "Conv1D":  # GPT-2's layer: `(inputs, outputs)`
        inputs, outputs = layer.weight.shape
        # Query, key and value; of cross attention key and value
        parts = outputs // inputs if name == "c_attn" else 1
        return FusedMatrix((outputs // parts,) * parts, is_transposed=True)
    # Of each head a query, a key and a value
    if name == "query_key_value" and kind.startswith(("GPTNeoX", "Bloom")):
        size = getattr(owner, "head_size", None) or owner.head_dim
        return FusedMatrix((size, size, size))
    if name == "qkv_proj" and kind.startswith("Phi3"):
        config, size = owner.config, owner.head_dim
        others = config.num_key_value_heads * size
        return FusedMatrix((config.num_attention_heads * size, others, others))
    if name == "gate_up_proj" and kind.startswith("Phi3"):
        return FusedMatrix((layer.out_features // 2,) * 2)
    return None
