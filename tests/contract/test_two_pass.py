"""A loss over the whole batch, in two passes of one's own, is that of one piece for every cut."""

import runpy
import shlex
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.lib.nightly import nightly, slow
from tests.lib.ranks_support import Ranks
from tests.lib.ranks_work import MODES, POLICIES, BlockLM, error, plain
from tests.lib.run_support import TOYS, go, overrides, read_json, shell, state
from tests.lib.support import Bench, replicated
from trainer.core.errors import ConfigError
from trainer.core.world import World
from trainer.plan.cut import Cut
from trainer.plan.cuts import Budget, Fixed
from trainer.training.step import train_step

EXACT, WRONG = 1e-12, 1e-3

MINE = """
import torch
import torch.nn.functional as F

from trainer.accumulate.base import Computed, GradientStrategy, Pass, divided
from trainer.core.coupling import Coupling
from trainer.objectives.base import Objective, Sums, logits_from


class Contrast(Objective):  # symmetric InfoNCE between two views of every sample
    coupling = Coupling("batch", why="every sample is a negative of every other")

    def weights(self, fields):
        return {"contrast": float(len(fields["labels"]))}

    def embed(self, model, fields):
        logits = logits_from(model, fields)
        is_real = (torch.arange(logits.shape[1]) < fields["lengths"][:, None])[..., None]
        views = {"one": logits, "other": torch.tanh(logits).flip(-1)}
        return {name: (view * is_real).sum(1) for name, view in views.items()}

    def sums_of_rows(self, rows):
        scores = F.normalize(rows["one"]) @ F.normalize(rows["other"]).T / 0.3
        own = torch.arange(len(scores))
        both = [F.cross_entropy(each, own, reduction="sum") for each in (scores, scores.T)]
        return Sums(losses={"contrast": sum(both) / 2})

    def sums(self, model, fields):
        return self.sums_of_rows(self.embed(model, fields))


class Embed(Pass):
    records_gradients = False

    def micro_batch(self, model, objective, micro_batch, divisors, rows):
        return Computed(rows=objective.embed(model.call, micro_batch.fields))


class TwoPass(GradientStrategy):
    couplings = frozenset({"batch"})
    before = (Embed(),)

    def combine(self, objective, rows, divisors):
        rows = {name: row.requires_grad_() for name, row in rows.items()}
        loss = divided(objective.sums_of_rows(rows).losses, divisors)
        gradients = torch.autograd.grad(loss, [*rows.values()])
        return Computed(loss=loss, rows=dict(zip(rows, gradients)))

    def micro_batch(self, model, objective, micro_batch, divisors, rows):
        again = objective.embed(model.call, micro_batch.fields)
        sum((again[name] * rows[name]).sum() for name in rows).backward()
        return Computed()


class Once(GradientStrategy):  # right for a batch in one piece alone
    couplings = frozenset({"batch"})

    def micro_batch(self, model, objective, micro_batch, divisors, rows):
        loss = divided(objective.sums(model.call, micro_batch.fields).losses, divisors)
        loss.backward()
        return Computed(loss=loss)
"""


class Lengthy:
    """Rows that say how long they are, so that padding is left out of a sum."""

    draws_randomness = False

    def __init__(self, data) -> None:
        self.data, self.lengths = data, data.lengths

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int):
        sample = self.data[index]
        return {**sample, "lengths": torch.tensor(len(sample["input_ids"]))}


class Striking(BlockLM):
    """Runs out of memory in one of its forwards."""

    def __init__(self, at: int | None, dropout: float) -> None:
        super().__init__(dropout)
        self.at, self.calls = at, 0

    def forward(self, input_ids):
        self.calls += 1
        if self.calls == self.at:
            raise torch.OutOfMemoryError("injected")
        return super().forward(input_ids)


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("mine") / "mine.py"
    path.write_text(MINE)
    return str(path)


@pytest.fixture(scope="module")
def ranks():
    started = Ranks()
    yield started
    started.close()


def gradient(
    world: World,
    mine: str,
    cut: Cut,
    *,
    strategy: str = "TwoPass",
    mode: str = "ddp",
    sync: str = "deferred",
    dropout: float = 0.0,
    at: int | None = None,
):
    """Take a step of a contrastive loss; gives its gradient, loss and replays.

    `at` is the forward of the last rank that runs out of memory.
    """
    own, is_last = runpy.run_path(mine), world.rank == world.size - 1
    bench = Bench(
        cut,
        dataset=Lengthy(Bench(cut).dataset),
        model=partial(Striking, at if is_last else None, dropout),
        objective=own["Contrast"](),
        strategy=own[strategy](),
        world=world,
        lay_out=MODES[mode] if world.size > 1 else replicated,
        sync=POLICIES[sync](),
    )
    found = {}

    def keep(*_: object) -> None:
        named = bench.module.named_parameters()
        found.update({n: None if p.grad is None else plain(p.grad) for n, p in named})

    bench.context.optimizer.register_step_pre_hook(keep)
    report = train_step(bench.context, bench.feed.next(), bench.feed)
    bench.feed.close()
    return found, float(report.loss), report.replays


