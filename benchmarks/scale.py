"""What a run costs by how many samples it has: start, step and resumption, from 10^4 to 10^9.

    python benchmarks/scale.py [--sizes 1e4,1e7,1e9] [--ragged 1e4,1e7,1e8] [--json FILE]

Every row is two processes, `train ... steps=6` over data of one's own, whose samples are a formula,
and `train resume=RUN steps=12`. `vectors` have no lengths; `ragged` rows of tokens have them in a
memory-mapped int32 file, and count the step in samples or in tokens. 500 samples are held out, so
that evaluation is as long for all. Seconds are those of the whole process without its steps, CPU
seconds all of its own. `own` is the peak of what the process holds itself; with `resident` come the
pages of the file that the system keeps, which it may take back.
To reach: flat columns; those of `ragged` data may grow by a pass over the lengths, 15 ns a sample,
and a hash of them, 10 ns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import final

import numpy as np
import torch
from common import FOLDER, print_table, write_results
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
TRAIN = [sys.executable, "-m", "trainer"]
BATCH, STEPS, HELD_OUT, VOCABULARY = 512, 6, 500, 64
JOURNALS = "outputs/*/*/metrics.jsonl"
SETTINGS = [
    *("accum=budget", "accum.max_tokens=4096", "scheduler=constant", "optimizer.lr=1e-3"),
    *("checkpoint.every=null", "eval.every=null", "wandb.mode=disabled", "device=cpu"),
]
KINDS: dict[str, list[str]] = {
    "vectors": ["data._target_=scale.Vectors", "model._target_=scale.Line", "objective=classify"],
    "ragged": ["data._target_=scale.Ragged", "model._target_=scale.Bag"],
    "ragged, tokens": ["data._target_=scale.Ragged", "model._target_=scale.Bag", "batch=tokens"],
}


class Vectors:
    """Samples without tokens."""

    draws_randomness = False

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Mapping[str, Tensor]:
        return {"x": torch.full((16,), i % 97 / 97), "labels": torch.tensor(i % 4)}


class Ragged:
    """Rows of 8 to 71 tokens, whose lengths lie in a file."""

    draws_randomness = False

    def __init__(self, size: int) -> None:
        self.lengths = np.memmap(f"lengths-{size}", np.int32, mode="r")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Mapping[str, Tensor]:
        ids = torch.arange(int(self.lengths[i])) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


def write_lengths(path: Path, size: int) -> None:
    """Write the lengths of `Ragged`, 4 bytes a sample."""
    with path.open("wb") as file:
        for start in range(0, size, 2**22):
            numbers = np.arange(start, min(start + 2**22, size), dtype=np.uint64)
            hashed = numbers * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(58)
            (hashed.astype(np.int32) + 8).tofile(file)


class Line(nn.Module):
    """Four classes of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Give logits."""
        logits: Tensor = self.head(x)
        return logits


class Bag(nn.Module):
    """The next token from the present one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Give logits."""
        logits: Tensor = self.table(input_ids)
        return logits


@final
@dataclass(frozen=True)
class Cost:
    """What one process took: seconds without its steps, CPU seconds, and of a step; peak bytes."""

    seconds: float
    cpu_seconds: float
    step_seconds: float
    own_bytes: int
    resident_bytes: int

    def cells(self) -> list[str]:
        """Write them for the table."""
        memory = (f"{size / 2**20:.0f}" for size in (self.own_bytes, self.resident_bytes))
        times = (f"{self.seconds:.1f}", f"{self.cpu_seconds:.1f}", f"{1e3 * self.step_seconds:.0f}")
        return [*times, *memory]


def measure(line: list[str], folder: Path) -> Cost:
    """Run a command in a process of its own, and watch its memory.

    Raises:
        RuntimeError: it failed.
    """
    before = {path: len(path.read_text().splitlines()) for path in folder.glob(JOURNALS)}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]),
    }
    begun, own = time.perf_counter(), 0
    with (folder / "screen").open("w") as screen:
        process = subprocess.Popen(
            [*TRAIN, *line], cwd=folder, env=environment, stdout=screen, stderr=screen
        )
        while True:
            own = max(own, _anonymous_bytes(process.pid))
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            time.sleep(0.02)
    seconds = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError((folder / "screen").read_text())
    (journal,) = folder.glob(JOURNALS)
    entries = map(json.loads, journal.read_text().splitlines()[before.get(journal, 0) :])
    steps = [entry["seconds"] for entry in entries if "grad_norm" in entry]
    # The first step warms up; a start is charged with what it takes over the others.
    each = median(steps[1:])
    rest, cpu_seconds = seconds - len(steps) * each, usage.ru_utime + usage.ru_stime
    return Cost(rest, cpu_seconds, each, own, usage.ru_maxrss * 1024)


def _anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file backs; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def one(kind: str, size: int, folder: Path) -> tuple[Cost, Cost]:
    """Start a run, and go on with it."""
    if kind != "vectors":
        write_lengths(folder / f"lengths-{size}", size)
    batch = BATCH * 40 if kind.endswith("tokens") else BATCH
    sizes = [f"data.size={size}", f"data.holdout={HELD_OUT / size}", f"batch.global={batch}"]
    typed = [*KINDS[kind], *sizes, *SETTINGS, f"steps={STEPS}"]
    start = measure(typed, folder)
    (run,) = folder.glob("outputs/*/*")
    return start, measure([f"resume={run}", "trust=[scale]", f"steps={2 * STEPS}"], folder)


def main() -> None:
    """Measure every kind and size, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="1e4,1e5,1e6,1e7,1e8,1e9", help="of vectors")
    parser.add_argument("--ragged", default="1e4,1e6,1e7,1e8", help="of ragged rows, 4 B each")
    parser.add_argument("--json", type=Path, default=FOLDER / "scale.json")
    asked = parser.parse_args()
    rows, results = [], []
    sizes = dict.fromkeys(KINDS, asked.ragged) | {"vectors": asked.sizes}
    for kind in KINDS:
        for size in map(int, map(float, sizes[kind].split(","))):
            with tempfile.TemporaryDirectory() as place:
                start, resumed = one(kind, size, Path(place))
            measured = {"start": asdict(start), "resume": asdict(resumed)}
            results.append({"kind": kind, "samples": size, **measured})
            rows.append([f"{kind}, {size:,}", *start.cells(), *resumed.cells()])
            print(rows[-1], flush=True)
    header = ["start s", "CPU s", "step ms", "own MiB", "resident MiB"]
    print_table(["samples", *header, "resume s", *header[1:]], rows)
    write_results(asked.json, {"sizes": asked.sizes, "ragged": asked.ragged}, results)


if __name__ == "__main__":
    main()
