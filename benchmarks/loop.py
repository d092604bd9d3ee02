"""What our step costs beside a hand-written loop on the same model, data and split.

    python benchmarks/loop.py [--rounds 9] [--steps 40] [--json FILE]

One process, two threads, interleaved rounds, medians. A guard against regressions: the loop should
stay within 1.05 of the hand-written one at 8 micro-batches of about 1 ms each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.accumulate.sum import Sum
from trainer.data.loader import Loader
from trainer.feed import Feed, Source
from trainer.loop import record_of
from trainer.models.bind import bind
from trainer.models.gpt import GPT
from trainer.objectives.next_token import NextToken
from trainer.optimizer import AdamW
from trainer.parallel import Replicated
from trainer.plan.cut import Layout
from trainer.plan.cuts import Fixed
from trainer.plan.order import Order
from trainer.report.console import Screen
from trainer.report.reporter import RunReporter
from trainer.scheduler import Constant
from trainer.step import Kit, train_step
from trainer.sync import Deferred
from trainer.world import World

VOCABULARY, LENGTH, MICRO = 258, 32, 8
LR, CLIP = 1e-3, 1.0


class Rows:
    """Random rows of a fixed length, in memory."""

    draws_randomness = False

    def __init__(self, num_samples: int) -> None:
        numbers = np.random.default_rng(0)
        self.rows = torch.from_numpy(numbers.integers(0, VOCABULARY, (num_samples, LENGTH)))
        self.lengths = np.full(num_samples, LENGTH, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def make_model() -> GPT:
    """Give the same small model to both: about 1 ms per micro-batch."""
    torch.manual_seed(0)
    return GPT(vocab_size=VOCABULARY, width=32, num_layers=1, num_heads=2, max_length=LENGTH)


def hand_loop(data: Rows, num_micro: int) -> Iterator[float]:
    """Train as one would by hand, with the token-weighted loss and clipping.

    Yields:
        The loss of every step.
    """
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    order = np.random.default_rng(0)
    size = num_micro * MICRO
    while True:
        permutation = order.permutation(len(data))
        for start in range(0, len(data) - size + 1, size):
            ids = permutation[start : start + size]
            batches = [
                torch.stack([data[int(i)]["input_ids"] for i in ids[k : k + MICRO]])
                for k in range(0, size, MICRO)
            ]
            terms = sum(batch.shape[0] * (batch.shape[1] - 1) for batch in batches)
            loss = torch.zeros(())
            for batch in batches:
                logits = model(batch)[:, :-1].flatten(0, 1)
                share = F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum") / terms
                share.backward()
                loss += share.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield float(loss)


def our_loop(data: Rows, num_micro: int, folder: Path) -> Iterator[float]:
    """Train with everything a run has: planning, ledger, metrics, lines on a screen.

    Yields:
        The loss of every step.
    """
    model, world, objective = make_model(), World(), NextToken()
    spec = AdamW(lr=LR, weight_decay=0.01)
    order = Order(len(data), 0, num_micro * MICRO, tail="drop")
    loader = Loader(data, num_workers=0, seed=0)
    feed = Feed(
        Source(order=order, lengths=data.lengths, loader=loader, objective=objective),
        cut=Fixed(micro=MICRO),
        layout=Layout(),
        world=world,
        seed=0,
        cursor=order.start,
    )
    kit = Kit(
        model=Replicated(model, bind(model), list(model.parameters()), world),
        objective=objective,
        terms=("accuracy", "cross_entropy"),
        strategy=Sum(),
        sync=Deferred(),
        normalizer="tokens",
        optimizer=spec.build(model),
        base_lrs=(LR, LR),
        schedule=Constant(),
        total_steps=10**9,
        clip_norm=CLIP,
        world=world,
    )
    with (folder / "screen.txt").open("w") as screen:
        reporter = RunReporter(folder, Screen(folder, bar=False, file=screen), keep_samples=True)
        tokens = 0
        while True:
            started = time.perf_counter()
            batch = feed.next()
            feed.prefetch()
            report = train_step(kit, batch)
            tokens += batch.num_tokens
            seconds = time.perf_counter() - started
            reporter.step(record_of(order, report, tokens, seconds), batch.samples.ids)
            yield float(report.loss)


def seconds_of(steps: Iterator[float], count: int) -> float:
    """Time some steps."""
    started = time.perf_counter()
    for _ in range(count):
        next(steps)
    return (time.perf_counter() - started) / count


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    data = Rows(4096)
    rows = {}
    for num_micro in (1, 8):
        with tempfile.TemporaryDirectory() as folder:
            loops: dict[str, Iterator[float]] = {
                "hand": hand_loop(data, num_micro),
                "ours": our_loop(data, num_micro, Path(folder)),
            }
            times: dict[str, list[float]] = {name: [] for name in loops}
            for loop in loops.values():
                seconds_of(loop, 5)
            for _ in range(arguments.rounds):
                for name, loop in loops.items():
                    times[name].append(seconds_of(loop, arguments.steps))
        ratios = [o / h for o, h in zip(times["ours"], times["hand"], strict=True)]
        rows[num_micro] = {
            "hand_ms": 1e3 * median(times["hand"]),
            "ours_ms": 1e3 * median(times["ours"]),
            "ratio": median(ratios),
        }
    print("micro-batches    hand ms    ours ms    ratio")
    for num_micro, row in rows.items():
        print(f"{num_micro:13d} {row['hand_ms']:10.2f} {row['ours_ms']:10.2f} {row['ratio']:8.3f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
