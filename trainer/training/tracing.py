"""Trace a few steps with PyTorch's profiler, into a file that Perfetto and Chrome show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from trainer.core.durable import make_folders
from trainer.core.rank_progress import Phase
from trainer.core.world import World

FOLDER = "profile"
WAIT, WARM_UP = 2, 1
"""Steps that are not traced: the first compile and allocate, in the last the profiler starts."""

MEMORY_EVENTS = 100_000  # newest allocations that are remembered, each with its stack


@contextmanager
def tracing(
    world: World, num_steps: int, begun: int, folder: Path, warn: Callable[[str], None]
) -> Iterator[None]:
    """Trace steps that this rank takes inside the block, after the first three.

    Every rank writes a file of its own, since it is the slowest that the others wait for. On a GPU
    allocations are remembered with their stacks, for `FailedAllocation`. Without `num_steps`
    nothing is done, and no step is slower.

    Args:
        world: the ranks; phases are read off its `times`.
        num_steps: to trace.
        begun: steps that were taken before.
        folder: the run's.
        warn: called with one line when there is no trace.
    """
    if not num_steps:
        yield
        return
    path, is_gpu = folder / FOLDER / f"rank{world.rank}.json.gz", world.device.type == "cuda"
    trace = _StepTrace(num_steps, begun + 1, partial(_write, path, warn), is_gpu=is_gpu)
    world.times.on_phase = trace.enter
    if is_gpu:
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS, stacks="python")
    try:
        yield
    finally:
        world.times.on_phase = None
        trace.close()
        if is_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
    if not trace.is_written:
        warn(f"profile={num_steps}: no trace, which begins with the {WAIT + WARM_UP + 1}th step")


def _write(path: Path, warn: Callable[[str], None], profiler: profile) -> None:
    try:
        make_folders(path.parent)
        profiler.export_chrome_trace(str(path))
    except OSError as error:
        warn(f"profile: {path} cannot be written: {error}")


@final
class _StepTrace:
    """Follows the phases of steps, of which each begins with `data`."""

    def __init__(
        self, num_steps: int, first: int, write: Callable[[profile], None], *, is_gpu: bool
    ) -> None:
        within = schedule(wait=WAIT, warmup=WARM_UP, active=num_steps, repeat=1)

        def action(step: int) -> ProfilerAction:
            found: ProfilerAction = within(max(0, step - first))
            return found

        def ready(profiler: profile) -> None:
            self.is_written = True
            write(profiler)

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
        self._profile = profile(activities=activities, schedule=action, on_trace_ready=ready)
        self._profile.step_num = first  # so that `ProfilerStep#4` is the optimizer step 4
        self._phase = ExitStack()
        self._begun = self.is_written = False

    def enter(self, phase: Phase) -> None:
        """Mark that a phase begins, and with `data` a step."""
        self._phase.close()
        if self.is_written:
            return
        if phase == "data" and self._begun:
            self._profile.step()
        elif phase == "data":
            self._profile.start()
            self._begun = True
        self._phase.enter_context(record_function(f"phase: {phase}"))

    def close(self) -> None:
        """End the trace; where fewer steps were taken, write what there is."""
        self._phase.close()
        if self._begun and not self.is_written:
            self._profile.stop()
