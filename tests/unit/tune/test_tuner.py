"""The tuner end to end: real models, simulated memory, simulated time."""

from __future__ import annotations

import json
import math
import os
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from tests.lib.nightly import nightly
from tests.lib.tune_support import VOCABULARY, Encoder, Stubborn, gpt, measured_peak, workload
from trainer.core.errors import ConfigError, DoesNotFitError
from trainer.plan.cut import Cost, Layout
from trainer.plan.cuts import Auto
from trainer.plan.memory import Shape
from trainer.tune import tuner
from trainer.tune.cache import Measurements, TuningCache, describe
from trainer.tune.flops import count_compute
from trainer.tune.memory_limit import MemoryLimit
from trainer.tune.predict import predict_peak
from trainer.tune.speed import Stopwatch
from trainer.tune.tensors import MemoryEstimate
from trainer.tune.tuning import Tuning, TuningRequest

tune = partial(tuner.tune, clock=lambda: 0.0)
"""Tunes as if it took no time, unless a test brings a clock."""

SMALL = partial(Encoder, num_blocks=1)
LENGTHS = (6, 11, 32)
NUM_SAMPLES = 48


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def book():
    """What is predicted for `SMALL()`, which depends on no budget: each shape runs once."""
    return TuningCache()


def question(model: nn.Module | None = None, limit=10**9, **changes) -> TuningRequest:
    draws = np.random.default_rng(0)
    batches = changes.pop("batches", [draws.choice(LENGTHS, NUM_SAMPLES) for _ in range(3)])
    if isinstance(limit, int):
        limit = MemoryLimit(bytes=limit, source="a simulated budget")
    settings = {
        "work": workload(model or SMALL()),
        "batches": batches,
        "most_samples": max(map(len, batches)),
        "longest": max(LENGTHS),
        "shortest": min(LENGTHS),
        "cut_at": Auto().tuned,
        "layout": Layout(),
        "limit": limit,
        "timed": False,
    }
    return TuningRequest(**(settings | changes))


class Paced(nn.Module):
    """A model whose block moves a clock by what its micro-batch is to take."""

    def __init__(self, best: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList([PacedBlock(best)])
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.embedding(input_ids)))

    def clock(self) -> float:
        return float(self.blocks[0].time[0])


class PacedBlock(nn.Module):
    def __init__(self, best: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 32)
        self.out = nn.Linear(32, 8)
        self.time = np.zeros(1)
        self.best = best

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[0] * x.shape[1]
        self.time += 1e-3 + 1e-5 * tokens * max(1.0, (tokens / self.best) ** 0.5)
        return self.out(self.hidden(x).relu())


