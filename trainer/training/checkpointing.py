"""Save the state of a run, and decide what a failure to write does to the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, final

from torch import Tensor, nn

from trainer.checkpoint.state import assert_finite, capture, not_finite, plain_name
from trainer.checkpoint.store import MODEL, OPTIMIZER, CheckpointWriter
from trainer.core.errors import SaveError
from trainer.core.stateful import Stateful
from trainer.core.world import World
from trainer.report.reporter import Reporter


@final
@dataclass(kw_only=True)
class Checkpointer:
    """Saves the state of a run."""

    world: World
    module: nn.Module
    parts: Mapping[str, Stateful]  # what a checkpoint consists of, by name
    writer: CheckpointWriter
    reporter: Reporter
    # Whether a checkpoint that could not be written stops the run
    on_full: Literal["stop", "continue"] = "stop"
    # Seconds between checkpoints, by the main rank's clock; None counts steps alone
    every_s: float | None = None
    # Whether so many seconds had passed at the last `poll`; the same on every rank
    is_due: bool = False
    # Names of buffers that begin with values that are not finite, as a causal mask does
    masks: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        named = self.module.named_buffers()
        self.masks = not_finite({f"{MODEL}.{plain_name(name)}": buffer for name, buffer in named})
        self._saved_at = time.monotonic()

    def save(self, step: int, *, is_last: bool = False) -> None:
        """Save the state after a step. Collective.

        With `is_last` the run ends here, and not well without this state on disk.
        """
        if is_last:
            self._attempt(self.writer.wait)
            self.on_full = "stop"
        self.world.note("saving")
        self._attempt(lambda: self.world.on_main(self.reporter.flush))
        tensors, states = capture(self.parts)
        # Parts of the user may hold what they like; weights that are not finite train no further.
        finite = dict[str, Tensor]()
        for name, tensor in tensors.items():
            if name.startswith((f"{MODEL}.", f"{OPTIMIZER}.")) and name not in self.masks:
                finite[name] = tensor
        self.world.on_all(lambda: assert_finite(finite))
        self._attempt(lambda: self.writer.save(step, tensors, states))
        self.is_due, self._saved_at = False, time.monotonic()

    def mark_best(self, step: int, metric: str) -> None:
        """Keep the checkpoint of a step, the best by a metric, not the one before. Collective."""
        self._attempt(self.writer.wait)
        store = self.writer.store
        self._attempt(lambda: self.world.on_main(lambda: store.mark_best(step, metric)))

    def poll(self, claim: bool) -> bool:
        """Report what was written behind the steps, and find whether the next save is due.

        Collective: three numbers, and more only where there is something to report. Whether
        `claim` holds on any rank travels along, and is returned.
        """
        passed_s = time.monotonic() - self._saved_at
        is_due = self.world.is_main and self.every_s is not None and passed_s >= self.every_s
        asked = [float(claim), float(self.writer.has_result), float(is_due)]
        claims, results, due = self.world.sum_numbers(asked)
        self.is_due = due > 0
        if results:
            self._attempt(self.writer.wait)
        return claims > 0

    def close(self) -> None:
        """Wait for what is being written, without which a run does not end well. Collective."""
        self.on_full = "stop"
        self._attempt(self.writer.close)

    def release(self) -> None:
        """Let what is being written come to its end, when the run ended for another reason."""
        # Ranks that are gone end a collective with what PyTorch raises for it.
        with suppress(SaveError, RuntimeError):
            self.writer.close()

    def _attempt(self, write: Callable[[], Path | None]) -> None:
        """Write, or wait for it, and report a checkpoint that is on disk by then."""
        try:
            # It fails on all ranks or on none.
            path = write()
            if path is not None:
                step = int(path.name.rpartition("-")[2])
                self.world.on_main(lambda: self.reporter.checkpoint(step, path))
        except SaveError as error:
            if self.on_full == "stop":
                raise
            self.reporter.warn(f"{error}; going on without saving")
