"""A loss over the whole batch, in two passes of one's own, is that of one piece for every cut."""

import shlex
from pathlib import Path

import numpy as np
import pytest

from tests.lib.nightly import slow
from tests.lib.pair_toys import gradient_of
from tests.lib.run_support import go, overrides, read_json, shell, state
from trainer.accumulate.two_pass import TwoPass
from trainer.core.errors import ConfigError
from trainer.core.world import World
from trainer.features.contrastive.contrastive import Contrastive
from trainer.plan.cut import Cut
from trainer.plan.cuts import Fixed

MINE = """
import torch
import torch.nn.functional as F

from tests.lib.run_toys import Net
from trainer.accumulate.base import Computed, GradientStrategy, Pass, divided
from trainer.core.coupling import Coupling
from trainer.objectives.base import Objective, Sums


class Contrast(Objective):  # each query is to find its document among those of the batch
    coupling = Coupling("batch", why="every sample is a negative of every other")

    def weights(self, fields):
        return {"contrast": float(len(fields["input_ids"]))}

    def sums_of_rows(self, rows):
        scores = F.normalize(rows["query"]) @ F.normalize(rows["document"]).T / 0.3
        own = torch.arange(len(scores))
        return Sums(losses={"contrast": F.cross_entropy(scores, own, reduction="sum")})

    def sums(self, model, fields):
        return self.sums_of_rows(model(fields))


class Embed(Pass):
    records_gradients = False

    def micro_batch(self, model, objective, micro_batch, divisors, rows):
        return Computed(rows=model.call(micro_batch.fields))


class TwoPass(GradientStrategy):
    couplings = frozenset({"batch"})
    before = (Embed(),)

    def combine(self, objective, rows, divisors):
        rows = {name: row.requires_grad_() for name, row in rows.items()}
        loss = divided(objective.sums_of_rows(rows).losses, divisors)
        gradients = torch.autograd.grad(loss, [*rows.values()])
        return Computed(loss=loss, rows=dict(zip(rows, gradients)))

    def micro_batch(self, model, objective, micro_batch, divisors, rows):
        again = model.call(micro_batch.fields)
        sum((again[name] * rows[name]).sum() for name in rows).backward()
        return Computed()


class Once(GradientStrategy):  # right for a batch in one piece alone
    couplings = frozenset({"batch"})

    def micro_batch(self, model, objective, micro_batch, divisors, rows):
        loss = divided(objective.sums(model.call, micro_batch.fields).losses, divisors)
        loss.backward()
        return Computed(loss=loss)


class Whole(Net):
    coupling = Coupling("batch", why="it subtracts the mean of the batch")


class Watch:
    def on_step(self, step):
        pass
"""
LINE = (
    "model._target_=tests.lib.pair_toys.DoubleTowers data._target_=tests.lib.pair_toys.Pairs "
    "objective._target_=mine.Contrast optimizer=sgd optimizer.momentum=0 optimizer.lr=1 "
    "scheduler=constant clip_norm=null steps=1"
)


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder")
def test_two_files_add_it_and_sum_is_refused():
    Path("mine.py").write_text(MINE)
    option = Path("my_conf/accum/gradient/two.yaml")
    option.parent.mkdir(parents=True)
    option.write_text("_target_: mine.TwoPass\n")
    one = go(f"{LINE} accum.gradient._target_=mine.Once accum.micro=8 hooks=[mine.Watch]")
    two = go(f"{LINE} accum.gradient=two", config_dir="my_conf")
    plans = [read_json(run.folder / "plan.json") for run in (one, two)]
    assert [plan["named_classes"] for plan in plans] == [["mine.Once", "mine.Watch"], []]
    for plan in plans:
        assert any("held-out losses depend on the cut" in text for text in plan["warnings"])
    for name, tensor in state(one).items():
        if name.startswith("model."):
            gap = float((state(two)[name] - tensor).abs().max())
            assert gap <= 1e-12 * float(tensor.abs().max()), name
    two = f"{LINE} accum.gradient=two"
    overlapped = "command=plan sync=overlapped parallel=ddp parallel.ranks=2"
    for typed, words in {
        LINE: r"Sum is wrong for Contrast, which .*: derive it from C",
        "model._target_=mine.Whole": "Sum is wrong for Whole, whose coupling is batch",
        f"{two} {overlapped}": "sync=overlapped: .* TwoPass has several passes",
        f"{two} batch.normalizer=micro_batches": "has no means of micro-batches",
    }.items():
        with pytest.raises(ConfigError, match=words):
            go(typed, config_dir="my_conf")
    for strategy, code in (("=two", 0), ("._target_=mine.Once", 9)):
        typed = shlex.join(overrides(f"{LINE} accum.gradient{strategy}"))
        assert shell(f"verify --config-dir my_conf {typed}") == code


def struck(world: World, cut: Cut, mode: str, at: int | None = None):
    """Take a step in which memory runs out in a forward of the last rank."""
    objective, is_last = Contrastive(), world.rank == world.size - 1
    how = {"mode": mode, "dropout": 0.2, "at": at if is_last else None}
    return gradient_of(world, cut, objective, TwoPass(objective), **how)


@pytest.mark.parametrize(("mode", "at"), [("ddp", 2), slow("fsdp", 3)])
def test_memory_that_runs_out_in_either_pass_is_replayed_bit_for_bit(mode, at, ranks):
    # Each rank has two micro-batches of four.
    given = ranks.run(2, struck, Fixed(micro=4), mode, at)
    smaller = ranks.run(2, struck, Fixed(micro=2), mode)
    for (found, loss, replays), (expected, right, _) in zip(given, smaller, strict=True):
        assert (replays, loss) == (1, right)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
