"""Memory and time of a contrastive loss over the whole global batch, in one pass and in two.

    python benchmarks/contrastive.py [--batches 256 1024]

Two towers of three transformer layers embed pairs of 64 random tokens. One pass needs the whole
global batch in one micro-batch; two passes may cut it. Each cell is a run of its own, of three
steps: the peak of its process above that of a run of two samples, and the last step's time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import final

import numpy as np
import torch
from common import print_table
from torch import Tensor, nn

from trainer.accumulate.sum import Sum

LENGTH, WORDS, WIDTH = 64, 1000, 128
LINE = (
    "model._target_=contrastive.Towers data._target_=contrastive.Pairs objective=contrastive "
    "accum=fixed steps=3 eval.every=null checkpoint.every=null data.holdout=0 wandb.mode=disabled "
    "device=cpu precision=fp32 deterministic=true batch.tail=drop"
)
ONE_PASS = "accum.gradient._target_=contrastive.OnePass"


class OnePass(Sum):
    """One pass, which is the step where the global batch is one micro-batch."""

    couplings = frozenset({"batch"})


@final
class Pairs:
    """Pairs of 64 random tokens."""

    def __init__(self) -> None:
        self.lengths = np.full(4096, LENGTH)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Give one pair."""
        one, other = np.random.default_rng(i).integers(WORDS, size=(2, LENGTH))
        return {"one": torch.from_numpy(one), "other": torch.from_numpy(other)}


@final
class Towers(nn.Module):
    """Embeds each side by a small encoder of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.sides = nn.ModuleList(self._tower() for _ in range(2))
        self.logit_scale = nn.Parameter(torch.tensor([2.66]))

    @staticmethod
    def _tower() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, one: Tensor, other: Tensor) -> dict[str, Tensor]:
        """Embed tokens, `(samples, 64)`, to `(samples, 128)`."""
        query, document = self.sides
        return {
            "query": query(self.words(one)).mean(1),
            "document": document(self.words(other)).mean(1),
        }


def measured(settings: str) -> tuple[float, float, float]:
    """Give the peak in MiB, the last step's seconds, and the last loss of one run."""
    with tempfile.TemporaryDirectory() as folder:
        line = [*LINE.split(), *settings.split(), f"hydra.run.dir={folder}/run"]
        command = [sys.executable, "-m", "trainer", *line]
        subprocess.run(command, cwd=Path(__file__).parent, check=True, capture_output=True)
        text = (Path(folder) / "run" / "metrics.jsonl").read_text()
    last = json.loads(text.splitlines()[-1])
    return last["memory_bytes"] / 2**20, last["seconds"], last["loss"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 1024])
    base, rows = measured("batch.global=2 accum.micro=2")[0], []
    for size in parser.parse_args().batches:
        cells = {f"one pass, {size}": f"{ONE_PASS} accum.micro={size}"}
        cells |= {f"two passes, {micro}": f"accum.micro={micro}" for micro in (size, 32)}
        for name, settings in cells.items():
            peak, seconds, loss = measured(f"batch.global={size} {settings}")
            rows.append([str(size), name, f"{peak - base:,.0f}", f"{seconds:.2f}", f"{loss:.6f}"])
    heads = ["global batch", "passes, micro-batch", "MiB above 2 samples", "seconds", "loss"]
    print_table(heads, rows)


if __name__ == "__main__":
    main()
