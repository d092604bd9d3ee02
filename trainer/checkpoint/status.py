"""Tell in `status.json` how a run is doing and how it ended, for scripts to read."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

from trainer.checkpoint.lock import is_locked
from trainer.config.secrets import without_secrets
from trainer.core import durable

FILE_NAME = "status.json"

State = Literal["running", "completed", "preempted", "failed"]


@final
@dataclass(frozen=True, kw_only=True)
class Status:
    """Where a run stands."""

    state: State  # what it is doing, or how it ended
    exit_code: int | None = None  # the process's, once it ended
    # Optimizer steps taken; while it is running, as of its newest checkpoint or evaluation.
    step: int = 0
    reason: str | None = None  # why it ended, in one line


def read_status(run: Path) -> dict[str, Any]:
    """Read `status.json`; empty where there is none.

    A run whose process was killed could not say so: it counts as failed once nobody uses it.
    """
    content = durable.read_json(run / FILE_NAME)
    if content.get("state") == "running" and not is_locked(run):
        content |= {"state": "failed", "reason": "its process was killed"}
    return content


def write_status(run: Path, status: Status) -> None:
    """Replace `status.json`; `SaveError` if the disk refuses."""
    content = asdict(status)
    if status.reason is not None:
        content["reason"] = without_secrets(status.reason, os.environ)
    durable.write_record(run / FILE_NAME, content)
