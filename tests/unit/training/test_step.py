"""The step is a contract: the same update for every cut, and teeth in every check of it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.lib.looks import looks_of_a_step
from tests.lib.support import EXACT, WRONG, Bench, Failing, TinyLM, relative_error
from trainer.accumulate.sum import Sum
from trainer.core.coupling import Coupling
from trainer.core.errors import ConfigError
from trainer.plan.cuts import Budget, Fixed
from trainer.plan.traffic import ModelBytes
from trainer.training.step import train_step
from trainer.training.window import remedies

UNEVEN = Fixed(micro=3)


@pytest.mark.parametrize("normalizer", ["tokens", "samples"])
def test_every_cut_gives_the_gradient_of_the_whole_batch_and_a_mean_of_means_does_not(
    normalizer,
):
    reference, _ = Bench(Fixed(steps=1), normalizer=normalizer).gradient_and_loss()
    for cut in (UNEVEN, Fixed(steps=5), Budget(max_tokens=24), Budget(max_tokens=60, micro=2)):
        found, _ = Bench(cut, normalizer=normalizer).gradient_and_loss()
        assert relative_error(found, reference) <= EXACT[torch.float64], cut
    wrong, _ = Bench(UNEVEN, normalizer="micro_batches").gradient_and_loss()
    assert relative_error(wrong, reference) > WRONG


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
            sums = bench.objective.sums(bench.context.parallel.call, micro_batch.fields)
            total += float(sums.losses["cross_entropy"])
    report = train_step(bench.context, tail, bench.feed)
    assert float(report.loss) == pytest.approx(total / terms, rel=1e-12)


@pytest.mark.parametrize(("kind", "micro"), [("micro_batch", 4), ("none", 2)])
def test_only_a_layer_that_couples_its_own_micro_batch_binds_the_cut(kind, micro):
    def model() -> nn.Module:
        built = TinyLM(norm=nn.BatchNorm1d(8))
        built.norm.coupling = Coupling(kind)
        return built

    bench = Bench(Fixed(micro=4), model=model, strategy=Failing(1, "backward"))
    assert [bench.step().replays for _ in range(2)] == [1, 0]
    assert bench.feed.cut == Fixed(micro=micro)


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


TOO_LARGE = ModelBytes(mode="fsdp", model_bytes=8, shard=2, replicas=1, limit_bytes=1)


def test_what_to_type_after_memory_ran_out_in_lockstep_is_less_than_what_there_was():
    for cut, normalizer, says in (
        (Budget(max_tokens=60), "tokens", "type accum=budget accum.max_tokens="),
        (Fixed(micro=1), "tokens", "lower data.max_length"),
        (Fixed(micro=4), "micro_batches", "lower accum.micro"),
    ):
        bench = Bench(cut, normalizer=normalizer)
        batch = bench.feed.next()
        text = remedies(bench.context, batch)
        assert text.startswith(says)
        assert text.endswith(", or type sync=deferred")
        if says.endswith("="):
            cap = int(text.removeprefix(says).partition(",")[0])
            assert batch.largest_sample()[1] <= cap < batch.plan.max_shared_positions
        setup = replace(bench.context.model.setup, sizes=TOO_LARGE)
        model = replace(bench.context.model, setup=setup)
        assert f"{remedies(replace(bench.context, model=model), batch)}, or" in text


def test_the_host_looks_at_the_device_once_a_step():
    bench = Bench(Fixed(micro=3), torch.float32, clip_norm=0.1)
    assert looks_of_a_step(bench) == ["__bool__"]


def test_a_look_more_is_seen():
    class Logging(Sum):
        def walk(self, *args, **how):
            found = super().walk(*args, **how)
            return replace(found, loss=torch.tensor(float(found.loss), device=found.loss.device))

    bench = Bench(Fixed(micro=3), torch.float32, clip_norm=0.1, strategy=Logging())
    assert looks_of_a_step(bench) == ["__float__", "tensor", "__bool__"]
