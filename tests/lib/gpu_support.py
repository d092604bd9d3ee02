"""What tests of the GPU share: a small GPT, documents, memory that runs out or is soiled."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.run_support import go
from tests.lib.support import VOCABULARY, Bench, RaggedText
from trainer.cli.python_api import FinishedRun
from trainer.core.world import World
from trainer.models.gpt import GPT
from trainer.plan.cut import Cut

ON_A_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
"""The value of `device` that is skipped without one."""

LONGEST = 23
SHAPE = {
    "vocab_size": VOCABULARY,
    "width": 32,
    "num_layers": 2,
    "num_heads": 2,
    "max_length": LONGEST + 1,
}
MODEL = " ".join(["model=gpt_tiny", *(f"model.{name}={value}" for name, value in SHAPE.items())])
DATA = "data._target_=tests.lib.support.RaggedText data.num_samples=64"


def run_gpt(device: str, line: str = "") -> FinishedRun:
    """Run the small GPT on ragged documents, a few of them one token long."""
    return go(f"{MODEL} {DATA} batch.global=16 device={device} precision=fp32 {line}")


def make_gpt(device: str, positions: str = "rotary", **more: Any) -> GPT:
    """Build the same GPT by hand, with the same weights on every device."""
    torch.manual_seed(0)
    return GPT(**SHAPE, positions=positions, **more).to(device)


def bench_of(device: str, cut: Cut) -> Bench:
    """Steps of that GPT on one rank."""
    world = World(device=torch.device(device))
    return Bench(cut, torch.float32, model=lambda: make_gpt(device), world=world)


def documents(lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(0)
    rows = [torch.randint(VOCABULARY, (length,), generator=numbers) for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


class Windows(RaggedText):
    """Rows of one length."""

    def __init__(self) -> None:
        super().__init__(256)
        self.lengths[:], self.masked = 256, set()
        numbers = torch.Generator().manual_seed(0)
        self.samples = [*torch.randint(8192, (256, 256), generator=numbers)]


class OneTooLarge(RaggedText):
    """Documents of which one holds a token that the model has no row for."""

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        sample = super().__getitem__(index)
        if index != 5:
            return sample
        ids = sample["input_ids"].clone()
        ids[-1] = VOCABULARY
        return {"input_ids": ids, "labels": sample["labels"]}


def run_out_of_memory(device: str) -> None:
    """Ask a device for more than it has; its own allocator raises."""
    size = 2**60
    if device == "cuda":
        size = torch.cuda.get_device_properties(0).total_memory
    torch.empty(size, dtype=torch.uint8, device=device)
    raise AssertionError("it had it")


@contextmanager
def soiled_memory(device: str) -> Iterator[None]:
    """Let memory that nothing was written to hold NaN, be it fresh or used before."""
    if device == "cuda":
        spoilt = [torch.full((2**k,), float("nan"), device=device) for k in range(8, 27)]
        del spoilt
    was_on = torch.are_deterministic_algorithms_enabled()
    was_filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on)
        torch.utils.deterministic.fill_uninitialized_memory = was_filled


def compiled_for(device: str) -> Any:
    """Compile on a GPU; go through the same code uncompiled on a CPU, where it takes minutes."""
    return nullcontext() if device == "cuda" else torch.compiler.set_stance("force_eager")
