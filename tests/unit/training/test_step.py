"""The step is a contract: the same update for every cut, and teeth in every check of it."""

from __future__ import annotations

from itertools import count

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
    "whole batch": Fixed(steps=1),
    "one sample each": Fixed(micro=1),
    "micro 3, ragged last": Fixed(micro=3),
    "five even steps": Fixed(steps=5),
    "budget 24": Budget(max_tokens=24),
    "budget 60": Budget(max_tokens=60),
    "budget of at most 2": Budget(max_tokens=60, micro=2),
}
PRECISIONS = [torch.float64, torch.float32]


def gradient(bench: Bench) -> dict[str, Tensor]:
    """The first step's gradient, caught before the update."""
    kept: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        kept.update({n: p.grad.clone() for n, p in bench.module.named_parameters()})

    handle = bench.kit.optimizer.register_step_pre_hook(keep)
    train_step(bench.kit, bench.feed.next(), bench.feed)
    handle.remove()
    return kept


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("normalizer", ["tokens", "samples"])
@pytest.mark.parametrize("name", list(CUTS))
def test_every_cut_gives_the_gradient_of_the_whole_batch_and_a_mean_of_means_does_not(
    name, normalizer, dtype
):
    reference = gradient(Bench(CUTS["whole batch"], dtype, normalizer=normalizer))
    found = gradient(Bench(CUTS[name], dtype, normalizer=normalizer))
    assert relative_error(found, reference) <= EXACT[dtype]
    if name in {"micro 3, ragged last", "budget 60"} and normalizer == "tokens":
        wrong = gradient(Bench(CUTS[name], dtype, normalizer="micro_batches"))
        assert relative_error(wrong, reference) > WRONG


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("name", list(CUTS))
def test_loss_norm_and_weights_agree_for_every_cut_over_several_steps(name, clip_norm):
    whole = Bench(CUTS["whole batch"], clip_norm=clip_norm)
    other = Bench(CUTS[name], clip_norm=clip_norm)
    for _ in range(7):  # crosses the end of an epoch of 40 samples in batches of 16
        expected = train_step(whole.kit, whole.feed.next(), whole.feed)
        found = train_step(other.kit, other.feed.next(), other.feed)
        assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-12)
        assert float(found.grad_norm) == pytest.approx(float(expected.grad_norm), rel=1e-11)
        assert sorted(found.batch.samples.ids) == sorted(expected.batch.samples.ids)
    # AdamW divides by the square root of a tiny second moment, which magnifies rounding.
    assert relative_error(other.parameters(), whole.parameters()) <= 1e-8


def test_the_short_last_batch_has_a_normalizer_of_its_own():
    bench = Bench(Fixed(micro=4))
    for _ in range(2):
        train_step(bench.kit, bench.feed.next(), bench.feed)
    weights = bench.parameters()
    tail = bench.feed.next()
    assert tail.samples.is_tail
    assert len(tail.samples.ids) == 40 - 2 * 16
    alone = Bench(Fixed(steps=1))
    alone.module.load_state_dict(weights)
    batch = alone.loader.load(next(iter(bench.feed.requests(*bench.feed.plan(bench.feed.cursor)))))
    assert batch["input_ids"].shape[0] == 4
    report = train_step(bench.kit, tail, bench.feed)
    terms = sum(m.weights["cross_entropy"] for m in tail.micro_batches)
    total = 0.0
    with torch.no_grad():
        for micro_batch in tail.micro_batches:
            sums = alone.kit.objective.sums(alone.kit.model.call, micro_batch.fields)
            total += float(sums.losses["cross_entropy"])
    assert float(report.loss) == pytest.approx(total / terms, rel=1e-12)


class Poisoned(TinyLM):
    """Gives NaN once, in one chosen forward."""

    def __init__(self, at: int = 2) -> None:
        super().__init__(norm=nn.BatchNorm1d(8))
        self.calls, self.at = count(1), at  # no attribute that is put back with the step

    def forward(self, input_ids: Tensor) -> Tensor:
        is_bad = next(self.calls) == self.at
        return super().forward(input_ids) * (float("nan") if is_bad else 1.0)


@pytest.mark.parametrize("at", [5, 6, 8])
def test_a_step_that_is_not_finite_changes_no_weight_moment_or_buffer(at):
    bench = Bench(Fixed(micro=4), model=lambda: Poisoned(at))
    train_step(bench.kit, bench.feed.next(), bench.feed)
    before = {name: value.clone() for name, value in bench.module.state_dict().items()}
    moments = {
        (index, name): value.clone()
        for index, state in enumerate(bench.kit.optimizer.state.values())
        for name, value in state.items()
    }
    report = train_step(bench.kit, bench.feed.next(), bench.feed)
    assert report.skipped == NOT_FINITE
    after = bench.module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    for index, state in enumerate(bench.kit.optimizer.state.values()):
        assert all(torch.equal(value, moments[index, name]) for name, value in state.items())
    assert train_step(bench.kit, bench.feed.next(), bench.feed).skipped is None


