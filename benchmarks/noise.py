"""Steps and samples to a fixed loss by global batch, beside what the noise scale predicts.

    python benchmarks/noise.py [--tasks digits stdlib] [--batches 8 64] [--rates 1 2] [--json FILE]

A small GPT learns Python source (`stdlib`), a small vision transformer scikit-learn's digits, each
at six global batches until the held-out loss is at a target. Every batch has three learning rates:
1, 2 and 4 times one that follows the square root of the batch. The fastest counts. A crossing is
interpolated between two evaluations. The prediction takes one run, at `REFERENCE` samples: each of
its steps counts as (1 + N / B) / (1 + N / REFERENCE) steps of B samples, where N is the noise scale
measured there. Runs that are there already are not run again. About 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from common import FOLDER, print_table, write_results

from trainer import train

REFERENCE = 64
BATCHES = (8, 16, 32, 64, 128, 256)
RATES = (1.0, 2.0, 4.0)
BASE = (
    *("scheduler=constant", "scheduler.warmup=0.05", "checkpoint.every=null", "device=cpu"),
    *("precision=fp32", "wandb.mode=disabled", "eval.every=0.025"),
)


@final
@dataclass(frozen=True)
class Task:
    """What is learned, how far, and for how many steps at most."""

    settings: str
    lr: float  # around which rates lie at the reference batch
    target: float  # held-out loss
    steps: int  # that the reference batch needs, roughly
    cap: int  # padded tokens of a micro-batch where noise is measured: an eighth of a step


TASKS = {
    "digits": Task("data=digits model=vit model.width=32 model.depth=1", 3e-3, 0.5, 230, 8),
    "stdlib": Task(
        "data=stdlib data.max_length=64 model=gpt_tiny model.width=48 eval.samples=256",
        *(5e-3, 2.0, 150, 512),
    ),
}
USUAL = 60.0  # a noise scale, for the number of steps that a batch may take


def curve(name: str, batch: int, rate: float, root: Path) -> list[dict[str, Any]]:
    """Train one run, unless it is there, and give its metrics.jsonl."""
    task, folder = TASKS[name], root / f"{name}-{batch}-{rate:g}"
    steps = math.ceil(1.6 * task.steps * (1 + USUAL / batch) / (1 + USUAL / REFERENCE))
    cut = ["log.noise_scale=null", "accum=fixed", f"accum.micro={min(batch, REFERENCE)}"]
    if batch == REFERENCE:
        cut = ["log.noise_scale=1", "accum=budget", f"accum.max_tokens={task.cap}"]
    own = [f"steps={steps}", f"batch.global={batch}", f"hydra.run.dir={folder}"]
    own.append(f"optimizer.lr={rate * task.lr * math.sqrt(batch / REFERENCE):.6g}")
    if not (folder / "result.json").exists():
        with contextlib.redirect_stdout(io.StringIO()):
            train([*task.settings.split(), *BASE, *cut, *own])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def crossing(entries: list[dict[str, Any]], target: float) -> float:
    """Give the step at which the held-out loss is at the target; infinite where it never is."""
    found = [(e["step"], e["eval_loss"]) for e in entries if e.get("eval_loss") is not None]
    before = found[0]
    for step, loss in found:
        if loss <= target:
            share = (before[1] - target) / max(before[1] - loss, 1e-9)
            return float(before[0] + share * (step - before[0]))
        before = step, loss
    return math.inf


def predicted(entries: list[dict[str, Any]], end: float, batch: int) -> float:
    """Predict the steps of another batch from what each step of the reference run measured."""
    total = 0.0
    for scale in (e["noise_scale"] for e in entries if "noise_scale" in e and e["step"] <= end):
        n = math.inf if scale is None else scale
        total += REFERENCE / batch if n == math.inf else (1 + n / batch) / (1 + n / REFERENCE)
    return total


def table(name: str, batches: Sequence[int], rates: Sequence[float], root: Path) -> list[list[str]]:
    """Run a task at all batches and rates, and set what was measured beside the prediction."""
    best = dict[int, tuple[float, float]]()  # steps and rate by batch
    for batch in sorted({*batches, REFERENCE}, key=lambda size: size != REFERENCE):
        steps = ((crossing(curve(name, batch, r, root), TASKS[name].target), r) for r in rates)
        best[batch] = min(steps)
    end, rate = best[REFERENCE]
    entries, rows = curve(name, REFERENCE, rate, root), list[list[str]]()
    for batch in batches:
        steps, expected = best[batch][0], predicted(entries, end, batch)
        figures = [f"{n:.0f}" for n in (steps, expected, steps * batch, expected * batch)]
        rows.append([name, str(batch), f"{best[batch][1]:g}", *figures, f"{expected / steps:.2f}"])
    return rows


def main() -> None:
    """Run what is asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--json", type=Path, default=FOLDER / "noise.json")
    given = parser.parse_args()
    root, rows = given.json.absolute().parent / "noise", list[list[str]]()
    for name in given.tasks:
        rows += table(name, given.batches, given.rates, root)
    head = ["task", "batch", "lr x", "steps", "predicted", "samples", "predicted", "ratio"]
    print_table(head, rows)
    write_results(given.json, {"tasks": given.tasks, "reference": REFERENCE}, rows)


if __name__ == "__main__":
    main()