def fits(asked: TuningRequest, cap: float) -> bool:
    """Take real steps at the largest shape of every length that a cap allows."""
    try:
        for length in LENGTHS:
            shape = Shape(min(NUM_SAMPLES, int(cap) // length), length)
            measured_peak(asked.work, shape, limit=asked.limit.bytes)
    except torch.OutOfMemoryError:
        return False
    return True


def predicted(book: TuningCache, shape: Shape, *, recompute: bool = False) -> int:
    peaks = book.facts[recompute].peaks
    if shape not in peaks:
        peaks[shape] = predict_peak(workload(SMALL()), shape, recompute=recompute)
    return peaks[shape].peak_bytes


def test_the_chosen_cap_is_within_5_percent_of_the_largest_that_fits(book):
    asked = question(limit=400_000)
    found = tune(asked, book)
    assert fits(asked, found.max_tokens)
    assert not fits(asked, found.max_tokens / 0.95 + 1)
    assert found.predicted.peak_bytes <= found.limit_bytes == 400_000


def test_a_model_that_cannot_run_fake_is_tuned_by_probes_and_says_so():
    asked = question(Stubborn(), limit=1_000_000)
    found = tune(asked)
    assert fits(asked, found.max_tokens / 1.05)
    assert not fits(asked, found.max_tokens / 0.95 + 1)
    assert "real probes" in found.method


def test_the_memory_of_shards_that_cannot_run_fake_is_asked_for():
    with torch.device("meta"):
        model = Stubborn()
    with pytest.raises(ConfigError, match=r"DataDependent.*type accum=budget accum\.max_tokens=N"):
        tune(question(model))


@pytest.mark.parametrize("inputs", [3 * 2**20, nightly(0)])
def test_what_cannot_fit_names_the_nearest_length_and_memory_that_do(book, inputs):
    there = predicted(book, Shape(1, 16))
    source = "accum.memory, 8% in reserve"
    limit = MemoryLimit(bytes=there, source=source, reserve=0.08, inputs=inputs)
    with pytest.raises(DoesNotFitError) as caught:
        tune(question(limit=limit, longest_id=17), book)
    assert "sample 17 of 32 tokens does not fit" in str(caught.value)
    assert "activation_checkpointing=true" in str(caught.value)
    named = re.search(r"accum\.memory=(\d+)MiB .*data\.max_length=(\d+)", str(caught.value))
    memory, length = (int(group) for group in named.groups())
    assert 15 <= length <= 16
    assert predicted(book, Shape(1, length)) <= there
    needed = predicted(book, Shape(1, 32))
    assert int(0.92 * (memory - 1) * 2**20) - inputs < needed
    assert int(0.92 * memory * 2**20) - inputs >= needed


@pytest.mark.parametrize("seed", [1, nightly(3), nightly(4)])
def test_noise_does_not_choose_between_caps(seed):
    model, draws = Paced(best=4096), np.random.default_rng(seed)
    batches = [np.full(64, 512)]
    asked = question(model, timed=True, num_steps=10**6, longest=512, shortest=512, batches=batches)
    seen, noisy = [0.0], [0.0]

    def disturbed() -> float:
        now = model.clock()
        noisy[0] += (now - seen[0]) * (1.0 + draws.exponential(1.0))
        seen[0] = now
        return noisy[0]

    found = tune(asked, clock=disturbed)
    rows = tune(asked, clock=model.clock).candidates
    calm = {row.max_tokens: row.seconds_per_step for row in rows}
    assert calm[found.max_tokens] <= 1.05 * min(calm.values())
    assert calm[512] > 1.05 * min(calm.values())


def test_a_cap_as_fast_as_any_is_chosen_and_a_second_run_finds_it_in_the_cache(tmp_path):
    model = Paced(best=256)
    asked = question(model, timed=True, num_steps=10**6)
    facts = describe(asked.work, asked.longest, "fp32", None)
    found = tune(asked, TuningCache.open(facts, tmp_path), clock=model.clock)
    assert found.max_tokens <= 512
    chosen = [row for row in found.candidates if row.chosen]
    assert [row.max_tokens for row in chosen] == [found.max_tokens]
    times = {row.max_tokens: row.seconds_per_step for row in found.candidates}
    assert times[found.max_tokens] <= 1.03 * min(times.values())
    assert all(s > 1.03 * min(times.values()) for cap, s in times.items() if cap > 512)
    assert found.cost.seconds_per_token == pytest.approx(1e-5, rel=0.2)
    assert found.cost.fixed == pytest.approx(120, rel=0.2)
    broken = question(nn.Identity(), timed=True, work=replace(asked.work, bind=None))
    again = tune(broken, TuningCache.open(facts, tmp_path))
    assert (again.max_tokens, again.candidates) == (found.max_tokens, found.candidates)
    assert "earlier run" in again.method


def test_no_sample_is_timed_that_is_shorter_than_any_of_the_data():
    model, book = Paced(), TuningCache()
    lengths = np.array([100, 200, 300] * 4)
    changes = {"batches": [lengths], "longest": 300, "shortest": 100}
    tune(question(model, timed=True, num_steps=10**6, **changes), book, clock=model.clock)
    assert min(shape.length for shape in book.facts[False].seconds) == 100


def test_a_model_too_slow_for_two_timings_gets_a_usual_cap_and_says_that_it_is_a_guess():
    model, book = Paced(best=10**6), TuningCache()
    asked = question(model, timed=True, num_steps=10**6, longest=512, batches=[np.full(16, 512)])
    found = tune(asked, book, clock=lambda: 1000 * model.clock())
    assert found.max_tokens == 2048
    assert len(found.candidates) > 1
    assert "one size only, too slow for more: a cap of 2,048 is a guess" in found.method
    times = [row.seconds_per_step for row in found.candidates]
    assert min(times) > 0.89 * max(times)
    later = tune(asked, book, clock=model.clock)
    assert "is a guess" not in later.method
    assert "timed in an earlier run" not in later.method, "a guess is no measurement"
    assert "timed in an earlier run" in tune(asked, book, clock=model.clock).method


def test_a_compiled_model_that_is_no_faster_is_advised_against():
    model, book = Paced(), TuningCache()
    asked = question(model, timed=True, num_steps=10**6)
    tune(asked, book, clock=model.clock)
    compiled = replace(asked, work=replace(asked.work, compiled=True))
    # The last gains as much as the second, in a run that compiles for longer than that.
    for share, compile_s, is_slow in ((1.1, 0.0, True), (0.5, 1.0, False), (0.5, 1e9, True)):
        book.facts[False].compiled_time, book.facts[False].compile_s = share, compile_s
        method = tune(compiled, book, clock=model.clock).method
        assert (f"compiled, a micro-batch takes {share:.0%} of its time" in method) is is_slow
        assert ("compile=false" in method) is is_slow


def test_only_what_fits_uncompiled_is_compared_with_the_compiled_times():
    small, large = Shape(1, 32), Shape(NUM_SAMPLES, 32)
    asked = question(timed=True)
    needed = [predict_peak(asked.work, shape).peak_bytes for shape in (small, large)]
    found = []
    for limit in (needed[1] - 1, needed[1], needed[0] - 1):
        limited = replace(asked, limit=MemoryLimit(bytes=limit, source="a test"))
        facts, clock = Measurements(), time.perf_counter
        variant = tuner.MemoryVariant(limited, facts, clock, clock, recompute=False)
        variant._compare_uncompiled({small: 1e9, large: 1e-9})
        found.append(facts.compiled_time)
    assert found[0] > 1 > found[1] > found[2] == 0


def test_what_compiles_takes_no_time_of_the_budget():
    now = iter([0.0, 1.0, 31.0, 32.0])
    watch = Stopwatch(lambda: next(now))
    assert watch() == 0.0
    with watch.stopped():
        pass
    assert watch() == 2.0


@pytest.mark.nightly
def test_a_compiled_model_is_timed_compiled_and_left_as_it_was():
    book, asked = TuningCache(), question(gpt(), timed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own compiler
        found = tuner.tune(replace(asked, work=replace(asked.work, compiled=True)), book)
    assert len(book.facts[False].seconds) > 2, "compiling took no time of the budget"
    assert book.facts[False].compiled_time > 0
    assert book.facts[False].compile_s > 0
    assert "timed" in found.method
    assert all("forward" not in vars(block) for block in asked.work.model.blocks)


def test_nothing_is_timed_for_a_machine_that_is_not_here(book):
    found = tune(question(recompute="auto"), book)
    assert not any(row.activation_checkpointing for row in found.candidates), "memory is plenty"
    assert TypeAdapter(Tuning).validate_python(json.loads(json.dumps(asdict(found)))) == found
    assert found.cost.seconds_per_token is None
    assert all(row.seconds_per_step is None for row in found.candidates)
    assert "time unknown" in found.method
    assert found.max_tokens == NUM_SAMPLES * max(LENGTHS)


def test_a_fixed_cap_is_lowered_by_memory_alone_and_no_clock_is_asked(book):
    def clock() -> float:
        raise AssertionError("a clock was asked")

    def tuned(cache: TuningCache, **changes) -> Tuning:
        asked = question(**{"fixed_cap": 256, "recompute": "auto"} | changes)
        return tuner.tune(asked, cache, clock, clock)

    found = tuned(book)
    assert (found.max_tokens, found.single_sample_cap, found.cost) == (256, 32, Cost())
    assert not found.activation_checkpointing
    assert "not timed: deterministic" in found.method
    peaks = dict(book.facts[False].peaks)
    seconds = {Shape(n, 32): 1e-9 / n for n in (1, 4, 16)}
    facts = Measurements(peaks=peaks, seconds=seconds, noise=0.0, ratio=3.0, compiled_time=0.5)
    timed = TuningCache(facts=(replace(facts, method=book.facts[False].method), Measurements()))
    assert tuned(timed) == found, "what was timed before counts as little"
    assert replace(tuned(book, limit=10**8), method="", limit_bytes=0) == replace(
        found, method="", limit_bytes=0
    )
    assert tuned(book, fixed_cap=8).max_tokens == 32, "the longest sample"
    assert tuned(book, fixed_cap=10**6).max_tokens == NUM_SAMPLES * max(LENGTHS)
    less = tuned(book, limit=found.predicted.peak_bytes - 1, recompute=False)
    assert 200 < less.max_tokens < 256


def test_a_size_that_fails_for_real_lowers_what_is_believed_to_fit():
    class Failing(Paced):
        def forward(self, input_ids: Tensor) -> Tensor:
            if type(input_ids) is Tensor and input_ids.numel() > 300:
                raise torch.OutOfMemoryError("simulated")
            return super().forward(input_ids)

    model = Failing(best=10**6)
    found = tune(question(model, timed=True, num_steps=10**6), clock=model.clock)
    assert found.max_tokens < 600
    assert found.limit_bytes < 10**9


def test_recomputing_is_chosen_where_it_is_all_that_fits(book):
    asked = question(recompute="auto", batches=[np.array([32])])
    single = Shape(1, max(LENGTHS))
    plain, recomputed = predicted(book, single), predicted(book, single, recompute=True)
    assert recomputed < plain
    between = MemoryLimit(bytes=(recomputed + plain) // 2, source="a simulated budget")
    assert tune(replace(asked, limit=between), book).activation_checkpointing
    with pytest.raises(DoesNotFitError):
        tune(replace(asked, limit=between, recompute=False), book)


def test_recomputing_that_buys_too_little_is_weighed_and_refused():
    model = Paced(best=64)
    asked = question(model, limit=100_000, timed=True, recompute="auto", num_steps=10**6)
    assert not tune(asked, clock=model.clock).activation_checkpointing


def test_many_short_samples_that_take_more_than_the_longest_do_not_keep_it_from_training():
    class Greedy(nn.Module):
        """Keeps much for every sample, however short."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 8)
            self.per_sample = nn.Linear(8, 4000)
            self.head = nn.Linear(8, VOCABULARY)

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embedding(input_ids)
            drawn = self.per_sample(x[:, 0]).tanh().exp().sum(1)
            return self.head(x) + drawn[:, None, None]

    asked = question(Greedy(), batches=[np.array([32] + [1] * 31)], longest=32, shortest=1)
    single_sample_cap = predict_peak(asked.work, Shape(1, 32)).peak_bytes
    many = predict_peak(asked.work, Shape(32, 1)).peak_bytes
    assert many > 1.2 * single_sample_cap
    tight = replace(
        asked, limit=MemoryLimit(bytes=int(1.1 * single_sample_cap), source="a simulated budget")
    )
    found = tune(tight)
    assert found.max_tokens < 32 == found.single_sample_cap
    plan = tight.cut_at(found.max_tokens, found.cost, found.single_sample_cap).cut(
        asked.batches[0], Layout()
    )
    for rank, slot in plan.slots():
        shape = Shape(len(plan.ranks[rank][slot]), plan.padded_lengths[rank][slot])
        measured_peak(tight.work, shape, limit=tight.limit.bytes)


@pytest.mark.parametrize("damage", ["", "[]", '{"facts": [{"peaks": [[1, 2]]}]}', '{"facts": 7}'])
def test_a_damaged_cache_is_an_empty_one(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("TRAIN_CACHE", str(tmp_path))
    assert TuningCache.open({}).path.parent == tmp_path / "tune"
    (tmp_path / "file").write_text("in the way")
    TuningCache.open({}, tmp_path / "file" / "below").save()  # that is no failure
    book = TuningCache.open({}, tmp_path)
    for seconds in (0.5, 0.3, 0.7):  # other programs only ever add time
        book.facts[False].add_timings({Shape(1, 8): seconds}, noise=math.inf)
    assert book.facts[False].seconds == {Shape(1, 8): 0.3}
    ratios = []
    for ratio in (1.5, 1.1, None, 1.1, 2.0):  # a disturbed measurement does not stay for ever
        book.facts[False].add_ratio(ratio)
        ratios.append(book.facts[False].ratio)
    assert ratios == pytest.approx([1.5, 1.3, 1.3, 1.2, 2.0])
    book.facts[False].peaks[Shape(1, 8)] = MemoryEstimate(peak_bytes=3)
    book.save()
    assert TuningCache.open({}, tmp_path).facts == book.facts
    book.path.write_text(damage)
    assert TuningCache.open({}, tmp_path).facts == (Measurements(), Measurements())


def test_a_row_that_is_not_the_fastest_is_taken_with_its_reason():
    sizes = {Shape(n, 512): 1e-5 * n * 512 * (1.3 if n <= 4 else 1.0) for n in (1, 2, 4, 8, 16, 32)}
    batches = {"longest": 512, "shortest": 512, "batches": [np.full(64, 512)], "num_steps": 1}
    asked = question(Paced(), timed=True, **batches)
    reasons = {0.0: None, 0.4: "are noisy, so that up to 40%", math.inf: "could not be repeated"}
    for noise, reason in reasons.items():
        book = TuningCache(facts=(Measurements(seconds={**sizes}, noise=noise), Measurements()))
        found = tune(asked, book)
        (row,) = [row for row in found.candidates if row.chosen]
        slower = row.seconds_per_step / min(row.seconds_per_step for row in found.candidates) - 1
        assert (slower > 0.1) == (reason is not None)
        assert ("fastest row" in found.method) == (reason is not None)
        if reason is not None:
            assert f"{slower:.0%} above the fastest row" in found.method
            assert reason in found.method


def test_a_group_that_does_not_fit_is_what_the_message_names(book):
    layout = Layout(group_size=4)
    limit = predicted(book, Shape(2, 32))
    with pytest.raises(DoesNotFitError, match=r"^a group of 4 samples.*as long as sample 17 of 32"):
        tune(question(limit=limit, longest_id=17, layout=layout), book)


def damaged_facts() -> Iterator[object]:
    """Give what a cache may hold after somebody altered one value."""
    facts = Measurements(peaks={Shape(2, 8): MemoryEstimate(peak_bytes=30, activations=30)})
    facts.add_timings({Shape(2, 8): 0.5}, noise=0.1)
    good = json.loads(json.dumps(facts.to_dict()))
    peak = good["peaks"][0][2]
    odd = {
        "peaks": [7, [[2, 8, {**peak, "peak_bytes": 10**15}]], [[2, 8, {"peak_bytes": 3}]]],
        "seconds": [[[2, 8, -1.0]], [[2, 8, "fast"]], [[0, 8, 1.0]], {"2": 1}],
        "noise": ["much", -1.0],
        "method": [None],
        "compiled_time": [True, -0.5],
        "compile_s": [10**9],
        "ratio": [0.0, None, 10**9],
    }
    odd["peaks"] += [[[2.5, 8, peak]], [[2, 8, {**peak, "buffers": -1}]]]
    for key, values in odd.items():
        for value in values:
            yield {"facts": [{**good, key: value}, good]}
    yield from ({"facts": [good]}, {"facts": [{**good, "new": 1}, good]}, [good, good])
    yield {"facts": [{k: v for k, v in good.items() if k != "ratio"}, good]}


def test_every_altered_value_of_a_cache_is_found_and_said_and_nothing_of_it_is_believed(
    tmp_path, caplog
):
    path = TuningCache.open({}, tmp_path / "tune").path
    TuningCache(path).save()
    assert (path.parent.stat().st_mode & 0o777) == 0o700
    for content in damaged_facts():
        caplog.clear()
        path.write_text(json.dumps(content))
        assert TuningCache.open({}, tmp_path / "tune").facts == (Measurements(), Measurements()), (
            content
        )
        assert "not used, and measured again" in caplog.text, content


def test_a_pipe_in_place_of_a_cache_is_passed_over(tmp_path, caplog):
    path = TuningCache.open({}, tmp_path).path
    os.mkfifo(path)
    assert TuningCache.open({}, tmp_path).facts == (Measurements(), Measurements())
    assert "not used" in caplog.text


class Repeated(Encoder):
    """Computes what an attribute alone says."""

    def __init__(self, repeats: int = 1, **settings) -> None:
        super().__init__(**settings)
        self.repeats = repeats

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return sum(
            super(Repeated, self).forward(input_ids, attention_mask) for _ in range(self.repeats)
        )


def test_the_cache_is_of_one_precision_optimizer_and_model_whoever_says_what_it_computes():
    def key(model: nn.Module | None = None, precision="fp32", length=8, **changes) -> str:
        torch.manual_seed(1)
        work = replace(workload(model or Encoder()), **changes)
        return json.dumps(describe(work, length, precision, count_compute(work, length)))

    def other_rate(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=9.0, fused=True)

    def plain(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=9.0)

    assert key() == key() == key(make_optimizer=other_rate)
    frozen = Repeated()
    frozen.head.requires_grad_(requires_grad=False)
    models = [Encoder(width=9), Stubborn(), frozen, Repeated(), Repeated(2)]
    others = [key(precision="bf16"), key(length=9), key(make_optimizer=plain)]
    assert len({key(), *others, *map(key, models)}) == 9
