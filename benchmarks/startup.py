"""How long a person waits: for help, for the answer to a mistake, and for the first step.

    python benchmarks/startup.py [--rounds 7] [--json FILE]

Seconds from the start of a process: to its end for `train --help` and for a config error, which
must not import torch; to the first line of metrics.jsonl for a run under `accum=fixed`, its data
index cached, W&B offline as by default, and disabled; to the end of the first optimizer step for
a bare hand loop over the same model, number of tokens and optimizer. Rounds are interleaved.
To reach: 0.5 s for help and mistakes, and a first step within 1 s of the hand loop.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import FOLDER, QUIET, Figures, Mark, Timing, print_table, write_results

ROOT = Path(__file__).resolve().parents[1]
PYTHON = [sys.executable]
TRAIN = [*PYTHON, "-m", "trainer"]
STEP = ["batch.global=8", "accum=fixed", "accum.micro=8", "steps=1"]
CONFIG_ERROR = 2
PATIENCE_S = 120.0

Case = Callable[[Path], float]
"""Runs in an empty folder, and says by `time.perf_counter` when it was done."""

HAND_LOOP = """
from pathlib import Path
import torch
from torch.nn import functional as F
from trainer.models.gpt import GPT

torch.manual_seed(0)
model = GPT(vocab_size=258, width=96, num_layers=2, num_heads=3, max_length=256)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()[: 8 * 256]), dtype=torch.uint8)
tokens = text.long().view(8, 256)
logits = model(tokens)[:, :-1].flatten(0, 1)
F.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
Path("done").write_text("1")
"""


def until_end(command: list[str], code: int) -> Case:
    """Run a command to its end.

    Args:
        command: as typed.
        code: the exit code it must have.
    """

    def run(folder: Path) -> float:
        done = subprocess.run(
            command, cwd=folder, env=environment(), capture_output=True, check=False
        )
        ended = time.perf_counter()
        if done.returncode != code:
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr.decode()}")
        return ended

    return run


def until_file(command: list[str], name: str) -> Case:
    """Run a command until a file of it is there and not empty; then it is killed."""

    def run(folder: Path) -> float:
        file, deadline = folder / name, time.monotonic() + PATIENCE_S
        with (folder / "output.txt").open("w") as output:
            process = subprocess.Popen(
                command, cwd=folder, env=environment(), stdout=output, stderr=output
            )
            while not (file.exists() and file.stat().st_size):
                if process.poll() not in (None, 0) or time.monotonic() > deadline:
                    raise RuntimeError(f"{command}: {(folder / 'output.txt').read_text()}")
                time.sleep(0.002)
        ended = time.perf_counter()
        process.kill()
        process.wait()
        return ended

    return run


def environment() -> dict[str, str]:
    """Let the package be found from any folder; it need not be installed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


CASES: dict[str, Case] = {
    "train --help": until_end([*TRAIN, "--help"], 0),
    "config error": until_end([*TRAIN, "batch.global=abc"], CONFIG_ERROR),
    "first step, hand loop": until_file([*PYTHON, "-c", HAND_LOOP], "done"),
    "first step": until_file([*TRAIN, *STEP, "hydra.run.dir=run"], "run/metrics.jsonl"),
    "first step, no W&B": until_file(
        [*TRAIN, *STEP, "hydra.run.dir=run", "wandb.mode=disabled"], "run/metrics.jsonl"
    ),
}


def time_once(case: Case) -> Timing:
    """Time one process in an empty folder of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        began = Mark.now()
        ended = case(Path(folder))
        return Timing(ended - began.wall, Timing.between(began, Mark.now()).foreign)


def imports_torch(*arguments: str) -> bool:
    """Ask a process which modules it imported."""
    command = [*PYTHON, "-X", "importtime", "-m", "trainer", *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    return any(line.rpartition("|")[2].strip() == "torch" for line in done.stderr.splitlines())


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=FOLDER / "startup.json")
    arguments = parser.parse_args()
    for case in CASES.values():
        time_once(case)  # compiles, and builds the data index
    found = {name: Figures() for name in CASES}
    for _ in range(arguments.rounds):
        for name, case in CASES.items():
            timing = time_once(case)
            found[name].add(timing.seconds, timing)
    hand = found["first step, hand loop"].median
    torch = {
        "train --help": imports_torch("--help"),
        "config error": imports_torch("batch.global=abc"),
    }
    rows = []
    for name, figures in found.items():
        beyond = f"{figures.median - hand:+.2f}" if name.startswith("first step") else ""
        imported = {True: "yes", False: "no"}.get(torch.get(name), "")
        rows.append((name, figures.show(), beyond, imported))
    print_table(("seconds, median (min-max)", "", "beyond hand", "imports torch"), rows)
    noise = max(figures.foreign for figures in found.values())
    if noise > QUIET:
        print(f"noisy: other programs had up to {noise:.0%} of the machine")
    results: dict[str, Any] = {name: figures.to_json() for name, figures in found.items()}
    write_results(arguments.json, vars(arguments), {"times": results, "imports_torch": torch})


if __name__ == "__main__":
    main()
