"""Tell in `status.json` how a run is doing and how it ended, for scripts to read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from trainer.checkpoint.lock import is_locked
from trainer.config.secrets import without_secrets
from trainer.core import durable

FILE_NAME = "status.json"

RunState = Literal["running", "completed", "preempted", "failed"]


def read_status(run: Path) -> dict[str, Any]:
    """Read `status.json`; empty where there is none.

    A run whose process was killed could not say so: it counts as failed once nobody uses it.
    """
    content = durable.read_json(run / FILE_NAME)
    if content.get("state") == "running" and not is_locked(run):
        content |= {"state": "failed", "reason": "its process was killed"}
    return content


def write_status(
    run: Path, state: RunState, step: int, exit_code: int | None = None, reason: str | None = None
) -> None:
    """Replace `status.json`: what a run is doing, or how and in one line why it ended.

    While it is running, `step` is that of its newest checkpoint or evaluation.
    """
    reason = reason and without_secrets(reason, os.environ)
    content = {"state": state, "exit_code": exit_code, "step": step, "reason": reason}
    durable.write_record(run / FILE_NAME, content)
