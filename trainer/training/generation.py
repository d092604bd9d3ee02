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
    vocab_size: int | None  # tokens below it can be decoded; a model may have more

    def continued(self, rows: Sequence[Sequence[int]]) -> list[tuple[str, str]]:
        """Give each prompt with the text that follows it in its row."""
        # Of the whole: what stands alone may be decoded without the space before it.
        whole = [
            (self.decode(row[: len(tokens)]), self.decode(row))
            for tokens, row in zip(self.tokens, rows, strict=True)
        ]
        return [
            (text, both[len(prompt) :])
            for text, (prompt, both) in zip(self.texts, whole, strict=True)
        ]


def generate(
    model: Parallel, prompts: Prompts, world: World, was_asked: Callable[[], bool] = lambda: False
) -> list[list[int]] | None:
    """Continue every prompt, all ranks with the tokens of the first one. Collective.

    Each token costs a forward of all prompts, padded on the right to one length, so that a compiled
    or sharded model runs as it does in training; nothing is cached between two. Gives the tokens of
    each prompt and of what follows it; None where memory ran out.
    """
    rows, is_open = [list(tokens) for tokens in prompts.tokens], [True] * len(prompts.tokens)
    model.gather()
    try:
        with inference(model, world):
            for _ in range(prompts.most):
                with AllocationGuard() as guard:
                    chosen = _likeliest(model, rows, prompts, world)
                ranks = world.collect([guard.failed, was_asked(), [] if guard.failed else chosen])
                if any(asked for _, asked, _ in ranks):
                    raise Preempted("stopped while prompts were continued")
                if any(failed for failed, *_ in ranks):
                    return None
                for place, token in enumerate(ranks[0][-1]):
                    fits = len(rows[place]) < prompts.length
                    is_open[place] &= fits and token not in prompts.ends
                    rows[place] += [token] * is_open[place]
                if not any(is_open):
                    break
    finally:
        model.release()
    return rows


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
    found = logits[torch.arange(len(rows), device=logits.device), last, : prompts.vocab_size]
    tokens: list[int] = found.argmax(-1).tolist()
    return tokens
