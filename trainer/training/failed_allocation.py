"""Write down what an allocation that failed met: the micro-batch, the plan, the memory in use."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from trainer.core import gpu
from trainer.core.durable import make_folders, write_file_atomic
from trainer.core.format import size
from trainer.core.run_folder import RunFolder
from trainer.core.world import World
from trainer.training.batches import PlannedBatch


@final
@dataclass
class FailedAllocation:
    """Writes `errors/out-of-memory-step<k>-rank<r>.txt`, the first time that memory runs out."""

    folder: Path  # the run's
    world: World  # this rank, and where it is
    predicted_bytes: int | None  # peak of a step as it was predicted; None where it was not
    limit_bytes: int | None  # what tensors may have; None where nobody knows
    _is_done: bool = field(default=False, init=False)

    def __call__(self, batch: PlannedBatch, error: BaseException) -> None:
        """Describe an attempt that failed, while what it allocated is still there."""
        if self._is_done:
            return
        self._is_done, rank, device = True, self.world.rank, self.world.device
        at = self.world.rank_progress.read().micro_batch
        path = self.folder / RunFolder.ERRORS / f"out-of-memory-step{batch.step}-rank{rank}.txt"
        known = {"predicted peak": self.predicted_bytes, "limit of tensors": self.limit_bytes}
        shapes = zip(batch.plan.ranks[rank], batch.plan.padded_lengths[rank], strict=True)
        lines = [
            f"step {batch.step}, rank {rank}, micro-batch {at}, on {device}: {error}",
            *(f"{name}: {size(number)}" for name, number in known.items()),
            "micro-batches of this rank:",
            *(
                f"{'>' if number == at else ' '} {number}: {len(slot)} samples, "
                f"{'a row of' if batch.plan.packed else 'padded to'} {length} tokens"
                for number, (slot, length) in enumerate(shapes, start=1)
            ),
        ]
        with suppress(Exception):  # the step that follows matters more
            make_folders(path.parent)
            text = "\n".join([*lines, ""])
            write_file_atomic(path, text.encode())  # at once: an allocator may not answer
            if gpu.is_gpu(device):  # the snapshot is for https://pytorch.org/memory_viz
                write_file_atomic(path, (text + gpu.backend().memory_summary(device)).encode())
                gpu.backend().memory._dump_snapshot(str(path.with_suffix(".pickle")))
