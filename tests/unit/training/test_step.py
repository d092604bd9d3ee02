"""The step is a contract: the same update for every cut, and teeth in every check of it."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.lib.support import EXACT, WRONG, Bench, TinyLM, relative_error
from trainer.accumulate.base import GradientStrategy
from trainer.accumulate.sum import Sum
from trainer.core.errors import ConfigError, DoesNotFitError
from trainer.plan.cut import Cut
from trainer.plan.cuts import Budget, Fixed
from trainer.training.step import NOT_FINITE, train_step

CUTS: dict[str, Cut] = {
    "one sample each": Fixed(micro=1),
    "micro 3, ragged last": Fixed(micro=3),
    "five even steps": Fixed(steps=5),
    "budget 24": Budget(max_tokens=24),
    "budget 60": Budget(max_tokens=60),
    "budget of at most 2": Budget(max_tokens=60, micro=2),
}
WHOLE = Fixed(steps=1)


@pytest.fixture(autouse=True)
def _collects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failed allocation would look through all objects of the test process."""
    monkeypatch.setattr("trainer.core.out_of_memory.gc", SimpleNamespace(collect=lambda: 0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("normalizer", ["tokens", "samples"])
def test_every_cut_gives_the_gradient_of_the_whole_batch_and_a_mean_of_means_does_not(
    normalizer, dtype
):
    reference, _ = Bench(WHOLE, dtype, normalizer=normalizer).gradient_and_loss()
    for cut in CUTS.values():
        found, _ = Bench(cut, dtype, normalizer=normalizer).gradient_and_loss()
        assert relative_error(found, reference) <= EXACT[dtype], cut
    if normalizer == "tokens":
        for name in ("micro 3, ragged last", "budget 60"):
            wrong, _ = Bench(CUTS[name], dtype, normalizer="micro_batches").gradient_and_loss()
            assert relative_error(wrong, reference) > WRONG


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_loss_norm_and_weights_agree_for_every_cut_over_several_steps(cut):
    whole, other = (Bench(each, clip_norm=0.05) for each in (WHOLE, cut))
    for _ in range(7):  # crosses the end of an epoch of 40 samples in batches of 16
        expected, found = whole.step(), other.step()
        assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-12)
        assert float(found.grad_norm) == pytest.approx(float(expected.grad_norm), rel=1e-11)
        assert sorted(found.batch.samples.ids) == sorted(expected.batch.samples.ids)
    # AdamW divides by the square root of a tiny second moment, which magnifies rounding.
    assert relative_error(other.parameters(), whole.parameters()) <= 1e-8


def test_the_short_last_batch_has_a_normalizer_of_its_own():
    bench = Bench(Fixed(micro=4))
    for _ in range(2):
        bench.step()
    tail = bench.feed.next()
    assert tail.samples.is_tail
    assert len(tail.samples.ids) == 40 - 2 * 16
    terms, total = sum(m.weights["cross_entropy"] for m in tail.micro_batches), 0.0
    with torch.no_grad():
        for micro_batch in tail.micro_batches:
            sums = bench.kit.objective.sums(bench.kit.model.call, micro_batch.fields)
            total += float(sums.losses["cross_entropy"])
    report = train_step(bench.kit, tail, bench.feed)
    assert float(report.loss) == pytest.approx(total / terms, rel=1e-12)


class Poisoned(TinyLM):
    """Gives NaN once, in one chosen forward."""

    def __init__(self, at: int) -> None:
        super().__init__(norm=nn.BatchNorm1d(8))
        self.calls, self.at = count(1), at  # no attribute that is put back with the step

    def forward(self, input_ids: Tensor) -> Tensor:
        is_bad = next(self.calls) == self.at
        return super().forward(input_ids) * (float("nan") if is_bad else 1.0)


def everything(bench: Bench) -> dict[object, Tensor]:
    """Copies of weights, buffers and moments."""
    moments = {
        (index, name): value
        for index, state in enumerate(bench.kit.optimizer.state.values())
        for name, value in state.items()
    }
    return {k: v.clone() for k, v in {**bench.module.state_dict(), **moments}.items()}


def assert_same_bits(found: dict[object, Tensor], expected: dict[object, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("at", [5, 8])
def test_a_step_that_is_not_finite_changes_no_weight_moment_or_buffer(at):
    bench = Bench(Fixed(micro=4), model=lambda: Poisoned(at))
    bench.step()
    before = everything(bench)
    assert bench.step().skipped == NOT_FINITE
    assert_same_bits(everything(bench), before)
    assert bench.step().skipped is None


class Failing(GradientStrategy):
    """Runs out of memory once, at one phase of one micro-batch."""

    def __init__(self, at: int, phase: str) -> None:
        self.at, self.phase, self.done = at, phase, False

    def backward(self, model, objective, micro_batches, divisors, sync):
        if self.done:
            return Sum().backward(model, objective, micro_batches, divisors, sync)
        self.done, passed = True, count(1)
        if self.phase == "between":
            Sum().backward(model, objective, micro_batches[: self.at], divisors[: self.at], sync)
            raise torch.OutOfMemoryError("injected")

        def fail(*_: object) -> None:
            if next(passed) > self.at:
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

        place = model.module.register_forward_hook
        if self.phase == "backward":
            place = next(iter(model.module.parameters())).register_hook
        handle = place(fail)
        try:
            return Sum().backward(model, objective, micro_batches, divisors, sync)
        finally:
            handle.remove()


@pytest.mark.parametrize(
    ("at", "phase", "dtype"),
    [
        (0, "forward", torch.float64),
        (1, "backward", torch.float64),
        (3, "forward", torch.float32),
        (3, "between", torch.float64),
    ],
)
def test_running_out_of_memory_replays_the_same_batch_bit_for_bit(at, phase, dtype):
    def bench(cut: Cut, **more: GradientStrategy) -> Bench:
        return Bench(cut, dtype, model=lambda: TinyLM(dropout=0.3), **more)

    cut = Budget(max_tokens=90)
    failing = bench(cut, strategy=Failing(at, phase))
    assert failing.step().replays == 1
    finer = failing.feed.cut
    assert finer != cut
    reference, coarse = bench(finer), bench(cut)
    for each in (failing, failing, reference, reference, reference, coarse, coarse, coarse):
        each.step()
    assert_same_bits(everything(failing), everything(reference))
    with pytest.raises(AssertionError):
        assert_same_bits(everything(failing), everything(coarse))


@pytest.mark.parametrize("norm", ["batch", "frozen"])
def test_where_statistics_are_a_micro_batch_s_own_it_is_tried_again_and_not_cut(norm):
    def model() -> nn.Module:
        built = TinyLM(dropout=0.3, norm=nn.BatchNorm1d(8))
        built.norm.train(norm == "batch")
        return built

    failing = Bench(Fixed(micro=4), model=model, strategy=Failing(1, "backward"))
    assert [failing.step().replays for _ in range(2)] == [1, 0]
    assert failing.feed.cut == Fixed(micro=4 if norm == "batch" else 2)
    reference = Bench(failing.feed.cut, model=model)
    for _ in range(2):
        reference.step()
    assert_same_bits(everything(failing), everything(reference))


class NeverFits(GradientStrategy):
    calls = 0

    def backward(self, model, objective, micro_batches, divisors, sync):
        self.calls += 1
        raise torch.OutOfMemoryError("injected")


@pytest.mark.parametrize("cut", [Fixed(micro=2), Budget(max_tokens=24)], ids=["fixed", "budget"])
def test_one_sample_that_does_not_fit_is_named_with_its_length(cut):
    bench = Bench(cut, strategy=NeverFits())
    batch = bench.feed.next()
    sample, length = batch.largest_sample()
    with pytest.raises(DoesNotFitError, match=f"sample {sample} of {length} tokens"):
        train_step(bench.kit, batch, bench.feed)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"model": lambda: TinyLM(norm=nn.BatchNorm1d(8))}, "norm is BatchNorm, which normalises"),
        ({"normalizer": "micro_batches"}, "a mean of means depends on the micro-batch size"),
    ],
    ids=["BatchNorm", "a mean of means"],
)
def test_what_is_bound_to_its_cut_ends_when_memory_runs_out_twice(settings, why):
    strategy = NeverFits()
    bench = Bench(Fixed(micro=5), strategy=strategy, **settings)
    with pytest.raises(DoesNotFitError, match=rf"step 1: out of memory twice, and {why}.*micro"):
        bench.step()
    assert strategy.calls == 2
    assert bench.feed.cut == Fixed(micro=5)


