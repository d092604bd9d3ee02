"""Trace a few steps with PyTorch's profiler, into a file that Perfetto and Chrome show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from trainer.assemble.features import Feature
from trainer.config.run_config import RunConfig
from trainer.core import gpu
from trainer.core.durable import make_folders
from trainer.core.rank_progress import Phase
from trainer.training.loop import OpenRun

FOLDER = "profile"
WAIT, WARM_UP = 2, 1
"""Steps that are not traced: the first compile and allocate, in the last the profiler starts."""

MEMORY_EVENTS = 100_000  # newest allocations that are remembered, each with its stack


@final
@dataclass(frozen=True)
class TracedSteps(Feature):
    """Traces a few of the steps that this process takes, after the first three.

    Every rank writes a file of its own, since it is the slowest that the others wait for. On a GPU
    allocations are remembered with their stacks, for `FailedAllocation`. Without `num_steps`
    nothing is done, and no step is slower.
    """

    num_steps: int

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """See the base class."""
        return cls(config.profile)

    @contextmanager
    def around_steps(self, opened: OpenRun, folder: Path) -> Iterator[None]:
        """See the base class."""
        if not self.num_steps:
            yield
            return
        world, warn = opened.context.world, opened.reporter.warn
        path, is_gpu = folder / FOLDER / f"rank{world.rank}.json.gz", gpu.is_gpu(world.device)
        trace = _StepTrace(self.num_steps, opened.progress.step + 1, path, warn, is_gpu=is_gpu)
        world.times.on_phase = trace.enter
        # Named as private in torch, and yet what its documentation of snapshots tells to call.
        if is_gpu:
            gpu.backend().memory._record_memory_history(max_entries=MEMORY_EVENTS, stacks="python")
        try:
            yield
        finally:
            world.times.on_phase = None
            trace.close()
            if is_gpu:
                gpu.backend().memory._record_memory_history(enabled=None)
        if not trace.is_written:
            first = WAIT + WARM_UP + 1
            warn(f"profile={self.num_steps}: no trace, which begins with the {first}th step")


@final
class _StepTrace:
    """Follows the phases of steps, of which each begins with `data`."""

    def __init__(
        self, num_steps: int, first: int, path: Path, warn: Callable[[str], None], *, is_gpu: bool
    ) -> None:
        self._path, self._warn = path, warn
        activities = [ProfilerActivity.CPU]
        if is_gpu:
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(
                skip_first=first, wait=WAIT, warmup=WARM_UP, active=num_steps, repeat=1
            ),
            on_trace_ready=self._write,
        )
        # So that `ProfilerStep#4` is the optimizer step 4.
        self._profile.step_num = first
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

    def _write(self, profiler: profile) -> None:
        self.is_written = True
        try:
            make_folders(self._path.parent)
            profiler.export_chrome_trace(str(self._path))
        except OSError as error:
            self._warn(f"profile: {self._path} cannot be written: {error}")

    def close(self) -> None:
        """End the trace; where fewer steps were taken, write what there is."""
        self._phase.close()
        if self._begun and not self.is_written:
            self._profile.stop()
