"""Log a run's figures to Weights & Biases, offline or online."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, final

from trainer.config.components import Address, NonEmptyText, Online, Words
from trainer.config.messages import clip
from trainer.report.tracker import TrackedRun, Tracker

INIT_TIMEOUT_S = 20
BLOCK_BYTES, HEADER_BYTES = 32768, 7
STEP = "train/step"


@final
class WandbTracker(Tracker):
    """Logs to one run of W&B, whose id a resume keeps; a step is never logged twice.

    W&B forgets no point: where a run goes back behind steps, those of the killed process stay.

    Args:
        mode: `disabled`, `offline` or `online`; offline, too, where there is no way online.
        project: where W&B lists the run.
        entity: W&B user or team.
        group: of runs; None: the sweep's folder.
        tags: words to find the run by.
    """

    package: ClassVar[str] = "wandb"

    def __init__(
        self,
        mode: Literal["offline", "disabled"] | Online = "offline",
        project: NonEmptyText | None = "train",
        entity: Address | None = None,
        group: NonEmptyText | None = None,
        tags: Words = (),
    ) -> None:
        self.is_on, self._mode = mode != "disabled", mode
        self._labels = {"project": project, "entity": entity, "tags": [*tags]}
        self._group = group
        # `git status` would start what the repository of the current folder, anyone's, names.
        os.environ["WANDB_DISABLE_GIT"] = "true"

    def start(self, run: TrackedRun) -> int | None:
        """See the base class."""
        # Wherever a run is started, and in its folder, W&B looks for where to send the user's key.
        for folder in (run.folder, run.run_folder / ".wandb", Path("wandb"), Path(".wandb")):
            if (settings := folder.absolute() / "settings").exists():
                where = "a run or the current folder, but from ~/.config/wandb/settings"
                raise OSError(f"{settings}: settings of W&B are not taken from {where}; delete it")
        self._there = dict(_logged(run.folder, run.id))
        # W&B writes blocks of 32 KiB: of a killed run the last one, or all, may be missing.
        has_files = any(_files(run.folder, run.id))
        self._run, is_online = self._begin(run)
        # The last step that the server has, whatever the files of offline runs say
        self._begun = -1
        if is_online:
            self._begun = self._run.starting_step - 1
        for kind in ("train", "eval"):
            self._run.define_metric(f"{kind}/*", step_metric=STEP)
        # Files that were uploaded and removed say nothing of what was in them.
        return -1 if is_online or has_files else None

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """See the base class."""
        new = dict[str, float]()
        for name, value in figures.items():
            if step > self._there.get(name, self._begun):
                new[name] = value
        if new:
            self._run.log({**new, STEP: step}, step=step)

    def attach(self, file: Path) -> None:
        """See the base class; a copy, since a link would lead out of a folder that was moved."""
        shutil.copyfile(file, Path(self._run.dir, file.name))
        self._run.save(Path(self._run.dir, file.name), base_path=self._run.dir, policy="now")

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """See the base class."""
        import wandb  # noqa: PLC0415 - half a second

        if summary is not None:
            self._run.summary.update(summary)
        self._run.finish(exit_code=0 if summary is not None else 1)
        wandb.teardown()  # else its exit hook does, without a limit

    def _begin(self, run: TrackedRun) -> tuple[Any, bool]:
        """Start W&B's run, offline where there is no way online; and whether it is online."""
        import wandb  # noqa: PLC0415 - half a second

        settings = wandb.Settings(
            init_timeout=INIT_TIMEOUT_S,
            console="off",
            silent=True,
            save_code=False,
            reinit="create_new",  # a sweep has several runs in a process, a notebook its own
        )
        given: dict[str, Any] = {"dir": str(run.run_folder), "id": run.id}
        given |= {"resume": "allow", "name": run.name}
        given |= {**self._labels, "group": self._group or run.group, "config": run.config}
        given |= {"job_type": "train", "settings": settings}
        if self._mode == "online":
            why = "no API key: run `wandb login` once"
            try:
                wandb.setup(wandb.Settings(silent=True))
                # `init` would ask for a key on the terminal.
                if wandb.login(prompt=False):
                    return wandb.init(mode="online", **given), True
            except Exception as error:
                why = clip(f"{type(error).__name__}: {error}")
            run.warn(
                f"W&B is not reachable ({why}); this run is recorded offline, to upload it later: "
                f"wandb sync {run.folder}/offline-run-*"
            )
        return wandb.init(mode="offline", **given), False


def _files(folder: Path, run_id: str) -> Iterator[Path]:
    return folder.glob(f"offline-run-*/run-{run_id}.wandb")


def _logged(folder: Path, run_id: str) -> Iterator[tuple[str, int]]:
    """Give each figure in the files of offline runs with its steps, in order."""
    for file in sorted(_files(folder, run_id)):
        from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined] # noqa: PLC0415

        for content in _records(file.read_bytes()):
            history = Record.FromString(content).history
            for item in history.item:
                yield item.key or "/".join(item.nested_key), history.step.num


def _records(data: bytes) -> Iterator[bytes]:
    """Split W&B's file, a log as LevelDB writes it, into records, up to where a kill tore it."""
    at, record = HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(data):
        # No header begins in the last 6 bytes of a block, which are filled up.
        if BLOCK_BYTES - at % BLOCK_BYTES < HEADER_BYTES:
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        piece = data[at + HEADER_BYTES : at + HEADER_BYTES + size]
        if len(piece) < size or kind not in (1, 2, 3, 4):  # whole, first, middle, last
            return
        if kind in (1, 2):  # a record begins
            record = b""
        record += piece
        if kind in (1, 4):
            yield record
        at += HEADER_BYTES + size
