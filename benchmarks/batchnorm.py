"""Accuracy on held-out digits by what BatchNorm normalises over, and how its statistics move.

    python benchmarks/batchnorm.py [--epochs 6] [--seeds 3] [--cells 'micro, 8'] [--json FILE]

A ResNet of 8 channels learns scikit-learn's digits with `batch.global=128`, 12 steps an epoch. Only
what is normalised over what changes: the whole batch, groups (`ghost`), and micro-batches of 32 to
2 samples, whose statistics move in each (`micro`, plain accumulation) or once a step (`pooled`).
Each run is evaluated by its running statistics, and by those that `batchnorm.precise=1024`
estimates again. Means over seeds, with the smallest and the largest. Runs that are there already
are not run again. About 8 minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path
from statistics import fmean

from common import FOLDER, print_table, write_results

from trainer import train

PRECISE = 1024
BASE = (
    *("data=digits", "model=resnet", "model.width=8", "model.stages=2", "batch.global=128"),
    *("optimizer.lr=0.01", "steps=null", "eval.every=null", "checkpoint.every=null"),
    *("wandb.mode=disabled", "device=cpu", "precision=fp32"),
)
FIXED = "accum=fixed batchnorm={} accum.micro={}"
CELLS = {
    "whole batch": FIXED.format("micro", 128),
    "ghost, groups of 32": "accum=auto",
    "ghost, groups of 8": "accum=auto batchnorm.group=8",
    **{f"micro, {size}": FIXED.format("micro", size) for size in (32, 8, 4, 2)},
    **{f"pooled, {size}": FIXED.format("pooled", size) for size in (32, 8, 4, 2)},
}


def accuracies(cell: str, seed: int, epochs: int, root: Path) -> tuple[float, float]:
    """Train one run, unless it is there, and give its accuracy by both kinds of statistics."""
    folder = root / f"{cell.replace(', ', '-').replace(' ', '-')}-{epochs}-{seed}"
    with contextlib.redirect_stdout(io.StringIO()):
        if not (folder / "result.json").exists():
            own = [f"seed={seed}", f"epochs={epochs}", f"hydra.run.dir={folder}"]
            train([*BASE, *CELLS[cell].split(), *own])
        before = json.loads((folder / "result.json").read_text())["metrics"]["accuracy"]
        if not (folder / "evaluate.json").exists():
            train(["evaluate", f"run={folder}", f"batchnorm.precise={PRECISE}"])
    after = json.loads((folder / "evaluate.json").read_text())["eval_accuracy"]
    return float(before), float(after)


def main() -> None:
    """Run all cells with all seeds, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--json", type=Path, default=FOLDER / "batchnorm.json")
    given = parser.parse_args()
    root, rows = given.json.absolute().parent / "batchnorm", list[list[str]]()
    for cell in given.cells:
        pairs = [accuracies(cell, seed, given.epochs, root) for seed in range(given.seeds)]
        columns = zip(*pairs, strict=True)
        texts = [f"{fmean(v):.3f} ({min(v):.3f} to {max(v):.3f})" for v in columns]
        rows.append([cell, *texts])
    print_table(["normalised over", "running statistics", f"precise={PRECISE}"], rows)
    write_results(given.json, {"epochs": given.epochs, "seeds": given.seeds}, rows)


if __name__ == "__main__":
    main()
