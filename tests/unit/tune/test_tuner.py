"""The tuner end to end: real models, simulated memory, simulated time."""

import json
import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

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
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def book():
    """What is predicted for `SMALL()`, which depends on no budget: each shape runs once."""
    return TuningCache()


def question(model: nn.Module | None = None, limit=10**9, **changes) -> TuningRequest:
    draws = np.random.default_rng(0)
    batches = changes.pop("batches", [draws.choice(LENGTHS, NUM_SAMPLES) for _ in range(3)])
    settings = {
        "work": workload(model or SMALL()),
        "batches": batches,
        "most_samples": max(map(len, batches)),
        "longest": max(LENGTHS),
        "shortest": min(LENGTHS),
        "cut_at": Auto().tuned,
        "layout": Layout(),
        "limit": MemoryLimit(bytes=limit, source="a simulated budget"),
        "timed": False,
    }
    return TuningRequest(**(settings | changes))


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
    assert "memory measured on small micro-batches" in found.method


def test_the_memory_of_shards_that_cannot_run_fake_is_asked_for():
    with torch.device("meta"):
        model = Stubborn()
    with pytest.raises(ConfigError, match=r"on shapes alone; type accum=budget accum\.max"):
        tune(question(model))


def test_what_cannot_fit_names_the_nearest_length_and_memory_that_do(book):
    there, inputs = predicted(book, Shape(1, 16)), 3 * 2**20
    source = "accum.memory, 8% kept free"
    limit = MemoryLimit(bytes=there, source=source, reserve=0.08, inputs=inputs)
    with pytest.raises(DoesNotFitError) as caught:
        tune(replace(question(longest_id=17), limit=limit), book)
    assert "sample 17 of 32 tokens does not fit" in str(caught.value)
    assert "activation_checkpointing=true" in str(caught.value)
    named = re.search(r"accum\.memory=(\d+)MiB .*data\.max_length=(\d+)", str(caught.value))
    memory, length = (int(group) for group in named.groups())
    assert 15 <= length <= 16
    assert predicted(book, Shape(1, length)) <= there
    needed = predicted(book, Shape(1, 32))
    assert int(0.92 * (memory - 1) * 2**20) - inputs < needed
    assert int(0.92 * memory * 2**20) - inputs >= needed


class Curve(nn.Module):
    """Moves a clock by what a position takes in micro-batches of its size."""

    def __init__(self, rates: list[float], fixed: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)
        self.rates, self.fixed, self.now = rates, fixed, np.zeros(1)

    def forward(self, input_ids: Tensor) -> Tensor:
        size = input_ids.numel()
        rate = np.interp(np.log2(size / 512), range(len(self.rates)), self.rates)
        self.now += self.fixed + 1e-5 * size * rate
        return self.head(self.embedding(input_ids))

    def tuned(self, cache: TuningCache | None = None, scale: float = 1.0, **changes) -> Tuning:
        asked = question(self, timed=True, num_steps=10**6, **changes)
        return tune(asked, cache, clock=lambda: scale * float(self.now[0]))


def test_a_cap_as_fast_as_any_is_chosen_and_a_second_run_finds_it_in_the_cache(tmp_path):
    model = Curve([1.0, 3.0, 9.0], fixed=1e-3)
    facts = measurement_key(workload(model), max(LENGTHS), None)
    found = model.tuned(TuningCache.open(facts, tmp_path))
    chosen = [row for row in found.candidates if row.chosen]
    assert [row.max_tokens for row in chosen] == [found.max_tokens] == [512]
    times = {row.max_tokens: row.seconds_per_step for row in found.candidates}
    assert times[512] == min(times.values())
    assert found.cost.seconds_per_token == pytest.approx(1e-5, rel=0.2)
    assert found.cost.fixed == pytest.approx(120, rel=0.2)
    broken = question(nn.Identity(), timed=True)
    again = tune(broken, TuningCache.open(facts, tmp_path))
    assert (again.max_tokens, again.candidates) == (found.max_tokens, found.candidates)
    assert "earlier run" in again.method


FLAT = [1.0] * 6
ODD = [1.3, 1.2, 1.0, 1.15, 1.02, 0.8]  # the last size is the fastest by far
EVEN = {"longest": 512, "shortest": 512, "batches": [np.full(64, 512)]}


@pytest.mark.parametrize(("rates", "cap"), [(FLAT, 2048), (ODD, 16_384)], ids=["flat", "odd"])
def test_the_fastest_cap_is_taken_and_of_equal_ones_the_most_usual(rates, cap):
    found = Curve(rates).tuned(**EVEN)
    (row,) = [row for row in found.candidates if row.chosen]
    assert row.max_tokens == found.max_tokens == cap
    assert row.seconds_per_step <= 1.03 * min(each.seconds_per_step for each in found.candidates)
    assert "within the noise" not in found.method
    assert "timed 6 shapes" in found.method
    assert found.choice == f"as fast as any of {len(found.candidates)} that fit"


def test_a_model_too_slow_for_two_timings_gets_the_usual_cap_and_says_so():
    found = Curve(ODD).tuned(scale=1000, **EVEN)
    assert found.max_tokens == 2048
    assert "too slow to compare sizes" in found.method
    assert found.choice == "the usual size, untimed"


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
    seconds = {Shape(n, 32): 1e-9 / n for n in (1, 4, 16)}
    timed = replace(book.facts[False], seconds=seconds, scatter=0.0)
    assert tuned(TuningCache(facts=(timed, Measurements()))) == found, "what was timed is no matter"
    assert tuned(book, limit=10**8).max_tokens == 256
    assert tuned(book, fixed_cap=8).max_tokens == 32, "the longest sample"
    assert tuned(book, fixed_cap=10**6).max_tokens == NUM_SAMPLES * max(LENGTHS)
    less = tuned(book, limit=found.predicted.peak_bytes - 1, recompute=False)
    assert 200 < less.max_tokens < 256


def test_recomputing_is_chosen_where_it_is_all_that_fits(book):
    single = Shape(1, max(LENGTHS))
    plain, recomputed = predicted(book, single), predicted(book, single, recompute=True)
    assert recomputed < plain
    limit = (recomputed + plain) // 2
    asked = question(recompute="auto", batches=[np.array([32])], limit=limit)
    assert tune(asked, book).activation_checkpointing
    with pytest.raises(DoesNotFitError):
        tune(replace(asked, recompute=False), book)


def test_a_damaged_cache_is_an_empty_one(tmp_path, monkeypatch, caplog):
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
    for damage in ("", "[]", "{}", '{"facts": [{"scatter": -1}, {}]}'):
        book.path.write_text(damage)
        assert TuningCache.open({}, tmp_path / "own").facts == (Measurements(), Measurements())
    assert caplog.text.count("not used, and measured again") == 4


class Repeated(Encoder):
    """Computes what an attribute alone says."""

    def __init__(self, repeats: int = 1, **settings) -> None:
        super().__init__(**settings)
        self.repeats = repeats

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        for _ in range(self.repeats):
            logits = super().forward(input_ids, attention_mask)
        return logits


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
