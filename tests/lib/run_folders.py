"""Folders of runs as they are left on disk, written without a run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.core.run_folder import RunFolder


def left_run(
    folder: Path,
    typed: Sequence[str] = (),
    *,
    config: Mapping[str, Any] = {},
    status: Mapping[str, Any] = {"state": "completed", "step": 4},
    began: float = 1.0,
    entries: Sequence[Mapping[str, Any]] = (),
    **records: Mapping[str, Any],
) -> Path:
    """Write what a run leaves: its config and words, how it ended, metrics and more records."""
    (folder / RunFolder.HYDRA).mkdir(parents=True)
    plain = {"command": "train", "name": None, **config}
    (folder / RunFolder.CONFIG).write_text(yaml.safe_dump(plain, sort_keys=False))
    (folder / RunFolder.HYDRA / RunFolder.OVERRIDES).write_text(yaml.safe_dump([*typed]))
    (folder / RunFolder.START).write_text(json.dumps({"started": began}))
    (folder / RunFolder.METRICS).write_text("".join(f"{json.dumps(each)}\n" for each in entries))
    for name, content in {"status": status, **records}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def left_sweep(folder: Path, *jobs: Sequence[str], name: str | None = None) -> Path:
    """Write what a sweep leaves, a run for each job."""
    for number, typed in enumerate(jobs):
        left_run(folder / str(number), typed, config={"name": name}, began=10.0 + number)
    (folder / "multirun.yaml").touch()
    return folder
