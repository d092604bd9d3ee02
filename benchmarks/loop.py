"""What our step costs beside a hand-written loop on the same model, data and split.

    python benchmarks/loop.py [--micro 1 8 32] [--rounds 60] [--steps 5] [--threads 2] [--json FILE]

A guard against regressions: at 8 micro-batches of about 2 ms each, ours should stay within 1.05 of
the hand loop. Ours is all a run does in a step: the feed, which plans and loads the next batches
in a thread, the step, and a line each for metrics.jsonl, the ledger, the screen and train.log. The
hand loop loads the same rows, from memory and without a thread, computes the same token-weighted
loss, clips, and updates with the same fused optimizer. One process; short blocks of steps in turn,
so that a disturbance meets both alike. `ratio` is the median over pairs of blocks, `best` that of
the fastest blocks; `cpu` compares the CPU time of the process, which counts our thread in full.
`step` is the ratio of our step alone, over batches that were planned and loaded before: what is
left of `ratio` is planning, loading with its checks, and reporting.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, final

import numpy as np
import torch
from common import FOLDER, Mark, Timing, print_table, write_results
from torch import Tensor
from torch.nn import functional as F

from trainer.core.world import World
from trainer.data.loader import Loader
from trainer.models.bind import bind
from trainer.models.gpt import GPT
from trainer.objectives.next_token import NextToken
from trainer.optim.optimizers import AdamW
from trainer.parallel.base import Replicated
from trainer.plan.batch_size import ConstantSize
from trainer.plan.cut import Layout
from trainer.plan.cuts import Fixed
from trainer.plan.order import Order
from trainer.report.console import Screen
from trainer.report.reporter import RunReporter
from trainer.training.batches import Feed
from trainer.training.context import StepContext, StepState
from trainer.training.data import Data
from trainer.training.loop import step_record
from trainer.training.model import Model
from trainer.training.step import train_step

VOCABULARY, LENGTH, MICRO = 258, 32, 8
CLIP = 1.0
OPTIMIZER = AdamW(lr=1e-3, weight_decay=0.01)
WARM_UP_STEPS = 5
LOADED = 8  # global batches, where they are loaded before


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
    """Give both the same small model: about 1 ms per micro-batch."""
    torch.manual_seed(0)
    return GPT(vocab_size=VOCABULARY, width=32, num_layers=1, num_heads=2, max_length=LENGTH)


def hand_loop(data: Rows, num_micro: int) -> Iterator[float]:
    """Train as one would by hand, with the token-weighted loss and clipping.

    Yields:
        The loss of every step.
    """
    model = make_model()
    optimizer = OPTIMIZER.build(model)
    size = num_micro * MICRO
    for epoch in itertools.count():
        permutation = np.random.default_rng(epoch).permutation(len(data)).tolist()
        for start in range(0, len(data) - size + 1, size):
            ids = permutation[start : start + size]
            samples = [data[i] for i in ids]
            batches = [
                {
                    name: torch.stack([s[name] for s in samples[k : k + MICRO]])
                    for name in samples[0]
                }
                for k in range(0, size, MICRO)
            ]
            terms = sum(batch["labels"][:, 1:].numel() for batch in batches)
            total = torch.zeros(())
            for batch in batches:
                logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
                labels = batch["labels"][:, 1:].flatten()
                loss = F.cross_entropy(logits, labels, reduction="sum") / terms
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield float(total)


def our_loop(
    data: Rows, num_micro: int, folder: Path, *, step_alone: bool = False
) -> Iterator[float]:
    """Train with everything a run has, or step over batches that are there already.

    Yields:
        The loss of every step.
    """
    model, world, objective = make_model(), World(), NextToken()
    order = Order(len(data), 0, ConstantSize(global_batch=num_micro * MICRO), tail="drop")
    loader = Loader(data, num_workers=0, seed=0)
    samples = Data(order=order, lengths=data.lengths, loader=loader, total_steps=10**9)
    feed = Feed(
        samples,
        objective,
        cut=Fixed(micro=MICRO),
        layout=Layout(),
        world=world,
        seed=0,
        cursor=order.start,
    )
    optimizer = OPTIMIZER.build(model)
    parallel = Replicated(model, bind(model), list(model.parameters()), world)
    context = StepContext(
        data=samples,
        model=Model(
            module=model,
            objective=objective,
            spec=OPTIMIZER,
            clip_norm=CLIP,
        ),
        world=world,
        parallel=parallel,
        state=StepState.of(parallel, objective, world),
        terms=("accuracy", "cross_entropy"),
        optimizer=optimizer,
        base_lrs=tuple(group["lr"] for group in optimizer.param_groups),
    )
    if step_alone:
        loaded = itertools.cycle([feed.next() for _ in range(LOADED)])
        while True:
            yield float(train_step(context, next(loaded), feed).loss)
    with (folder / "screen.txt").open("w") as screen:
        shown = Screen(folder, file=screen)
        shown.begin(0, samples.total_steps)
        reporter = RunReporter(folder, shown, keep_samples=True)
        tokens = 0
        try:
            while True:
                started = time.perf_counter()
                batch = feed.next()
                feed.prefetch()
                report = train_step(context, batch, feed)
                tokens += batch.num_tokens
                seconds = time.perf_counter() - started
                reporter.step(
                    step_record(feed, report, tokens, seconds), batch.samples.ids.tolist()
                )
                yield float(report.loss)
        finally:
            feed.close()
            reporter.close()


@final
@dataclass
class Blocks:
    """Times of one loop's blocks, in seconds per step.

    Attributes:
        wall: by the clock.
        cpu: of all threads of the process.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def run(self, steps: Iterator[float], count: int) -> None:
        """Time a block."""
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            next(steps)
        self.wall.append((time.perf_counter() - wall) / count)
        self.cpu.append((time.process_time() - cpu) / count)


