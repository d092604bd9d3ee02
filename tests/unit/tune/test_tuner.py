"""The tuner end to end: real models, simulated memory, simulated time."""

import json
import math
import re
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from tests.lib.nightly import nightly
from tests.lib.tune_support import VOCABULARY, Encoder, Stubborn, measured_peak, workload
from trainer.core.errors import ConfigError, DoesNotFitError
from trainer.optim.optimizers import AdamW, OwnOptimizer
from trainer.plan.cut import Cost, Layout
from trainer.plan.cuts import Auto
from trainer.plan.memory import Shape
from trainer.tune import tuner
from trainer.tune.cache import Measurements, TuningCache, measurement_key
from trainer.tune.flops import count_compute
from trainer.tune.memory_limit import MemoryLimit
from trainer.tune.peak_bytes import MemoryEstimate
from trainer.tune.predict import predict_peak
from trainer.tune.request import Tuning, TuningRequest

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


def test_a_cap_as_fast_as_any_is_chosen_and_a_second_run_finds_it_in_the_cache(tmp_path):
    model = Paced(best=256)
    asked = question(model, timed=True, num_steps=10**6)
    facts = measurement_key(asked.work, asked.longest, None)
    found = tune(asked, TuningCache.open(facts, tmp_path), clock=model.clock)
    assert found.max_tokens <= 512
    chosen = [row for row in found.candidates if row.chosen]
    assert [row.max_tokens for row in chosen] == [found.max_tokens]
    times = {row.max_tokens: row.seconds_per_step for row in found.candidates}
    assert times[found.max_tokens] <= 1.03 * min(times.values())
    assert all(s > 1.03 * min(times.values()) for cap, s in times.items() if cap > 512)
    assert found.cost.seconds_per_token == pytest.approx(1e-5, rel=0.2)
    assert found.cost.fixed == pytest.approx(120, rel=0.2)
    broken = question(nn.Identity(), timed=True)
    again = tune(broken, TuningCache.open(facts, tmp_path))
    assert (again.max_tokens, again.candidates) == (found.max_tokens, found.candidates)
    assert "earlier run" in again.method


FLAT = [1.0] * 6
ODD = [1.3, 1.2, 1.0, 1.15, 1.02, 0.8]  # the last size is the fastest by far
SLOWED = [1.25, 1.2, 1.12, 1.0, 1.05, 1.4]  # larger ones leave the cache


class Curve(nn.Module):
    """Moves a clock by what a position takes in micro-batches of its size, noisy at will."""

    def __init__(self, rates: list[float], noise: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)
        self.rates, self.noise = rates, noise
        self.now, self.draws = np.zeros(1), np.random.default_rng(0)

    def forward(self, input_ids: Tensor) -> Tensor:
        size = input_ids.numel()
        rate = np.interp(np.log2(size / 512), range(len(self.rates)), self.rates)
        self.now += 1e-5 * size * rate * (1.0 + self.draws.exponential(self.noise or 1e-9))
        return self.head(self.embedding(input_ids))

    def tuned(self, scale: float = 1.0) -> Tuning:
        lengths = {"longest": 512, "shortest": 512, "batches": [np.full(64, 512)]}
        asked = question(self, timed=True, num_steps=10**6, **lengths)
        return tune(asked, clock=lambda: scale * float(self.now[0]))


@pytest.mark.parametrize(
    ("rates", "cap"), [(FLAT, 2048), (ODD, 16_384), (SLOWED, 4096)], ids=["flat", "odd", "slowed"]
)
def test_the_fastest_cap_is_taken_and_of_equal_ones_the_most_usual(rates, cap):
    found = Curve(rates).tuned()
    (row,) = [row for row in found.candidates if row.chosen]
    fastest = min(row.seconds_per_step for row in found.candidates)
    assert row.max_tokens == found.max_tokens == cap
    assert row.seconds_per_step <= 1.03 * fastest
    assert "above the fastest" not in found.method
    assert "timed 6 shapes" in found.method


def test_a_model_too_slow_for_two_timings_gets_the_usual_cap_and_says_so():
    found = Curve(ODD).tuned(scale=1000)
    assert found.max_tokens == 2048
    assert "too slow to compare sizes: the most usual one is taken" in found.method


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
    facts = Measurements(peaks=peaks, seconds=seconds, scatter=0.0)
    timed = TuningCache(facts=(replace(facts, method=book.facts[False].method), Measurements()))
    assert tuned(timed) == found, "what was timed before counts as little"
    assert replace(tuned(book, limit=10**8), method="", limit_bytes=0) == replace(
        found, method="", limit_bytes=0
    )
    assert tuned(book, fixed_cap=8).max_tokens == 32, "the longest sample"
    assert tuned(book, fixed_cap=10**6).max_tokens == NUM_SAMPLES * max(LENGTHS)
    less = tuned(book, limit=found.predicted.peak_bytes - 1, recompute=False)
    assert 200 < less.max_tokens < 256


def test_recomputing_is_chosen_where_it_is_all_that_fits(book):
    asked = question(recompute="auto", batches=[np.array([32])])
    single = Shape(1, max(LENGTHS))
    plain, recomputed = predicted(book, single), predicted(book, single, recompute=True)
    assert recomputed < plain
    between = MemoryLimit(bytes=(recomputed + plain) // 2, source="a simulated budget")
    assert tune(replace(asked, limit=between), book).activation_checkpointing
    with pytest.raises(DoesNotFitError):
        tune(replace(asked, limit=between, recompute=False), book)


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        '{"facts": [{"peaks": [[1, 2]]}]}',
        '{"facts": [{"scatter": -1}, {}]}',
        '{"facts": 7}',
    ],
)
def test_a_damaged_cache_is_an_empty_one(tmp_path, monkeypatch, caplog, damage):
    monkeypatch.setenv("TRAIN_CACHE", str(tmp_path))
    assert TuningCache.open({}).path.parent == tmp_path / "tune"
    (tmp_path / "file").write_text("in the way")
    TuningCache.open({}, tmp_path / "file" / "below").save()  # that is no failure
    book = TuningCache.open({}, tmp_path / "own")
    for seconds in (0.5, 0.3, 0.7):  # other programs only ever add time
        book.facts[False].add_timings({Shape(1, 8): seconds}, scatter=math.inf)
    assert book.facts[False].seconds == {Shape(1, 8): 0.3}
    book.facts[False].peaks[Shape(1, 8)] = MemoryEstimate(peak_bytes=3)
    book.save()
    assert (book.path.parent.stat().st_mode & 0o777) == 0o700
    assert TuningCache.open({}, tmp_path / "own").facts == book.facts
    book.path.write_text(damage)
    assert TuningCache.open({}, tmp_path / "own").facts == (Measurements(), Measurements())
    assert "not used, and measured again" in caplog.text


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
    def key(model: nn.Module | None = None, length=8, ema_decay=None, **changes) -> str:
        torch.manual_seed(1)
        work = replace(workload(model or Encoder(), **changes), ema_decay=ema_decay)
        return json.dumps(measurement_key(work, length, count_compute(work, length)))

    plain = OwnOptimizer.of(torch.optim.SGD, {"lr": 9.0})
    assert key() == key() == key(spec=AdamW(lr=9.0))
    frozen = Repeated()
    frozen.head.requires_grad_(requires_grad=False)
    models = [Encoder(width=9), Stubborn(), frozen, Repeated(), Repeated(2)]
    others = [key(precision="bf16"), key(length=9), key(spec=plain)]
    others += [key(ema_decay=0.9)]
    assert len({key(), *others, *map(key, models)}) == 10
