"""Predicted memory against memory measured by the same steps on real tensors."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from tests.lib.nightly import nightly
from tests.lib.support import TinyLM
from tests.lib.tune_support import (
    VOCABULARY,
    ConvNet,
    Encoder,
    Stubborn,
    assert_same,
    gpt,
    images,
    measured_peak,
    text,
    traces,
    workload,
)
from trainer.models.compilation import compile_model
from trainer.models.gpt import GPT
from trainer.objectives import linear_cross_entropy, next_token
from trainer.objectives.next_token import NextToken
from trainer.parallel.setup import ParallelSetup
from trainer.parallel.sync import Deferred
from trainer.plan.memory import Shape
from trainer.tune.memory_limit import memory_limit, reserve_share
from trainer.tune.peak_bytes import MemoryEstimate, PeakBytes
from trainer.tune.predict import UNFUSED, Predictor, predict_peak
from trainer.tune.workload import Workload

TOLERANCE = 0.05
"""What the prediction of tensor bytes may be off; on the CPU it is not off by one byte."""


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("make", "shape", "recomputes"),
    [
        (gpt, Shape(6, 40), True),
        (Encoder, Shape(4, 64), True),
        (ConvNet, Shape(9, 1), False),
    ],
)
def test_the_predicted_peak_is_the_measured_one_and_recomputing_saves(make, shape, recomputes):
    work = workload(make(), images() if make is ConvNet else text())
    before, found = traces(work.model.module), {}
    for recompute in (False, True)[: 1 + recomputes]:
        found[recompute] = predict_peak(work, shape, recompute=recompute)
        measured = measured_peak(work, shape, recompute=recompute).peak_bytes
        assert found[recompute].peak_bytes == pytest.approx(measured, rel=TOLERANCE)
    assert not recomputes or found[True].activations < found[False].activations
    assert_same(traces(work.model.module), before)


def test_an_lstm_on_a_cpu_is_probed_as_its_kernel_takes_memory_that_no_fake_shows():
    model = TinyLM(16)
    model.embed, model.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
    model.mix = nn.LSTM(16, 16, num_layers=2, batch_first=True)
    predict, shape = Predictor(work := workload(model), Shape(2, 64)), Shape(8, 64)
    found, measured = predict(shape).peak_bytes, measured_peak(work, shape).peak_bytes
    assert predict.method.startswith("memory measured on small micro-batches, as an LSTM on a CPU")
    assert found == pytest.approx(measured, rel=TOLERANCE)
    assert predict_peak(work, shape).peak_bytes < 0.9 * measured


def test_the_first_chunks_of_the_logits_reach_the_peak_of_all(monkeypatch):
    monkeypatch.setattr(next_token, "LEAST_BYTES", 0)
    monkeypatch.setitem(linear_cross_entropy.CHUNK_BYTES, "cpu", 4 * 16 * 5000)
    model = GPT(vocab_size=5000, width=8, num_layers=1, num_heads=1, max_length=64)
    work, found = workload(model, objective=NextToken()), {}
    for most in (1, linear_cross_entropy.PEAK_CHUNKS, 100):  # of 15
        monkeypatch.setattr(linear_cross_entropy, "PEAK_CHUNKS", most)
        found[most] = predict_peak(work, Shape(6, 40))
    assert found[1].peak_bytes < found[3].peak_bytes
    assert found[3] == found[100]
    measured = measured_peak(work, Shape(6, 40)).peak_bytes
    assert found[3].peak_bytes == pytest.approx(measured, rel=TOLERANCE)


def test_the_parts_of_a_prediction_are_what_the_model_and_adam_hold():
    work = workload(Encoder())
    weights = sum(p.nbytes for p in work.model.module.parameters())
    found = predict_peak(work, Shape(8, 32))
    assert found.parameters == found.gradients == weights == work.resident_bytes
    steps = 4 * len(list(work.model.module.parameters()))
    assert found.optimizer_state == 2 * weights + steps
    parts = found.parameters + found.gradients + found.optimizer_state + found.activations
    assert parts + found.buffers == found.peak_bytes
    averaging = predict_peak(replace(work, ema_decay=0.9), Shape(8, 32))
    assert (found.average, averaging.average) == (0, weights)
    assert averaging.peak_bytes - found.peak_bytes == weights


def test_a_prediction_changes_no_bit_of_the_live_model_and_the_random_generator():
    model = Stubborn(looks=False)
    for parameter in list(model.parameters())[::2]:
        parameter.grad = torch.ones_like(parameter)
    before = traces(model)
    predict_peak(workload(model), Shape(4, 16))
    assert_same(traces(model), before)
    assert not model.seen
    assert not model.masks


def test_a_model_that_needs_values_is_probed_for_real_and_its_state_is_put_back():
    work = workload(Stubborn())
    before = traces(work.model.module, runs=True)
    predict = Predictor(work, Shape(1, 64))
    predict(Shape(1, 64))
    assert predict.method.endswith("as the model does not run on shapes alone")
    assert_same(traces(work.model.module, runs=True), before)
    assert work.model.module.seen, "for real"
    for shape in (Shape(16, 64), Shape(3, 128), Shape(48, 10)):
        measured = measured_peak(work, shape).peak_bytes
        assert predict(shape).peak_bytes == pytest.approx(measured, rel=TOLERANCE)


def allocated_peak(work: Workload, shape: Shape) -> int:
    """Let PyTorch's allocator tell what a micro-batch takes, its fields too.

    Kernels of a compiler allocate where no mode of PyTorch sees it.
    """
    fields = work.fields(*shape)
    for _ in range(2):  # the first one compiles, and leaves the gradients
        with torch.profiler.profile(profile_memory=True) as profile:
            work.backward(fields)
    # A public way to the single allocations, with their sizes, there is not.
    events = profile.profiler.kineto_results.events()
    sizes = [e for e in events if e.name() == "[memory]"]
    taken = np.cumsum([e.nbytes() for e in sorted(sizes, key=lambda e: e.start_ns())])
    return int(taken.max()) + sum(field.nbytes for field in fields.values())


@pytest.mark.slow
@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize(("precision", "backend"), [("bf16", UNFUSED), nightly("fp32", "inductor")])
def test_a_compiled_model_is_predicted_with_what_its_graphs_save(precision, backend, monkeypatch):
    monkeypatch.setattr(next_token, "LEAST_BYTES", 0)  # chunks of the loss are compiled too
    shape, model = Shape(6, 96), GPT(VOCABULARY, width=64, num_layers=4, num_heads=4)
    plain = workload(model, precision=precision)
    work, before = replace(plain, compiled=True), traces(model)
    found = predict_peak(work, shape).activations
    assert_same(traces(model), before)
    assert found < 0.9 * predict_peak(plain, shape).activations
    real = copy.deepcopy(model).train()
    compile_model(real, 1, backend=backend)
    measured = allocated_peak(replace(plain, model=replace(plain.model, module=real)), shape)
    # What Inductor fuses inside of one block is predicted apart: a share that falls with depth.
    assert 0.99 * measured < found < 1.1 * measured


def test_shards_compute_with_the_activations_of_the_whole_model_in_the_run_s_precision():
    setup, found = ParallelSetup(mode="fsdp", replicas=1, sync=Deferred()), []
    for precision in ("fp32", "bf16"):
        work = workload(gpt(), precision=precision, setup=setup)
        ranks = partial(setup.fake_ranks, 2, work.model.bind, torch.device("cpu"))
        first = predict_peak(replace(work, fake_ranks=ranks), Shape(8, 64))
        assert first.activations == predict_peak(work, Shape(8, 64)).activations
        found.append(first.activations)
    assert found[1] < 0.7 * found[0]


def test_shards_compute_logits_in_chunks_as_the_whole_model_does(monkeypatch):
    monkeypatch.setattr(next_token, "LEAST_BYTES", 0)
    monkeypatch.setitem(linear_cross_entropy.CHUNK_BYTES, "cpu", 4 * 16 * 5000)
    setup = ParallelSetup(mode="fsdp", replicas=1, sync=Deferred())
    model = GPT(vocab_size=5000, width=8, num_layers=1, num_heads=1, max_length=64)
    work = workload(model, objective=NextToken(), setup=setup)
    ranks = partial(setup.fake_ranks, 2, work.model.bind, torch.device("cpu"))
    found = predict_peak(replace(work, fake_ranks=ranks), Shape(6, 40))
    assert found.activations == pytest.approx(predict_peak(work, Shape(6, 40)).activations, rel=0.2)


def test_a_storage_counts_once_and_until_it_is_freed():
    peak = PeakBytes()
    with peak:
        one = torch.zeros(1000)
        view = one[10:]
        two = view * 2
        del one, view
        peak.assign("gradients", [two])
    assert peak.estimate.peak_bytes == 4000 + two.nbytes
    peak.reset()
    assert peak.estimate == MemoryEstimate(peak_bytes=two.nbytes, gradients=two.nbytes)


MEMINFO = {"proc/meminfo": "MemTotal:  4000000 kB\nMemAvailable:    2000000 kB\n"}
V2 = {
    "proc/self/cgroup": "0::/jobs/mine\n",
    "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
    "sys/fs/cgroup/jobs/mine/memory.current": "5\n",
    "sys/fs/cgroup/jobs/memory.max": "1000000000\n",
    "sys/fs/cgroup/jobs/memory.current": "600000000\n",
    "sys/fs/cgroup/jobs/memory.stat": "anon 500000000\ninactive_file 100000000\n",
}
V1 = {
    "proc/self/cgroup": "8:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "800000000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "300000000\n",
}


@pytest.mark.parametrize(
    ("files", "left", "source"),
    [
        (MEMINFO, 2_048_000_000, "available memory"),
        (MEMINFO | V2, 500_000_000, "the cgroup's limit"),
        (MEMINFO | V1, 500_000_000, "the cgroup's limit"),
    ],
    ids=["no cgroup", "version 2, limit of the parent", "version 1, seen from inside"],
)
def test_the_tightest_limit_of_the_machine_counts(tmp_path, files, left, source):
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    cpu = torch.device("cpu")
    found = memory_limit(cpu, root=tmp_path)
    assert found.bytes == int(left * 0.9)
    assert found.source.startswith(source)
    shared = memory_limit(cpu, root=tmp_path, local_ranks=4, resident_bytes=1000)
    assert shared.bytes == 1000 + int(left // 4 * 0.9)


def test_a_small_card_leaves_at_least_a_gigabyte_and_a_half_alone():
    cuda = torch.device("cuda")
    for gib, share in ((80, 0.08), (12, 0.125), (2, 0.25)):
        found = memory_limit(cuda, asked=gib * 2**30)
        assert (found.bytes, found.reserve) == (int(gib * 2**30 * (1 - share)), share)
    assert reserve_share("gpu", 0) == 0.08
    assert "accum.memory" in found.source


def test_what_allocating_activations_costs_on_a_cpu_is_part_of_what_a_peak_takes():
    peak = MemoryEstimate(peak_bytes=1000, activations=400)
    cpu, cuda = (memory_limit(torch.device(kind), asked=10**9) for kind in ("cpu", "cuda"))
    assert (cpu.with_overhead(peak), cuda.with_overhead(peak)) == (1400, 1000)
