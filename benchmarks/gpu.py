"""What is wrong and what is slow on a GPU, found in one sitting of under eight minutes.

    python benchmarks/gpu.py [--minutes 8] [--only windows,memory] [--out FOLDER]
                             [--commands README,Llama] [--peers "hand loop"]
    python benchmarks/gpu.py --dry-run

GPT-2's 124M parameters, random tokens, windows of 1,024 and ragged documents, 256 samples a step
where trainers are compared and 128 where settings are. Every row is printed, and appended to
`rows.jsonl` of the folder, when it is there; sections come in the order of their value, and a row
that the time left would not hold is left out, with that as its reason. A setting that is refused,
and whatever fails, is a row that says why. Tables come at the end. Nothing is downloaded.

    machine    versions; what products of matrices and copies reach at best
    checks     `tests/gpu`, README's command, `train verify` in bf16, options one by one, each a
               process whose output is a file of the folder; several at a time, so none is timed
    windows    tokens/s and MFU of `accum=auto`, compiled, beside a hand-written loop and Hugging
               Face's Trainer, taking turns
    documents  the same on ragged documents; Hugging Face's also balanced, and without padding
    chats      `sft.py`: ours, TRL and Hugging Face's Trainer on conversations
    syncs      waits of the host for the device in a step, and where: one is the aim
    graphs     graphs compiled by the end of every ragged step: they should cease to grow
    kernels    what the GPU does in a step, the longest first
    long run   200 ragged steps, 12 GiB left on the GPU: the allocator's retries, replays
    memory     bytes predicted, allocated and reserved, by cap, packing and recomputation, and
               seconds of a step beside those predicted
    settings   each setting changed alone
    sweep      `accum=auto` beside every cap

`mfu` is useful tokens times `6 N + 12 L d T` FLOP (`gpu_run.utilization`) over the GPU's dense bf16
rate. `off` is predicted over allocated less one. A dry run goes through all of it on a CPU with a
toy; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from common import FOLDER, print_table
from gpu_run import FULL, TOY, Bench, OutOfTime, prepare_process, reason_of
from gpu_sections import SECTIONS

RESERVE_S = 15.0
"""Of the time, for the start of the process and the tables."""

Row = dict[str, Any]


@final
@dataclass
class Book:
    """Takes rows: each is printed and written at once, and shown in a table in the end."""

    path: Path
    device: str
    rows: list[Row] = field(default_factory=list)

    def add(self, section: str, name: str, seconds: float, fields: Mapping[str, Any]) -> None:
        """Take a row."""
        row = {"section": section, "row": name, "device": self.device, **fields}
        row["seconds"] = round(seconds, 2)
        self.rows.append(row)
        line = json.dumps(row, default=str)
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")

    def show(self) -> None:
        """Print a table for every section."""
        for section in dict.fromkeys(row["section"] for row in self.rows):
            rows = [row for row in self.rows if row["section"] == section]
            names = [n for row in rows for n in row if n not in {"section", "row", "device"}]
            header = [*dict.fromkeys(names)]
            print(f"\n{section}, on {self.device}")
            body = [(row["row"], *(shown(n, row.get(n)) for n in header)) for row in rows]
            print_table(("", *header), body)


def shown(name: str, value: object) -> str:
    """Write a value for a table."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key} x{count}" for key, count in value.items())
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if name.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB"
    if name in {"mfu", "off", "padding"}:
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3f}"


def measure(bench: Bench, book: Book, only: list[str]) -> None:
    """Go through the sections."""
    for section, rows in SECTIONS.items():
        if only and section not in only:
            continue
        for name, needs, task in rows(bench):
            if bench.scale.is_gpu and bench.left_s < needs:
                left = f"{max(0.0, bench.left_s):.0f} s are left and {needs:.0f} s needed"
                book.add(section, name, 0.0, {"skipped": left})
                continue
            began = time.monotonic()
            try:
                found = task()
            except OutOfTime:
                found = {"skipped": "the time was up in the middle of it"}
            except Exception as error:
                found = {"failed": reason_of(error)}
            seconds = time.monotonic() - began
            for each, fields in [(name, found)] if isinstance(found, dict) else found:
                book.add(section, each, seconds, fields)


def main() -> None:
    """Read the command line, measure, show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--out", type=Path, default=FOLDER / "gpu")
    parser.add_argument("--commands", type=lambda text: text.split(","), default=[""])
    parser.add_argument("--peers", type=lambda text: text.split(","), default=[])
    parser.add_argument("--dry-run", action="store_true", help="a toy, on a CPU")
    arguments = parser.parse_args()
    ends_at = time.monotonic() + 60 * arguments.minutes - RESERVE_S
    if unknown := set(arguments.only) - set(SECTIONS):
        parser.error(f"--only: {unknown.pop()} is none of {', '.join(SECTIONS)}")
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error("no GPU is here; --dry-run goes through all of it on a CPU")
    scale = TOY if arguments.dry_run else FULL
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        prepare_process(scale, Path(folder))
        device = torch.cuda.get_device_name() if scale.is_gpu else "CPU, a dry run"
        book = Book(arguments.out / "rows.jsonl", device)
        bench = Bench(
            scale=scale,
            folder=Path(folder),
            logs=arguments.out.resolve(),
            ends_at=ends_at,
            commands=tuple(arguments.commands),
            peers=tuple(arguments.peers),
        )
        measure(bench, book, arguments.only)
    book.show()
    print(f"\nwritten to {arguments.out}")


if __name__ == "__main__":
    main()
