"""Mirror a run's metrics.jsonl to one tracker from a thread of its own, best effort.

The thread follows the file, so that nothing waits for a tracker: no step, whatever it does, and the
end of a run for a few seconds only. What it has not taken by then is in metrics.jsonl.
"""

from __future__ import annotations

import importlib
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from trainer.config.messages import clip
from trainer.core.durable import make_folders, strict, write_file_atomic
from trainer.core.run_folder import RunFolder
from trainer.core.user_code import described
from trainer.report.journal import Follower
from trainer.report.tracker import TrackedRun, Tracker, figures_of
from trainer.report.views import views

MIRROR_POLL_S = 1.0
IMPORT_TIMEOUT_S = 5.0
THREAD = "tracker "


def is_hanging() -> bool:
    """Whether a mirror was left behind: end by `os._exit`, since exit hooks would wait for it."""
    return any(thread.name.startswith(THREAD) for thread in threading.enumerate())


def id_in(folder: Path) -> str:
    """Give the id that a tracker knows a run by, which its folder holds from the first start on."""
    path = folder / "id"
    make_folders(folder)
    if not path.exists():
        write_file_atomic(path, secrets.token_hex(4).encode())
    found = path.read_text(errors="replace").strip()
    if not re.fullmatch(r"[\w-]+", found, re.ASCII):
        raise OSError(f"{path} holds no run id: delete it")
    return found


@final
class Mirror:
    """Mirrors what a run writes into metrics.jsonl to a tracker, from `start` to `close_all`.

    The tracker is called in the mirror's thread alone. `facts` are the other fields of
    `TrackedRun`; `resumed_step` is None in a fresh run.
    """

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run_folder: Path,
        warn: Callable[[str], None],
        /,
        *,
        resumed_step: int | None = None,
        **facts: Any,  # noqa: ANN401 - `TrackedRun` says which
    ) -> None:
        self._name, self._tracker, self._warn = name, tracker, warn
        self._folder, self._resumed_step, self._facts = run_folder.absolute(), resumed_step, facts
        self._summary: Mapping[str, Any] | None = None
        self._is_over, self._is_imported = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"{THREAD}{name}", daemon=True)

    def start(self) -> None:
        """Begin to mirror the file.

        Waits until the tracker's package is imported (0.5 s), not until it has started: a loading
        process forked in the midst of an import can never import that module, whose lock nobody
        releases.
        """
        self._thread.start()
        self._is_imported.wait(IMPORT_TIMEOUT_S)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """Let the thread end; without a summary the tracker shows the run as failed."""
        self._summary = summary
        self._is_over.set()

    def join(self, since: float) -> None:
        """Wait for the thread, for as long as the tracker takes at most from a moment on."""
        self._thread.join(max(0.0, since + self._tracker.patience_s - time.monotonic()))
        if self._thread.is_alive():
            text = "did not finish in time and was abandoned; metrics.jsonl has everything"
            self._warn(f"{self._name} {text}, and the run sends it when it goes on (resume=RUN)")

    def _work(self) -> None:
        """Do all there is to do with a tracker: the thread."""
        exits = sys.exit, sys.excepthook
        try:
            if self._tracker.package:
                importlib.import_module(self._tracker.package)
            self._is_imported.set()
            self._follow(exits)
        except Exception as error:  # a mirror never stops what it shows
            why = clip(described(error))
            self._warn(f"{self._name} is off ({why}); metrics.jsonl holds everything")
        finally:
            self._is_imported.set()
            sys.exit, sys.excepthook = exits

    def _follow(self, exits: tuple[Any, Any]) -> None:
        """Hand on what the file holds and gets, from where the tracker has it."""
        tracker, own = self._tracker, self._folder / self._name
        # `logged` holds a step: what came before it has arrived.
        run_id, logged = id_in(own), own / "logged"
        after = -1
        if self._resumed_step is not None and logged.exists():
            text = logged.read_text()
            # The evaluation of that step may have come later.
            if text.isdecimal():
                after = int(text) - 1
        run = TrackedRun(
            id=run_id,
            run_folder=self._folder,
            folder=own,
            after=min(after, self._resumed_step or 0),
            warn=self._warn,
            **self._facts,
        )
        begin = tracker.start(run)
        # wandb replaces both.
        sys.exit, sys.excepthook = exits
        if begin is None:
            begin = run.after
        self._attach(self._folder / RunFolder.PLAN)
        self._log_new(logged, begin)
        for view in views().values():
            self._attach(self._folder / view.file)
        summary = self._summary
        if summary is not None:
            summary = strict(summary)
        tracker.finish(summary)

    def _log_new(self, logged: Path, begin: int) -> None:
        """Hand on entries behind a step until the run is over, and note how far in a file."""
        follower, is_over = Follower(self._folder / RunFolder.METRICS), False
        # Read once more when the run is over, for what came since the last look.
        while not is_over:
            is_over = self._is_over.wait(MIRROR_POLL_S)
            last_step = None
            for entry in follower.new():
                if entry["step"] > begin:
                    last_step = entry["step"]
                    self._tracker.log(last_step, figures_of(entry))
            if last_step is not None:
                self._tracker.flush()
                write_file_atomic(logged, str(last_step).encode())

    def _attach(self, file: Path) -> None:
        """Attach a file of the run, if it is there; figures are shown without it, too."""
        try:
            if file.exists():
                self._tracker.attach(file)
        except Exception as error:
            why = clip(described(error))
            self._warn(f"{self._name} has not got {file.name} ({why}); it is in {file.parent}")


def close_all(mirrors: Sequence[Mirror], summary: Mapping[str, Any] | None) -> None:
    """End mirrors side by side, and wait for them, for a few seconds."""
    for mirror in mirrors:
        mirror.end(summary)
    since = time.monotonic()
    for mirror in mirrors:
        mirror.join(since)
