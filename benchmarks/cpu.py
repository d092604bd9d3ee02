"""What a setting gains on a CPU, and how near a step comes to its micro-batches alone.

    python benchmarks/cpu.py precision [--width 512 --layers 8 --global-batch 8]
    python benchmarks/cpu.py packed
    python benchmarks/cpu.py compile --model gpt_small --max-length 256 --global-batch 16
    python benchmarks/cpu.py roofline [--max-length 2048 --global-batch 32]

Each compares whole runs on documents of the standard library, tuned by `accum=auto` under their own
setting; a turn is one optimizer step of the real feed and step, and all take turns. The ratio is
the median over rounds. The roofline runs the loaded micro-batches of the same plans, forward and
backward, in a plain loop: under that cut no step can be faster. `ready after` is
what it took to tune, to compile, and to take the first step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, final

import torch
from common import FOLDER, Figures, Mark, Timing, print_table, write_results
from ragged import fresh_notebook

from trainer.assemble.build import assemble
from trainer.assemble.run_plan import RunPlan, prepare
from trainer.assemble.step import step_context
from trainer.cli.compose import Composer
from trainer.cli.prepare import prepare_run
from trainer.core.world import World
from trainer.objectives.base import sums_of
from trainer.training.batches import Feed, PlannedBatch
from trainer.training.context import StepContext
from trainer.training.step import train_step

TABLES = {
    "precision": ("precision=fp32", "precision=bf16"),
    "packed": ("accum.packed=false", "accum.packed=true"),
    "compile": ("compile=false", "compile=true"),
    "roofline": ("precision=fp32",),
}
"""What each compares, all else equal; the first is the base."""

Turn = Callable[[], int]
"""Takes one step, and gives its useful tokens."""


@final
@dataclass
class Contender:
    """What takes turns.

    Attributes:
        how: found the cap.
        ready_s: seconds from its begin to the end of its first turn, tuning and compiling included.
        speed: useful tokens per second of the others.
    """

    how: str
    turn: Turn
    ready_s: float
    is_ready: bool = False
    speed: Figures = field(default_factory=Figures)

    def take(self) -> None:
        """Take a turn."""
        begin = Mark.now()
        tokens = self.turn()
        timing = Timing.between(begin, Mark.now())
        if self.is_ready:
            self.speed.add(tokens / timing.seconds, timing)
        else:
            self.is_ready, self.ready_s = True, self.ready_s + timing.seconds


def run_plan_of(options: argparse.Namespace, setting: str) -> RunPlan:
    """Build a run and tune it, afresh."""
    shape = []
    if options.model == "gpt_tiny":
        shape = [f"model.width={options.width}", f"model.num_layers={options.layers}"]
        shape += ["model.num_heads=4"]
    typed = [
        f"model={options.model}",
        *shape,
        "data=stdlib",
        f"data.max_length={options.max_length}",
        "data.overlong=cut",
        f"batch.global={options.global_batch}",
        "accum=auto",
        "device=cpu",
        "precision=fp32",
        "optimizer.lr=1e-3",
        "scheduler=constant",
        "steps=1000",
        setting,
    ]
    lines = list({line.partition("=")[0]: line for line in typed}.values())
    config = prepare_run(lines, Composer()).config
    with fresh_notebook():
        return prepare(assemble(config, World()))


def begin(run_plan: RunPlan) -> tuple[StepContext, Feed]:
    """Begin to take steps."""
    parts = run_plan.run
    return step_context(parts), run_plan.run.feed(parts.world)


def steps(context: StepContext, feed: Feed, plans: list[PlannedBatch]) -> Turn:
    """Take steps as a run does, and note their plans."""

    def turn() -> int:
        batch = feed.next()
        feed.prefetch()
        plans.append(batch)
        float(train_step(context, batch, feed).loss)
        return batch.num_tokens

    return turn


def roofline(context: StepContext, plans: list[PlannedBatch]) -> Turn:
    """Compute the micro-batches of the same plans, and nothing else."""

    def turn() -> int:
        batch = plans[-1]
        for micro_batch in batch.micro_batches:
            sums = sums_of(
                context.model.objective,
                context.parallel.call,
                micro_batch.fields,
                micro_batch.weights,
            )
            (sum(sums.losses.values()) / batch.num_tokens).backward()  # type: ignore[union-attr]
        context.parallel.drop_gradients()
        return batch.num_tokens

    return turn


def contenders(options: argparse.Namespace) -> Iterator[tuple[str, Contender]]:
    """Make what the table compares."""
    for setting in TABLES[options.table]:
        plans: list[PlannedBatch] = []
        began = time.perf_counter()
        run_plan = run_plan_of(options, setting)
        print(f"{setting}: a cap of {run_plan.tuning and run_plan.tuning.max_tokens}", flush=True)
        context, feed = begin(run_plan)
        seconds = time.perf_counter() - began
        ours = Contender(run_plan.how, steps(context, feed, plans), seconds)
        if options.table != "roofline":
            yield setting, ours
            continue
        # The roofline is the base, and follows our step, whose plan it takes.
        yield "our step", ours
        yield "its micro-batches alone", Contender(run_plan.how, roofline(context, plans), seconds)


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--model", default="gpt_tiny")
    for flag, default in (
        ("--width", 256),
        ("--layers", 4),
        ("--max-length", 512),
        ("--global-batch", 64),
        ("--rounds", 9),
        ("--threads", 2),
    ):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = dict(contenders(options))
    for _ in range(options.rounds + 1):
        for contender in found.values():
            contender.take()
    names = list(found)
    base = names[-1] if options.table == "roofline" else names[0]
    rows, results = [], dict[str, Any]()
    for name, contender in found.items():
        pairs = zip(contender.speed.values, found[base].speed.values, strict=True)
        ratio = median(mine / theirs for mine, theirs in pairs)
        cells = (contender.speed.show(",.0f"), f"{ratio:.3f}", f"{contender.ready_s:.1f} s")
        rows.append((name, *cells))
        results[name] = {
            **contender.speed.to_json(),
            "ready_s": contender.ready_s,
            "ratio": ratio,
            "how": contender.how,
        }
    print_table((options.table, "tokens/s", f"of {base}", "ready after"), rows)
    noise = max(contender.speed.foreign for contender in found.values())
    print(f"up to {noise:.0%} of the machine was used by other programs")
    place = (
        options.json or FOLDER / f"cpu-{options.table}-{options.width}-{options.max_length}.json"
    )
    write_results(place, vars(options), results)


if __name__ == "__main__":
    main()
