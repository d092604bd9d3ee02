"""When and how the state of a run reaches the disk, and what a failure to write does to the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

from trainer.checkpoint.saver import Saver
from trainer.checkpoint.state import assert_finite, capture, plain_name
from trainer.errors import SaveError
from trainer.feed import Feed
from trainer.plan.cut import Cut
from trainer.report.reporter import Reporter
from trainer.step import Kit


@final
@dataclass(kw_only=True)
class Saves:
    """Saves the state of a run.

    Attributes:
        kit: holds model and optimizer.
        feed: holds the position and the cut.
        saver: writes at once or behind the next steps.
        reporter: hears of every checkpoint.
        constants: what does not change over the run: contract, fingerprint, tuned constants.
        describe_cut: gives what a resumed run needs to cut as this one does.
        on_full: whether a checkpoint that could not be written stops the run.
        newest: the newest checkpoint on disk.
    """

    kit: Kit
    feed: Feed
    saver: Saver
    reporter: Reporter
    constants: Mapping[str, Any]
    describe_cut: Callable[[Cut], Mapping[str, Any]]
    on_full: Literal["stop", "continue"] = "stop"
    newest: Path | None = None

    def save(self, tokens: int, *, is_last: bool = False) -> None:
        """Save the state after the last step.

        Args:
            tokens: real input positions consumed so far.
            is_last: the run ends here, and not well without this state on disk.

        Raises:
            SaveError: it could not be written, and the run is to stop then.
        """
        if is_last:
            self._note(self.saver.wait)
            self.on_full = "stop"
        self.kit.world.note("saving")
        self._attempt(self.reporter.flush)
        cursor = self.feed.cursor
        tensors, meta = capture(
            self.kit.model.module,
            self.kit.optimizer,
            extra={
                **self.constants,
                "cursor": asdict(cursor),
                "tokens": tokens,
                "cut": dict(self.describe_cut(self.feed.cut)),
            },
        )
        # A causal mask is a buffer of -inf; what is trained must be finite.
        buffers = {f"model.{plain_name(n)}" for n, _ in self.kit.model.module.named_buffers()}
        assert_finite({n: tensor for n, tensor in tensors.items() if n not in buffers})
        self._attempt(lambda: self.saver.save(cursor.step, tensors, meta))
        self._note(self.saver.check)

    def poll(self) -> None:
        """Hear of a checkpoint that became durable behind the steps, or of its failure.

        Several ranks hear of it when they save or close, so that no step waits for it.

        Raises:
            SaveError: it could not be written, and the run is to stop then.
        """
        if self.kit.world.size == 1:
            self._note(self.saver.check)

    def close(self) -> None:
        """Wait for what is being written.

        Raises:
            SaveError: it could not be written; a run does not end well without its state.
        """
        self.on_full = "stop"
        self._note(self.saver.close)

    def release(self) -> None:
        """Let what is being written come to its end, when the run ended for another reason."""
        with suppress(SaveError):
            self.saver.close()

    def _note(self, ask: Callable[[], Path | None]) -> None:
        self._attempt(lambda: self._tell(ask()))

    def _tell(self, path: Path | None) -> None:
        if path is not None:
            self.newest = path
            self.reporter.checkpoint(int(path.name.rpartition("-")[2]), path)

    def _attempt(self, write: Callable[[], None]) -> None:
        """Write on the main rank; every rank hears of a failure.

        Raises:
            SaveError: it failed, and the run is to stop then.
        """
        try:
            self.kit.world.on_main(write)
        except SaveError as error:
            if self.on_full == "stop":
                raise
            self.reporter.warn(f"{error}; going on without saving")
