"""Continue prompts by the likeliest tokens, to show what a model has learnt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import final

import torch

from trainer.core.errors import Preempted
from trainer.core.out_of_memory import AllocationGuard
from trainer.core.world import World
from trainer.data.collate import ATTENTION_MASK
from trainer.data.samples import INPUT_IDS
from trainer.objectives.base import logits_of
from trainer.parallel.base import Parallel
from trainer.training.evaluation import inference


@final
@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What is to be continued, as text and as tokens."""

    texts: Sequence[str]
    tokens: Sequence[Sequence[int]]
    ends: Collection[int]  # tokens behind which nothing follows
    decode: Callable[[Sequence[int]], str]
    pad_token: int
    length: int  # tokens of a row, a prompt and what follows
    most: int  # tokens that follow


def generate(
    model: Parallel, prompts: Prompts, world: World, was_asked: Callable[[], bool] = lambda: False
) -> list[tuple[str, str]] | None:
    """Continue every prompt, all ranks with the tokens of the first one. Collective.

    Each token costs a forward of all prompts, padded on the right to one length, so that a compiled
    or sharded model runs as it does in training; nothing is cached between two.

    Returns:
        Each prompt with its continuation; None where memory ran out.

    Raises:
        Preempted: a rank was asked to stop.
    """
    rows = [list(tokens) for tokens in prompts.tokens]
    starts, is_open = [len(row) for row in rows], [True] * len(rows)
    model.gather()
    with inference(model, world):
        for _ in range(prompts.most):
            with AllocationGuard() as guard:
                chosen = _likeliest(model, rows, prompts, world)
            ranks = world.collect([guard.failed, was_asked(), [] if guard.failed else chosen])
            if any(asked for _, asked, _ in ranks):
                raise Preempted("stopped while prompts were continued")
            if any(failed for failed, *_ in ranks):
                model.release()
                return None
            for place, token in enumerate(ranks[0][-1]):
                is_open[place] &= token not in prompts.ends and len(rows[place]) < prompts.length
                rows[place] += [token] * is_open[place]
            if not any(is_open):
                break
    model.release()
    # Of the whole: what stands alone may be decoded without the space before it.
    whole = [
        (prompts.decode(row[:start]), prompts.decode(row))
        for row, start in zip(rows, starts, strict=True)
    ]
    return [
        (text, both[len(prompt) :])
        for text, (prompt, both) in zip(prompts.texts, whole, strict=True)
    ]


def _likeliest(
    model: Parallel, rows: Sequence[Sequence[int]], prompts: Prompts, world: World
) -> list[int]:
    """Give the likeliest token behind each row."""
    ids = torch.full((len(rows), prompts.length), prompts.pad_token, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
        mask[place, : len(row)] = 1
    fields = {INPUT_IDS: ids.to(world.device), ATTENTION_MASK: mask.to(world.device)}
    logits = logits_of(model.call(fields))
    last = torch.tensor([len(row) - 1 for row in rows], device=logits.device)
    tokens: list[int] = (
        logits[torch.arange(len(rows), device=logits.device), last].argmax(-1).tolist()
    )
    return tokens
