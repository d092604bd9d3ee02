"""The process that mirrors metrics.jsonl to Weights & Biases. Run by its path, imports only wandb.

It follows the file, so nothing is ever waited for: wandb may take half a second to import, ask,
hang or die here, and training does not notice. Standard input brings one JSON object to begin
with and, at the end, one with the summary; its end of file is the end of the run. Each line on
standard output is a warning for the user.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, Literal, TextIO, final

Mode = Literal["online", "offline"]
POLL_S = 1.0
NICENESS = 10


def main() -> int:
    """Mirror one run until its end."""
    # A scheduler signals every process of a job; the run says when it is over.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.nice(NICENESS)
    parent = FileIO(os.dup(0), "r")
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    spec = json.loads(parent.readline())
    _silence(Path(spec["folder"]) / "wandb" / "mirror.log")
    run = begin(spec, messages)
    if run is None:
        return 1
    rows = Follower(Path(spec["metrics"]), spec["offset"])
    is_over = False
    while not is_over:
        is_over = bool(select.select([parent], [], [], POLL_S)[0])
        for entry in rows.new():
            run.log(row(entry), step=entry["step"])
    last = parent.readline()
    if last:
        run.summary.update(json.loads(last))
    run.finish(exit_code=0 if last else 1)
    return 0


def begin(spec: dict[str, Any], messages: TextIO) -> Any:  # noqa: ANN401 - wandb has no types here
    """Start the W&B run: online if asked, else or failing that offline, failing that not at all.

    Args:
        spec: see `trainer.report.wandb`.
        messages: gets one line when it did not go as asked.

    Returns:
        The run, or None.
    """
    failures: list[str] = []
    modes: tuple[Mode, ...] = ("online", "offline") if spec["mode"] == "online" else ("offline",)
    for mode in modes:
        try:
            run = _init(spec, mode)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}".splitlines()[0][:200])
            continue
        if failures:
            messages.write(
                f"W&B is not reachable ({failures[0]}); this run is recorded offline, "
                f"to upload it later: wandb sync {spec['folder']}/wandb/offline-run-*\n"
            )
        return run
    messages.write(f"W&B is off ({'; '.join(failures)}); metrics.jsonl holds everything\n")
    return None


@final
class Follower:
    """Reads a growing file of JSON lines.

    Args:
        path: may not exist yet.
        offset: bytes to pass over.
    """

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self._offset = offset

    def new(self) -> Iterator[dict[str, Any]]:
        """Read the whole lines that have come since the last call.

        Yields:
            An entry each.
        """
        if not self._path.exists():
            return
        with self._path.open("rb") as lines:
            lines.seek(self._offset)
            while (line := lines.readline()).endswith(b"\n"):
                self._offset += len(line)
                with contextlib.suppress(ValueError):
                    yield json.loads(line)


def row(entry: dict[str, Any]) -> dict[str, Any]:
    """Name the figures of an entry as W&B has them: `train/loss`, `eval/loss`."""
    named: dict[str, Any] = {}
    for key, value in entry.items():
        if key == "step" or value is None:
            continue
        name = f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"
        named[name] = 1 if isinstance(value, str) else value
    return named


def _init(spec: dict[str, Any], mode: Mode) -> Any:  # noqa: ANN401
    import wandb  # noqa: PLC0415 - takes half a second, and may fail

    # Takes the process whose use of the machine is recorded; older versions cannot be told.
    pid = {"x_stats_pid": spec["pid"]} if "x_stats_pid" in wandb.Settings.model_fields else {}
    settings = wandb.Settings(
        init_timeout=spec["init_timeout_s"], console="off", silent=True, save_code=False, **pid
    )
    return wandb.init(
        mode=mode,
        dir=spec["folder"],
        id=spec["id"],
        resume="allow",
        settings=settings,
        config=spec["config"],
        **spec["labels"],
    )


def _silence(log: Path) -> None:
    """Send what wandb prints to a file, and let it ask nobody."""
    with log.open("ab") as sink, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)


if __name__ == "__main__":
    sys.exit(main())
