"""Pairs, as small as they can be: data, a model of two towers with a learnt scale, a reference."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.lib.ranks_work import MODES, POLICIES, Arrays, BlockLM, gradient_of_step, plain
from tests.lib.support import Bench, RaggedText, replicated
from trainer.accumulate.base import GradientStrategy, divided, seed_draws
from trainer.accumulate.sum import Sum
from trainer.core.micro_batch import MicroBatch
from trainer.core.world import World
from trainer.data.loader import Request
from trainer.objectives.coupled import CoupledObjective
from trainer.plan.cut import Cut, Layout
from trainer.plan.cuts import Fixed
from trainer.plan.lengths import Lengths
from trainer.training.data import HeldOut
from trainer.training.evaluation import evaluate_parts


class Pairs(RaggedText):
    """Rows of tokens that say how long they are, so that padding is left out of a mean."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.samples[index]
        return {"input_ids": tokens, "num_tokens": torch.tensor(len(tokens))}


class Towers(BlockLM):
    """Gives two embeddings of each row; `at` is the forward that runs out of memory."""

    def __init__(self, dropout: float = 0.0, bias: bool = False, at: int | None = None) -> None:
        super().__init__(dropout)
        self.logit_scale = nn.Parameter(torch.tensor([1.5]))
        self.logit_bias = nn.Parameter(torch.tensor([-2.0])) if bias else None
        # No number, which a replay would put back
        self.at, self.calls = at, count(1)

    def forward(self, input_ids: Tensor, num_tokens: Tensor) -> dict[str, Tensor]:
        if next(self.calls) == self.at:
            raise torch.OutOfMemoryError("injected")
        x = super().forward(input_ids)
        is_real = (torch.arange(x.shape[1], device=x.device) < num_tokens[:, None])[..., None]
        query, document = ((each * is_real).sum(1) for each in (x, torch.tanh(x).flip(-1)))
        return {"query": query, "document": document}


class DoubleTowers(Towers):
    """In double precision, so that only a wrong step differs."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.double()


class DoubleExperts(nn.Module):
    """In double precision, three experts of one vector each, of which a token takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.router = nn.Embedding(300, 8), nn.Linear(8, 3)
        self.head, self.experts = nn.Linear(8, 300), nn.Parameter(torch.randn(3, 8))
        self.double()

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        x = self.words(input_ids)
        routed = self.router(x)
        taken = routed.argmax(-1)
        gate = routed.softmax(-1).gather(-1, taken[..., None])
        logits = self.head(x + gate * self.experts[taken] * x)
        return SimpleNamespace(logits=logits, router_logits=(routed.flatten(0, 1),))


def bench_of(
    world: World,
    cut: Cut,
    objective: CoupledObjective,
    strategy: GradientStrategy | None = None,
    *,
    mode: str = "ddp",
    sync: str = "deferred",
    **of_model: Any,
) -> Bench:
    return Bench(
        cut,
        dataset=Pairs(),
        model=partial(Towers, **of_model),
        objective=objective,
        strategy=strategy or Sum(),
        world=world,
        lay_out=MODES[mode] if world.size > 1 else replicated,
        sync=POLICIES[sync](),
    )


def gradient_of(world: World, *given: Any, **how: Any) -> tuple[Arrays, float, int]:
    """Take a step; gives its gradient, loss and replays."""
    return gradient_of_step(bench_of(world, *given, **how))


def evaluated(
    world: World, max_tokens: int, objective: CoupledObjective, most: int | None = None
) -> tuple[dict[str, float], Arrays]:
    """Evaluate untrained towers on all pairs; gives the figures, and the rows of some in order."""
    bench = bench_of(world, Fixed(steps=1), objective)
    lengths = Lengths.of(bench.dataset.lengths)
    layout = Layout(world_size=world.size)
    held_out = HeldOut(
        loader=bench.loader, lengths=lengths, layout=layout, max_tokens=max_tokens, most=most
    )
    figures = evaluate_parts(bench.context, {"": held_out})[""]
    chosen = held_out.chosen(0, held_out.num_samples).tolist()
    samples = [bench.loader.load(Request((i,), 0, int(lengths[[i]][0]))) for i in chosen]
    with torch.no_grad():
        rows = [objective.rows(bench.context.parallel.call, fields) for fields in samples]
    return figures, {name: plain(torch.cat([row[name] for row in rows])) for name in rows[0]}


Combine = Callable[[CoupledObjective, Sequence[dict[str, Tensor]]], Sequence[Tensor]]


def by_hand(
    combine: Combine,
    num_ranks: int,
    cut: Cut,
    objective: CoupledObjective,
    sync: str = "deferred",
    **of_model: Any,
) -> Arrays:
    """Compute a step with every graph in memory at once.

    Each micro-batch draws what it draws in the step; `combine` gives the losses of their rows.
    """
    bench = bench_of(World(), cut, objective, **of_model)
    micro_batches: list[MicroBatch] = []
    for rank in range(num_ranks):
        world = World(rank=rank, size=num_ranks)
        feed = bench_of(world, cut, objective, sync=sync).feed
        micro_batches += feed.next().micro_batches
    parts = []
    for micro_batch in micro_batches:
        seed_draws(micro_batch.rng_key, torch.device("cpu"))
        parts.append(dict(objective.rows(bench.context.parallel.call, micro_batch.fields)))
    count = sum(len(micro_batch.ids) for micro_batch in micro_batches)
    for loss in combine(objective, parts):
        (loss / count).backward(retain_graph=True)
    return {n: plain(p.grad) for n, p in bench.module.named_parameters() if p.grad is not None}


def _loss(objective: CoupledObjective, rows: dict[str, Tensor]) -> Tensor:
    sums = objective.sums_of_rows(rows)
    return divided(sums.losses, dict.fromkeys(sums.losses, 1.0))


def whole(objective: CoupledObjective, parts: Sequence[dict[str, Tensor]]) -> Sequence[Tensor]:
    return [_loss(objective, {name: torch.cat([p[name] for p in parts]) for name in parts[0]})]


def as_open_clip(
    objective: CoupledObjective, parts: Sequence[dict[str, Tensor]]
) -> Sequence[Tensor]:
    """The loss of all samples once for each micro-batch, whose own embeddings have a graph."""
    losses = []
    for mine in parts:
        rows = {
            name: torch.cat([p[name] if p is mine else p[name].detach() for p in parts])
            for name in ("query", "document", "digests")
        }
        others = {name: mine[name][:1].expand(len(rows["query"])) for name in mine.keys() - rows}
        losses.append(_loss(objective, {**rows, **others}))
    return losses
