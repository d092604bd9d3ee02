"""Model FLOPs against what the formulas of papers say, and the figures of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from tests.lib.tune_support import (
    VOCABULARY,
    ConvNet,
    Encoder,
    Stubborn,
    gpt,
    images,
    text,
    workload,
)
from trainer.models.recompute import checkpoint_blocks
from trainer.tune.flops import ModelFlops, model_flops, peak_flops, peak_of
from trainer.tune.workload import Tiled

LENGTHS = np.array([64, 1, 17, 17, 40])


def of_transformer(model: nn.Module, layers: int, width: int) -> float:
    """Six for every matrix entry and token, twelve for a pair of positions, layer and channel."""
    used = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    matrices = sum(weight.numel() for weight in used)
    pairs = float((LENGTHS.astype(float) ** 2).sum())
    return 6 * matrices * float(LENGTHS.sum()) + 12 * layers * width * pairs


def count(model: nn.Module, fields: Tiled | None = None, longest: int = 64) -> ModelFlops | None:
    return model_flops(workload(model, fields or text(longest)), 1, longest)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_transformer_has_those_of_the_formula_on_real_lengths(recomputes):
    model = gpt()
    expected = of_transformer(model, layers=2, width=24)
    if recomputes:
        assert checkpoint_blocks(model) == 2
    found = count(model)
    assert found is not None
    assert found.of(LENGTHS) == pytest.approx(expected, rel=1e-6)
    windows = model_flops(workload(model, text(17)), 17, 17)
    assert windows is not None
    assert windows.of(LENGTHS[2:4]) == pytest.approx(found.of(LENGTHS[2:4]), rel=1e-6)
    padded = np.full_like(LENGTHS, 64)
    assert found.of(padded) > 2 * expected  # padding would count


def test_a_model_of_transformers_has_them_too():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=24, n_layer=2, n_head=2
    )
    model = transformers.GPT2LMHeadModel(config)
    found = count(model)
    matrices = sum(
        p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "wpe" not in n
    )
    tokens, pairs = float(LENGTHS.sum()), float((LENGTHS.astype(float) ** 2).sum())
    assert found is not None
    assert found.of(LENGTHS) == pytest.approx(6 * matrices * tokens + 12 * 2 * 24 * pairs, rel=1e-6)


def test_samples_without_a_length_and_frozen_weights_count_what_is_computed():
    model, size = ConvNet(), 12 * 12
    images_only = count(model, images(), longest=1)
    assert images_only is not None
    stem, body, head = 2 * 8 * 27 * size, 2 * 16 * 72 * size, 2 * 5 * 16
    # Nothing asks for the gradient of the pixels.
    assert images_only.of(np.ones(3, dtype=np.int64)) == 3 * (2 * stem + 3 * body + 3 * head)
    encoder = Encoder()
    whole = count(encoder)
    encoder.requires_grad_(requires_grad=False)
    encoder.head.requires_grad_()
    frozen = count(encoder)
    assert whole is not None
    assert frozen is not None
    assert frozen.of(LENGTHS) < 0.6 * whole.of(LENGTHS)


def test_a_model_that_needs_values_is_not_counted():
    assert count(Stubborn()) is None
    assert replace(ModelFlops((1.0,)), peak=4.0).speed(LENGTHS, 2.5) == {
        "model_flops_per_second": 2.0,
        "mfu": 0.5,
    }
    assert ModelFlops((0.0, 1.0)).speed(LENGTHS, 1.0) == {"model_flops_per_second": 139.0}


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "fp16", 756),
        ("NVIDIA H200", "tf32", 494.75),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L4", "bf16", 121),
        ("Somebody's card", "bf16", None),
    ],
)
def test_what_a_device_can_do_depends_on_its_name_and_the_precision(name, precision, tera):
    assert peak_of(name, precision) == (None if tera is None else tera * 1e12)
    assert peak_flops(torch.device("cpu"), precision) is None
