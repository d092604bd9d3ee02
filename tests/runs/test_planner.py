"""The planner as a run uses it: packed rows, padding, and memory under autocast."""

from dataclasses import asdict
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.lib.run_support import go, read_json, saved, state
from tests.lib.support import EXACT, VOCABULARY, Bench, relative_error
from tests.lib.tune_support import gpt, measured_peak, workload
from trainer.core.errors import ConfigError
from trainer.models.compilation import COMPILED_SHAPES
from trainer.models.gpt import GPT
from trainer.plan.cut import Cost, Layout
from trainer.plan.cuts import Budget, Fixed
from trainer.plan.memory import Shape
from trainer.plan.partition import layout_for
from trainer.tune.packed_documents import packs
from trainer.tune.predict import predict_peak
from trainer.tune.request import NEAR_BEST_TOKENS

CPU = torch.device("cpu")
SHAPE = {"world_size": 1, "device_type": "cpu", "packed": False, "most_shapes": None}


def small_gpt(**changes) -> GPT:
    torch.default_generator.manual_seed(3)
    settings = {"width": 16, "num_layers": 2, "num_heads": 2, "max_length": 32}
    return GPT(vocab_size=VOCABULARY, **(settings | changes))


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_packed_step_is_the_whole_batch_though_filler_is_longer_than_any_sample(positions):
    def bench(cut, **layout):
        model = partial(small_gpt, positions=positions, max_length=23)
        return Bench(cut, model=model, layout=Layout(**layout))

    whole, _ = bench(Fixed()).gradient_and_loss()
    few = bench(Budget(max_tokens=150), packed=True, max_shapes=2)
    plan = Budget(max_tokens=150).cut(few.dataset.lengths[:16], few.feed.layout)
    assert sum(plan.padded_lengths[0]) - plan.lengths.sum() > 23, "filler, at most a row of 75"
    for each in (
        few,
        bench(Budget(max_tokens=64), packed=True, pad_multiple=8),
        bench(Fixed(micro=5), packed=True),
    ):
        found, _ = each.gradient_and_loss()
        assert relative_error(found, whole) <= EXACT[torch.float64]


def test_a_deterministic_run_cuts_and_ends_the_same_whatever_was_timed_before(monkeypatch):
    runs = []
    try:
        for folder in ("one", "other"):
            monkeypatch.setenv("TRAIN_CACHE", folder)
            runs.append(go("accum=auto deterministic=true batch.global=40 steps=2"))
    finally:
        torch.use_deterministic_algorithms(mode=False)
    cut, other = (saved(run, "cut")["settings"] for run in runs)
    assert cut == other
    assert cut["max_tokens"] <= NEAR_BEST_TOKENS["cpu"]
    assert cut["cost"] == asdict(Cost()), "fitted to no timing"
    assert "not timed: deterministic" in read_json(runs[0].folder / "plan.json")["cap_source"]
    found, expected = map(state, runs)
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


class Asked(nn.Module):
    """Has a kernel for packed rows in bf16."""

    def forward(self, input_ids, cu_seqlens=None):
        return input_ids

    def has_packed_kernel(self, device, dtype):
        return dtype == torch.bfloat16


class HuggingFace(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=attention)

    def forward(self, input_ids, position_ids=None, **kwargs):
        return input_ids


def test_packing_asks_the_model_and_the_data_whether_it_gains_anything():
    def on_gpu(model, precision="bf16", **known):
        asked = {"unfit": None, "device": torch.device("cuda"), "precision": precision}
        return packs("auto", model, **asked | known)

    assert on_gpu(small_gpt())
    assert on_gpu(small_gpt(), "fp16")
    assert not on_gpu(small_gpt(dropout=0.1)), "the kernel has no dropout"
    assert not on_gpu(small_gpt(width=24)), "it takes multiples of 8 channels a head"
    assert not on_gpu(small_gpt(), fill=0.99), "windows of one length, but for the last"
    assert on_gpu(Asked())
    assert not on_gpu(Asked(), "fp32")
    assert on_gpu(HuggingFace("flash_attention_2"))
    assert not on_gpu(HuggingFace("sdpa")), "which scores all pairs of a row"
    assert not on_gpu(HuggingFace("flash_attention_2"), fault=lambda: "it mixes documents")
    assert not on_gpu(small_gpt(), unfit="it collates")
    given = {"unfit": None, "device": CPU, "precision": "fp32"}
    assert packs(True, HuggingFace("sdpa"), **given)
    assert not packs("auto", HuggingFace("flash_attention_2"), **given)
    with pytest.raises(ConfigError, match=r"takes no cu_seqlens"):
        packs(True, nn.Embedding(2, 2), **given)
    with pytest.raises(ConfigError, match=r"=true: it mixes documents; use accum\.packed=false"):
        packs(True, HuggingFace("sdpa"), fault=lambda: "it mixes documents", **given)


def test_a_gpu_pads_to_eight_but_never_beyond_what_the_data_hold():
    lengths = np.array([3, 9, 30])
    layout = layout_for(lengths, **SHAPE | {"device_type": "cuda"})
    assert layout.pad_multiple == 8
    plan = Budget(max_tokens=90).cut(np.array([3, 9, 26, 30]), layout)
    assert {length for lengths in plan.padded_lengths for length in lengths} <= {8, 16, 30}
    images = layout_for(np.ones(4), **SHAPE | {"device_type": "cuda"})
    assert images.pad_multiple == 1


def test_a_compiled_model_sees_few_lengths_the_same_for_every_batch():
    lengths = np.random.default_rng(0).integers(1, 300, 2000)
    layout = layout_for(lengths, **SHAPE | {"most_shapes": COMPILED_SHAPES})
    seen = set()
    for begin in range(0, 2000, 200):
        plan = Budget(max_tokens=2048).cut(lengths[begin : begin + 200], layout)
        seen |= {length for row in plan.padded_lengths for length in row}
        assert plan.padding < 0.1
    assert len(seen) <= COMPILED_SHAPES


def test_the_peak_under_bf16_autocast_is_predicted():
    model, shape = gpt(), Shape(6, 40)
    work = workload(model, precision="bf16")
    predicted = predict_peak(work, shape).peak_bytes
    assert predicted < predict_peak(workload(model), shape).peak_bytes
    assert predicted == pytest.approx(measured_peak(work, shape).peak_bytes, rel=0.05)