class Late(TinyLM):
    """Makes a parameter in its first forward, or another one in place of one that it had."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.is_new = name, True

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.is_new:
            part, _, name = self.name.rpartition(".")
            setattr(self.get_submodule(part), name, nn.Parameter(torch.ones(8).double()))
            self.is_new = False
        return super().forward(input_ids)


@pytest.mark.parametrize("name", ["scale", "norm.weight"])
def test_a_parameter_that_no_optimizer_knows_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"model: forward creates the parameter {name}"):
        Bench(Fixed(micro=3), model=lambda: Late(name)).step()


class Turning(TinyLM):
    """Begins with a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        turn = nn.Parameter(torch.randn(8, dtype=torch.complex128))
        self._parameters = {"turn": turn, **self._parameters}

    def to(self, dtype: torch.dtype) -> Turning:  # that of `nn.Module` drops imaginary parts
        return self._apply(lambda t: t if t.is_complex() else t.to(dtype))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head((self.norm(self.mix(self.embed(input_ids))[0]) * self.turn).imag)


def test_complex_gradients_are_clipped_with_the_others():
    benches = [Bench(c, model=Turning, clip_norm=1e-3) for c in (WHOLE, Budget(max_tokens=60))]
    assert all(bench.step().grad_norm > WRONG for bench in benches)
    first, second = (bench.parameters() for bench in benches)
    assert first["turn"].is_complex()
    assert all(torch.allclose(first[n], second[n], rtol=0, atol=1e-9) for n in first)
