"""Weights & Biases: a mirror of metrics.jsonl, best effort, never in the way.

The mirror is a process of its own that follows the file (`wandb_process`), so that wandb's
import, its questions, its hangs and its exit handlers stay out of training. The end of a run waits
for it for a few seconds, then ends it; what it had recorded by then is on the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Literal, final

from trainer.config.secrets import MASK, is_secret, without_secrets
from trainer.core.durable import make_folders, strict, write_file_atomic
from trainer.report.journal import METRICS_FILE

Mode = Literal["disabled", "offline", "online"]

INIT_TIMEOUT_S = 20
CLOSE_TIMEOUT_S = 8.0
_MOST_ID_BYTES = 256


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WandbSettings:
    """What W&B is told about a run; None leaves it to W&B.

    Attributes:
        job_type: the command.
        group: runs that belong together, such as those of a sweep.
        run_id: of W&B's run, where the folder has lost its own.
    """

    mode: Mode = "offline"
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    name: str | None = None
    job_type: str | None = "train"
    run_id: str | None = None


def shown_config(value: Any) -> Any:  # noqa: ANN401 - any config value
    """Copy a config as plain JSON values, with everything that looks like a secret hidden."""
    if isinstance(value, Mapping):
        return {
            str(key): MASK if is_secret(str(key), item) else shown_config(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [shown_config(item) for item in value]
    if isinstance(value, int | float | None):
        return value
    return without_secrets(str(value), os.environ)


@final
class WandbMirror:
    """Mirrors the metrics of a run until closed. Does nothing when disabled.

    Args:
        settings: what W&B is told.
        folder: the run folder; W&B's files go to its `wandb/`, with the id that a resume keeps.
        config: what to show as the run's config.
        warn: told in one line when something does not work.
        close_timeout_s: how long the end of a run waits for the mirror.

    Attributes:
        run_id: of W&B's run; None where there is none.
    """

    def __init__(
        self,
        settings: WandbSettings,
        folder: Path,
        config: Mapping[str, Any],
        warn: Callable[[str], None],
        *,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        self._close_timeout_s = close_timeout_s
        self._warn = warn
        self.run_id: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: Thread | None = None
        if settings.mode == "disabled":
            return
        try:
            self._begin(settings, folder.absolute(), config)
        except (OSError, ValueError) as error:
            self._warn(f"W&B is off ({error}); metrics.jsonl holds everything")

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Let the mirror finish, for a few seconds at most. Closing twice does nothing.

        Args:
            summary: final figures; None marks the run as failed.
        """
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            if summary is not None:
                process.stdin.write(json.dumps(strict(summary)).encode() + b"\n")
            process.stdin.close()
        try:
            process.wait(self._close_timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._warn("W&B did not finish in time and was left; metrics.jsonl holds everything")
        if self._listener is not None:
            self._listener.join(timeout=1.0)

    def _begin(self, settings: WandbSettings, folder: Path, config: Mapping[str, Any]) -> None:
        make_folders(folder / "wandb")
        self.run_id = _run_id(folder / "wandb" / "id", settings.run_id)
        metrics = folder / METRICS_FILE
        spec = {
            "mode": settings.mode,
            "folder": str(folder),
            "id": self.run_id,
            "metrics": str(metrics),
            # What an earlier process of this run has written, it has mirrored.
            "offset": metrics.stat().st_size if metrics.exists() else 0,
            "pid": os.getpid(),
            "init_timeout_s": INIT_TIMEOUT_S,
            "config": shown_config(config),
            "labels": {
                "project": settings.project,
                "entity": settings.entity,
                "group": settings.group,
                "tags": list(settings.tags),
                "name": settings.name,
                "job_type": settings.job_type,
            },
        }
        program = Path(__file__).with_name("wandb_process.py")
        process = subprocess.Popen(
            [sys.executable, "-P", str(program)],  # -P: our wandb.py must not hide the real one
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(settings.mode),
            start_new_session=True,  # no terminal to ask at, and out of reach of Ctrl-C
        )
        self._process = process
        self._listener = Thread(target=self._listen, args=(process,), daemon=True)
        self._listener.start()
        if process.stdin is not None:
            process.stdin.write(json.dumps(strict(spec)).encode() + b"\n")
            process.stdin.flush()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdout is not None:
            with process.stdout as lines:
                for line in lines:
                    self._warn(line.decode(errors="replace").strip())


def _run_id(path: Path, known: str | None) -> str:
    """Give the id of the run's folder, made with the first process of the run.

    Args:
        path: of the file that keeps it.
        known: what a checkpoint keeps, which takes its place if it is gone.

    Raises:
        OSError: the disk refused.
        ValueError: what is kept there is no id.
    """
    if not path.exists():
        write_file_atomic(path, (known or secrets.token_hex(4)).encode())
    with path.open("rb") as file:
        run_id = file.read(_MOST_ID_BYTES).decode(errors="replace").strip()
    if not re.fullmatch(r"[\w-]+", run_id, re.ASCII):
        raise ValueError(f"{path} holds no run id: delete it")
    return run_id


def _environment(mode: Mode) -> dict[str, str]:
    """Give the mirror our environment, less what would tie it to another run of W&B."""
    ours = {k: v for k, v in os.environ.items() if k not in {"WANDB_SERVICE", "WANDB_MODE"}}
    # Error reports are the only thing an offline run would send.
    return ours if mode == "online" else ours | {"WANDB_ERROR_REPORTING": "false"}
