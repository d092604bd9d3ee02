"""The planner as a run uses it: packed rows, padding, and memory under autocast."""

from dataclasses import asdict
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.lib.nightly import nightly
from tests.lib.run_support import go, read_json, saved, state, steps
from tests.lib.support import EXACT, VOCABULARY, Bench, relative_error
from tests.lib.tune_support import Encoder, gpt, measured_peak, workload
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


def gradients_of_one_step(bench: Bench) -> dict[str, torch.Tensor]:
    batch = bench.feed.next()
    context = bench.context
    weights = sum(m.weights["cross_entropy"] for m in batch.micro_batches)
    for micro_batch in batch.micro_batches:
        sums = bench.objective.sums(context.parallel.call, micro_batch.fields)
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


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_rows_of_few_lengths_compute_the_step_though_filler_is_longer_than_any_sample(positions):
    def bench(cut, **layout):
        model = partial(small_gpt, positions=positions, max_length=23)
        return Bench(cut, model=model, layout=Layout(**layout))

    whole = gradients_of_one_step(bench(Fixed()))
    few = bench(Budget(max_tokens=150), packed=True, max_shapes=2)
    plan = Budget(max_tokens=150).cut(few.dataset.lengths[:16], few.feed.layout)
    assert sum(plan.padded_lengths[0]) - plan.lengths.sum() > 23, "filler, at most a row of 75"
    assert relative_error(gradients_of_one_step(few), whole) <= EXACT[torch.float64]


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
    weights = [state(run) for run in runs]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


class Asked(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, input_ids, cu_seqlens=None):
        return input_ids

    def has_packed_kernel(self, device, dtype):
        return self.answer and dtype == torch.bfloat16


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
    assert on_gpu(Asked(True))
    assert not on_gpu(Asked(True), "fp32")
    assert not on_gpu(Asked(False))
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


HUGGING_FACE = """model._target_=transformers.{0}{1} model.config._target_=transformers.{0}Config
model.config.vocab_size=16 model.config.hidden_size=16 model.config.num_hidden_layers=1
model.config.num_attention_heads=2 model.config.intermediate_size=16
accum=budget accum.max_tokens=30 accum.packed=true steps=2"""


def test_a_hugging_face_model_runs_packed_or_says_why_it_cannot():
    (first, second) = steps(go(HUGGING_FACE.format("Llama", "ForCausalLM")))
    assert first["padding"] == second["padding"] == 0.0
    padded = go(f"{HUGGING_FACE.format('Llama', 'ForCausalLM')} accum.packed=false")
    assert second["loss"] == pytest.approx(steps(padded)[1]["loss"], rel=1e-5)
    with pytest.raises(ConfigError, match=r"^accum\.packed=true: BertForMaskedLM does not hold"):
        go(f"{HUGGING_FACE.format('Bert', 'ForMaskedLM')} objective=token_classify")


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


@pytest.mark.parametrize("name", ["gpt", nightly("encoder")])
def test_the_peak_under_bf16_autocast_is_predicted(name):
    model = gpt() if name == "gpt" else Encoder()
    work = workload(model, precision="bf16")
    shape = Shape(6, 40)
    predicted = predict_peak(work, shape).peak_bytes
    assert predicted < predict_peak(workload(model), shape).peak_bytes
    measured = measured_peak(work, shape).peak_bytes
    assert predicted == pytest.approx(measured, rel=0.05)
