"""Mirror a run's metrics.jsonl to Weights & Biases from one thread, best effort.

The thread follows the file, so that nothing waits for W&B: no step, whatever it does, and the end
of a run for a few seconds only. What it has not taken by then is in metrics.jsonl.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from trainer.config.messages import clip
from trainer.core.durable import make_folders, strict, write_file_atomic
from trainer.report.journal import METRICS_FILE, Entry, Follower

POLL_S = 1.0
IMPORT_TIMEOUT_S = 5.0
INIT_TIMEOUT_S = 20
CLOSE_TIMEOUT_S = 7.0  # the end of a command is promised within 10 s, on a busy machine too
THREAD = "W&B mirror"


def is_hanging() -> bool:
    """Whether a mirror was left behind: end by `os._exit`, since wandb's exit hooks would wait."""
    return any(thread.name == THREAD for thread in threading.enumerate())


@final
class WandbMirror:
    """Mirrors what a run writes into metrics.jsonl from `start` to `close`; not when disabled.

    Args:
        mode: `disabled`, `offline` or `online`; offline, too, where there is no way online.
        folder: the run folder; W&B's files go to its `wandb/`, with the id that a resume keeps.
        config: plain values without secrets, as config.yaml has them.
        warn: called with one line when something does not work.
        labels: `project`, `entity`, `group`, `tags`, `name`; None leaves one to W&B.
    """

    def __init__(
        self,
        mode: str,
        folder: Path,
        config: Mapping[str, Any],
        warn: Callable[[str], None],
        *,
        labels: Mapping[str, Any] | None = None,
    ) -> None:
        self._mode, self._folder, self._warn = mode, folder.absolute(), warn
        self._labels = {"config": config, **(labels or {})}
        self._summary: Mapping[str, Any] | None = None
        self._is_over, self._is_imported = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._run_id: str | None = None  # none is mirrored
        if mode == "disabled":
            return
        path = self._folder / "wandb" / "id"
        try:
            make_folders(path.parent)
            if not path.exists():
                write_file_atomic(path, secrets.token_hex(4).encode())
            found = path.read_text(errors="replace").strip()
            if re.fullmatch(r"[\w-]+", found, re.ASCII):
                self._run_id = found
            else:
                warn(f"W&B is off ({path} holds no run id: delete it)")
        except OSError as error:
            warn(f"W&B is off ({error}); metrics.jsonl holds everything")

    def start(self) -> None:
        """Mirror what the file gets from here on; an earlier process mirrored the rest.

        Waits until wandb is imported (0.5 s), not until it has started: a loading process forked
        in the midst of an import can never import that module, whose lock nobody releases.
        """
        if self._run_id is None:
            return
        follower = Follower(self._folder / METRICS_FILE)
        work = threading.Thread(target=self._mirror, args=(follower,), name=THREAD, daemon=True)
        self._thread = work
        work.start()
        self._is_imported.wait(IMPORT_TIMEOUT_S)

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Let the mirror finish, for a few seconds.

        Args:
            summary: the final figures; without them W&B shows the run as failed.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._summary = summary
        self._is_over.set()
        thread.join(CLOSE_TIMEOUT_S)
        if thread.is_alive():
            self._warn("W&B did not finish in time and was abandoned; metrics.jsonl has everything")

    def _mirror(self, follower: Follower) -> None:
        """Do all there is to do with wandb: the thread."""
        exits = sys.exit, sys.excepthook
        try:
            if self._mode != "online":
                # Error reports are the only thing an offline run would send.
                os.environ["WANDB_ERROR_REPORTING"] = "false"
            # `git status` would start what the repository of the current folder, anyone's, names.
            os.environ["WANDB_DISABLE_GIT"] = "true"
            wandb = importlib.import_module("wandb")
            self._is_imported.set()
            run = self._begin(wandb)
            sys.exit, sys.excepthook = exits  # wandb replaces both
            is_over = False
            while not is_over:
                is_over = self._is_over.wait(POLL_S)
                for entry in follower.new():
                    run.log(row(entry), step=entry["step"])
            if self._summary is not None:
                run.summary.update(strict(self._summary))
            run.finish(exit_code=0 if self._summary is not None else 1)
            wandb.teardown()  # else its exit hook does, without a limit
        except Exception as error:  # a mirror never stops what it shows
            why = clip(f"{type(error).__name__}: {error}")
            self._warn(f"W&B is off ({why}); metrics.jsonl holds everything")
        finally:
            self._is_imported.set()
            sys.exit, sys.excepthook = exits

    def _begin(self, wandb: Any) -> Any:  # noqa: ANN401 - imported by the thread alone
        """Start W&B's run, offline where there is no way online."""
        settings = wandb.Settings(
            init_timeout=INIT_TIMEOUT_S,
            console="off",
            silent=True,
            save_code=False,
            reinit="create_new",  # a sweep has several runs in a process, a notebook its own
        )
        given = {"dir": str(self._folder), "id": self._run_id, "resume": "allow"}
        given |= {**self._labels, "job_type": "train", "settings": settings}
        if self._mode == "online":
            why = "no API key: run `wandb login` once"
            try:
                wandb.setup(wandb.Settings(silent=True))
                if wandb.login(prompt=False):  # `init` would ask for a key
                    return wandb.init(mode="online", **given)
            except Exception as error:
                why = clip(f"{type(error).__name__}: {error}")
            self._warn(
                f"W&B is not reachable ({why}); this run is recorded offline, to upload it later: "
                f"wandb sync {self._folder}/wandb/offline-run-*"
            )
        return wandb.init(mode="offline", **given)


def row(entry: Entry) -> dict[str, Any]:
    """Name the figures of an entry as W&B has them: `train/loss`, `eval/loss`."""
    figures = dict[str, Any]()
    for key, value in entry.items():
        if key != "step" and value is not None:
            is_eval, number = key.startswith("eval_"), 1 if isinstance(value, str) else value
            figures[f"eval/{key[5:]}" if is_eval else f"train/{key}"] = number
    return figures