class Failing(GradientStrategy):
    """Runs out of memory once, at one phase of one micro-batch."""

    def __init__(self, at: int, phase: str) -> None:
        self.at, self.phase, self.done = at, phase, False

    def backward(self, model, objective, micro_batches, divisors, sync):
        if self.done:
            return Sum().backward(model, objective, micro_batches, divisors, sync)
        self.done = True
        if self.phase == "between":
            Sum().backward(model, objective, micro_batches[: self.at], divisors[: self.at], sync)
            raise torch.OutOfMemoryError("injected")
        parameter = next(iter(model.module.parameters()))
        seen = 0

        def count(*_: object) -> None:
            nonlocal seen
            seen += 1
            if seen > self.at:
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

        register = (
            model.module.register_forward_hook
            if self.phase == "forward"
            else parameter.register_hook
        )
        handle = register(count)
        try:
            return Sum().backward(model, objective, micro_batches, divisors, sync)
        finally:
            handle.remove()


@pytest.mark.parametrize("phase", ["forward", "backward", "between"])
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_running_out_of_memory_replays_the_same_batch_bit_for_bit(at, phase, dtype):
    def model() -> nn.Module:
        return TinyLM(dropout=0.3)

    cut = Budget(max_tokens=90)
    failing = Bench(cut, dtype, model=model, strategy=Failing(at, phase))
    report = train_step(failing.kit, failing.feed.next(), failing.feed)
    assert report.replays == 1
    finer = failing.feed.cut
    assert finer != cut
    reference = Bench(finer, dtype, model=model)
    train_step(reference.kit, reference.feed.next(), reference.feed)
    for _ in range(2):
        train_step(failing.kit, failing.feed.next(), failing.feed)
        train_step(reference.kit, reference.feed.next(), reference.feed)
    expected = reference.module.state_dict()
    assert all(
        torch.equal(value, expected[name]) for name, value in failing.module.state_dict().items()
    )
    coarse = Bench(cut, dtype, model=model)
    for _ in range(3):
        train_step(coarse.kit, coarse.feed.next(), coarse.feed)
    other = coarse.module.state_dict()
    assert any(not torch.equal(value, other[name]) for name, value in expected.items())


@pytest.mark.parametrize("norm", ["batch", "frozen"])
def test_where_statistics_are_a_micro_batch_s_own_it_is_tried_again_and_not_cut(norm):
    def model() -> nn.Module:
        built = TinyLM(dropout=0.3, norm=nn.BatchNorm1d(8))
        built.norm.train(norm == "batch")
        return built

    failing = Bench(Fixed(micro=4), model=model, strategy=Failing(1, "backward"))
    for replays in (1, 0):
        assert train_step(failing.kit, failing.feed.next(), failing.feed).replays == replays
    assert failing.feed.cut == Fixed(micro=4 if norm == "batch" else 2)
    reference = Bench(failing.feed.cut, model=model)
    for _ in range(2):
        train_step(reference.kit, reference.feed.next(), reference.feed)
    expected = reference.module.state_dict()
    assert all(torch.equal(v, expected[n]) for n, v in failing.module.state_dict().items())


class NeverFits(GradientStrategy):
    def backward(self, model, objective, micro_batches, divisors, sync):
        raise torch.OutOfMemoryError("injected")


@pytest.mark.parametrize("cut", [Fixed(micro=5), Budget(max_tokens=90)], ids=["fixed", "budget"])
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
        ({"normalizer": "micro_batches"}, "a mean of means changes with the cut"),
    ],
    ids=["BatchNorm", "a mean of means"],
)
def test_what_is_bound_to_its_cut_ends_when_memory_runs_out_twice(settings, why):
    class Counted(NeverFits):
        calls = 0

        def backward(self, *args):
            self.calls += 1
            super().backward(*args)

    strategy = Counted()
    bench = Bench(Fixed(micro=5), strategy=strategy, **settings)
    with pytest.raises(DoesNotFitError, match=rf"step 1: out of memory twice, and {why}.*micro"):
        train_step(bench.kit, bench.feed.next(), bench.feed)
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
    bench = Bench(Fixed(micro=3), model=lambda: Late(name))
    with pytest.raises(ConfigError, match=f"model: {name} is a parameter made in forward"):
        train_step(bench.kit, bench.feed.next(), bench.feed)


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
    steps = []
    for cut in (Fixed(micro=16), Budget(max_tokens=60)):
        bench = Bench(cut, model=Turning, clip_norm=1e-3)
        report = train_step(bench.kit, bench.feed.next(), bench.feed)
        steps.append(bench.parameters())
        assert report.grad_norm > WRONG
    first, second = steps
    assert first["turn"].is_complex()
    assert all(torch.allclose(first[n], second[n], rtol=0, atol=1e-9) for n in first)
