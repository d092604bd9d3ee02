"""Find the folder of a sweep that goes on, and keep a sweep's folder to one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.cli import remote
from trainer.cli.overrides import dotted, parse, right_side
from trainer.config.consent import ONLY_TYPED
from trainer.core import durable
from trainer.core.format import expanded
from trainer.core.run_folder import GRID_FILE, UNREADABLE, RunFolder, hold


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Make a sweep's folder, and send it where it is the copy of a URL.

    A sweep that another process runs is that one's to report.
    """
    with remote.sent(folder):
        durable.make_folders(folder)
        with hold(folder):
            yield


def newest_sweep(typed: str, overrides: Sequence[str], file: str = GRID_FILE) -> Path | None:
    """The newest sweep folder below outputs that was started with the same overrides, or `None`.

    What is typed anew for every command does not count, nor does the order. The folder where it was
    typed does: a path in its words is another one elsewhere.
    """
    outputs = expanded(typed).absolute()
    remote.bring(outputs, whole=False)
    here, wanted = str(Path.cwd()), _settings(overrides)
    found = dict[Path, tuple[float, str]]()
    for path in outputs.glob(f"multirun/**/{file}"):
        with suppress(*UNREADABLE, KeyError, TypeError):
            record = durable.read_yaml(path)["hydra"]
            begun = [*map(str, record["overrides"]["task"])]
            if record["runtime"]["cwd"] == here and _settings(begun) == wanted:
                # A sweep is as old as its first job; one without a job is older than all.
                starts = [RunFolder(job).by_start() for job in path.parent.iterdir()]
                begun_at = [start for start in starts if start[0]]
                found[path.parent] = min(begun_at, default=(0.0, str(path)))
    newest = max(found, key=found.__getitem__, default=None)
    if newest is not None:
        remote.bring(newest)
    return newest


def _settings(lines: Iterable[str]) -> set[tuple[str, str]]:
    found = {(dotted(override), right_side(override)) for override in parse(lines)[0]}
    return {(key, value) for key, value in found if key.partition(".")[0] not in ONLY_TYPED}
