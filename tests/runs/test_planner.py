"""The planner as a run uses it: packed rows, padding, and memory under autocast."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from tests.lib.nightly import nightly
from tests.lib.support import EXACT, VOCABULARY, Bench, relative_error
from tests.lib.tune_support import Encoder, gpt, measured_peak, text, workload
from trainer.core.errors import ConfigError
from trainer.models.bind import bind
from trainer.models.gpt import GPT
from trainer.plan.cut import Layout
from trainer.plan.cuts import Budget, Fixed
from trainer.plan.memory import Shape
from trainer.tune.layout import COMPILED_SHAPES, layout_for, packs
from trainer.tune.predict import CannotRunFake, Predictor, predict_peak
from trainer.tune.workload import Tiled

CPU = torch.device("cpu")


def small_gpt(**changes) -> GPT:
    torch.default_generator.manual_seed(3)
    settings = {"width": 16, "num_layers": 2, "num_heads": 2, "max_length": 32}
    return GPT(vocab_size=VOCABULARY, **(settings | changes))


def gradients_of_one_step(bench: Bench) -> dict[str, torch.Tensor]:
    batch = bench.feed.next()
    kit = bench.kit
    assert kit.strategy is not None
    weights = sum(m.weights["cross_entropy"] for m in batch.micro_batches)
    for micro_batch in batch.micro_batches:
        sums = bench.objective.sums(kit.model.call, micro_batch.fields)
        (sum(sums.losses.values()) / weights).backward()
    return {name: p.grad for name, p in bench.module.named_parameters()}


def test_a_packed_step_is_the_padded_step_is_the_whole_batch():
    def step(cut, **layout):
        return gradients_of_one_step(Bench(cut, model=small_gpt, layout=Layout(**layout)))

    whole = step(Fixed())
    for found in (
        step(Budget(max_tokens=60)),
        step(Budget(max_tokens=60), packed=True),
        step(Budget(max_tokens=64), packed=True, pad_multiple=8),
        step(Fixed(micro=5), packed=True),
    ):
        assert relative_error(found, whole) <= EXACT[torch.float64]


def test_packing_is_left_alone_where_it_gains_nothing_or_cannot_be():
    gpu, model = torch.device("cuda"), small_gpt()
    assert packs("auto", model, unfit=None, device=gpu, precision="bf16")
    assert not packs("auto", model, unfit=None, device=gpu, precision="fp32")
    assert not packs("auto", model, unfit=None, device=CPU, precision="bf16")
    assert not packs("auto", model, unfit="it collates", device=gpu, precision="bf16")
    assert not packs(False, model, unfit=None, device=gpu, precision="bf16")
    blind = nn.Embedding(2, 2)
    with pytest.raises(ConfigError, match=r"takes no cu_seqlens"):
        packs(True, blind, unfit=None, device=CPU, precision="fp32")
    with pytest.raises(ConfigError, match=r"it collates; use accum\.packed=false"):
        packs(True, model, unfit="it collates", device=CPU, precision="fp32")


def test_packed_shapes_are_rehearsed_as_rows_with_boundaries():
    padded = text(8)(1, 8)
    example = {"input_ids": padded["input_ids"], "labels": padded["labels"]}
    example |= {"position_ids": torch.arange(8)[None], "cu_seqlens": torch.tensor([0, 8]).int()}
    fields = Tiled(example, 8)(3, 5)
    assert fields["input_ids"].shape == fields["position_ids"].shape == (1, 15)
    assert fields["cu_seqlens"].tolist() == [0, 5, 10, 15]
    work = workload(gpt(), Tiled(example, 8))
    with pytest.raises(CannotRunFake):
        predict_peak(work, Shape(2, 8))
    predictor = Predictor(work, Shape(1, 64))
    measured = measured_peak(work, Shape(8, 64)).peak_bytes
    assert predictor(Shape(8, 64)).peak_bytes == pytest.approx(measured, rel=0.05)
    assert "real probes" in predictor.method


def test_a_gpu_pads_to_eight_but_never_beyond_what_the_data_hold():
    lengths = np.array([3, 9, 30])
    layout = layout_for(lengths, world_size=1, device_type="cuda", packed=False, compiled=False)
    assert layout.pad_multiple == 8
    plan = Budget(max_tokens=90).cut(np.array([3, 9, 26, 30]), layout)
    assert {length for lengths in plan.padded_lengths for length in lengths} <= {8, 16, 30}
    images = layout_for(np.ones(4), world_size=1, device_type="cuda", packed=False, compiled=False)
    assert images.pad_multiple == 1


def test_a_compiled_model_sees_few_lengths_the_same_for_every_batch():
    lengths = np.random.default_rng(0).integers(1, 300, 2000)
    layout = layout_for(lengths, world_size=1, device_type="cpu", packed=False, compiled=True)
    seen = set()
    for begin in range(0, 2000, 200):
        plan = Budget(max_tokens=2048).cut(lengths[begin : begin + 200], layout)
        seen |= {length for row in plan.padded_lengths for length in row}
        assert plan.padding < 0.1
    assert len(seen) <= COMPILED_SHAPES


@pytest.mark.parametrize("name", ["gpt", nightly("encoder")])
def test_the_peak_under_bf16_autocast_is_predicted(name):
    model = gpt() if name == "gpt" else Encoder()
    work = replace(workload(model), bind=partial(bind, autocast=torch.bfloat16))
    shape = Shape(6, 40)
    predicted = predict_peak(work, shape).peak_bytes
    assert predicted < predict_peak(workload(model), shape).peak_bytes
    measured = measured_peak(work, shape, autocast=torch.bfloat16).peak_bytes
    assert predicted == pytest.approx(measured, rel=0.05)