CUTS = [Fixed(micro=1), Fixed(micro=3), Budget(max_tokens=60)]


@pytest.fixture(scope="module")
def whole(mine):
    return gradient(World(), mine, Fixed(steps=1), strategy="Once")


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_two_passes_are_exact_for_every_cut_and_one_is_not(cut, mine, whole):
    found, loss, _ = gradient(World(), mine, cut)
    assert error(found, whole[0]) <= EXACT
    assert loss == pytest.approx(whole[1], rel=EXACT)
    wrong, *_ = gradient(World(), mine, cut, strategy="Once")
    assert error(wrong, whole[0]) > WRONG


@pytest.mark.parametrize(
    ("mode", "sync"),
    [("ddp", "deferred"), slow("fsdp", "immediate"), nightly("fsdp", "deferred")],
)
def test_so_they_are_on_two_ranks(mode, sync, mine, whole, ranks):
    for cut in CUTS:
        for found, loss, _ in ranks.run(2, partial(gradient, mode=mode, sync=sync), mine, cut):
            assert error(found, whole[0]) <= EXACT, cut
            assert loss == pytest.approx(whole[1], rel=EXACT)


def test_both_passes_drop_the_same(mine):
    how = {"cut": Fixed(steps=1), "dropout": 0.3}
    once, twice = (gradient(World(), mine, strategy=s, **how) for s in ("Once", "TwoPass"))
    assert error(twice[0], once[0]) <= EXACT


@pytest.mark.parametrize(
    ("mode", "at"), [("ddp", 2), slow("fsdp", 3), nightly("ddp", 3), nightly("fsdp", 2)]
)  # in the first pass, and in the second
def test_memory_that_runs_out_in_a_pass_is_replayed_bit_for_bit(mode, at, mine, ranks):
    work = partial(gradient, mode=mode, dropout=0.2)
    # Each rank has two micro-batches of four.
    struck = ranks.run(2, partial(work, at=at), mine, Fixed(micro=4))
    for (found, loss, replays), (expected, right, _) in zip(
        struck, ranks.run(2, work, mine, Fixed(micro=2)), strict=True
    ):
        assert replays == 1
        assert loss == right
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


LINE = (
    f"model._target_={TOYS}.DoubleNet data._target_=mine.Rows objective._target_=mine.Contrast "
    "optimizer=sgd optimizer.momentum=0 optimizer.lr=1 scheduler=constant clip_norm=null steps=1"
)
DATA = f"""
from {TOYS} import Rows as Plain


class Rows(Plain):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {{**sample, "lengths": torch.tensor(len(sample["input_ids"]))}}
"""

WHOLE = """
from tests.lib.run_toys import Net
from trainer.core.coupling import Coupling

class Whole(Net):
    coupling = Coupling("batch", why="it subtracts the mean of the batch")

class Watch:
    def on_step(self, step):
        pass
"""


@pytest.mark.usefixtures("own_folder")
def test_two_files_add_it_and_sum_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # which gets the current folder
    Path("mine.py").write_text(MINE + DATA + WHOLE)
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
            assert gap <= EXACT * float(tensor.abs().max()), name
    with pytest.raises(ConfigError, match=r"Sum is wrong for Contrast, which .*: derive it from C"):
        go(LINE)
    overlapped = f"command=plan {LINE} accum.gradient=two sync=overlapped parallel=ddp"
    with pytest.raises(ConfigError, match=r"sync=overlapped: .* TwoPass has several passes"):
        go(f"{overlapped} parallel.ranks=2", config_dir="my_conf")
    with pytest.raises(ConfigError, match="Sum is wrong for Whole, whose coupling is batch"):
        go("model._target_=mine.Whole")
    with pytest.raises(ConfigError, match="has no means of micro-batches"):
        go(f"{LINE} accum.gradient=two batch.normalizer=micro_batches", config_dir="my_conf")
    line = ["verify", "--config-dir", "my_conf", *overrides(f"{LINE} accum.gradient=two")]
    assert shell(shlex.join(line)) == 0
    line = ["verify", *overrides(f"{LINE} accum.gradient._target_=mine.Once")]
    assert shell(shlex.join(line)) == 9