def compare(data: Rows, num_micro: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both loops in turn."""
    with tempfile.TemporaryDirectory() as folder:
        all_blocks = hand, ours, alone = Blocks(), Blocks(), Blocks()
        steps = (
            hand_loop(data, num_micro),
            our_loop(data, num_micro, Path(folder)),
            our_loop(data, num_micro, Path(folder), step_alone=True),
        )
        for loop in steps:
            Blocks().run(loop, WARM_UP_STEPS)
        began = Mark.now()
        for number in range(arguments.rounds):
            turns = list(zip(all_blocks, steps, strict=True))
            for blocks, loop in turns if number % 2 else reversed(turns):
                blocks.run(loop, arguments.steps)
        timing = Timing.between(began, Mark.now())
        for loop in steps:
            loop.close()  # type: ignore[attr-defined] # generators
    return {
        "hand_ms": 1e3 * median(hand.wall),
        "ours_ms": 1e3 * median(ours.wall),
        "ratio": median(o / h for o, h in zip(ours.wall, hand.wall, strict=True)),
        "best_ratio": min(ours.wall) / min(hand.wall),
        "step_ratio": median(o / h for o, h in zip(alone.wall, hand.wall, strict=True)),
        "hand_cpu_ms": 1e3 * median(hand.cpu),
        "ours_cpu_ms": 1e3 * median(ours.cpu),
        "cpu_ratio": median(o / h for o, h in zip(ours.cpu, hand.cpu, strict=True)),
        "foreign": timing.foreign,
    }


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 8, 32], help="micro-batches")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=FOLDER / "loop.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    data = Rows(4096)
    results = {num_micro: compare(data, num_micro, arguments) for num_micro in arguments.micro}
    header = ("micro-batches", "hand ms", "ours ms", "ratio", "best", "step", "cpu", "foreign")
    rows = [
        (
            str(num_micro),
            f"{row['hand_ms']:.2f}",
            f"{row['ours_ms']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['best_ratio']:.3f}",
            f"{row['step_ratio']:.3f}",
            f"{row['cpu_ratio']:.3f}",
            "?" if row["foreign"] is None else f"{row['foreign']:.0%}",
        )
        for num_micro, row in results.items()
    ]
    print_table(header, rows)
    write_results(arguments.json, vars(arguments), results)


if __name__ == "__main__":
    main()
