"""Remember what was measured, so that the next run of the same model begins at once.

Facts are kept, not decisions: predicted peaks and timed seconds by shape. Which cap follows from
them depends on the data, the global batch and the memory of the moment, and costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, final

import torch

from trainer.core import durable
from trainer.data.index import cache_folder
from trainer.plan.memory import Shape
from trainer.report.environment import cpu_model
from trainer.tune.fake import operators_of
from trainer.tune.speed import QUIET
from trainer.tune.tensors import MemoryEstimate
from trainer.tune.workload import Workload

FORMAT = 5
"""Raised when what a fact means changes; files of another format are not read."""

BUSY_TRIES = 3
"""Runs that time again where every one of them was disturbed; then the quickest must do."""

RATES = {"params", "lr", "initial_lr", "weight_decay", "name"}
"""Settings of an optimizer that change neither time nor memory."""


@final
@dataclass
class Facts:
    """What is known of one model, with or without activation checkpointing.

    Attributes:
        peaks: predicted peak of a step whose largest micro-batch has the shape.
        seconds: of one forward and backward, the quickest that was ever seen.
        tries_left: how many more runs are to time again, since other programs were in the way; 0
            once a quiet one was had.
        noise: of the timings, the least of any run; see `Timings`.
        method: how peaks are predicted.
        ratio: resident bytes per byte of tensors, the worst that was seen.
    """

    peaks: dict[Shape, MemoryEstimate] = field(default_factory=dict)
    seconds: dict[Shape, float] = field(default_factory=dict)
    tries_left: int = BUSY_TRIES
    noise: float = math.inf
    method: str = ""
    ratio: float = 1.0

    def add_timings(self, seconds: Mapping[Shape, float], noise: float) -> None:
        """Take the quickest of old and new timings; busy machines are given a few more tries."""
        self.noise = min(noise, self.noise)
        for shape, new in seconds.items():
            self.seconds[shape] = min(new, self.seconds.get(shape, new))
        self.tries_left = 0 if noise <= QUIET else max(0, self.tries_left - 1)

    def to_dict(self) -> dict[str, Any]:
        """Give a mapping that JSON can hold; it writes infinity as null."""
        return {
            **asdict(self),
            "peaks": {_text(shape): asdict(peak) for shape, peak in self.peaks.items()},
            "seconds": {_text(shape): seconds for shape, seconds in self.seconds.items()},
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Read what `to_dict` gave.

        Raises:
            LookupError: a part is missing.
            ValueError: a part is none.
        """
        return cls(
            peaks={_shape(k): MemoryEstimate.from_dict(v) for k, v in saved["peaks"].items()},
            seconds={_shape(k): float(v) for k, v in saved["seconds"].items()},
            tries_left=int(saved["tries_left"]),
            noise=math.inf if saved["noise"] is None else float(saved["noise"]),
            method=str(saved["method"]),
            ratio=float(saved["ratio"]),
        )


@final
@dataclass
class TuningCache:
    """What is known of one model on one machine.

    Attributes:
        path: of the file; None is for this process only.
        plain: as blocks compute by themselves.
        recomputed: under activation checkpointing.
    """

    path: Path | None = None
    plain: Facts = field(default_factory=Facts)
    recomputed: Facts = field(default_factory=Facts)

    @classmethod
    def open(cls, situation: Mapping[str, Any], folder: Path | None = None) -> Self:
        """Open the cache of a situation; an empty one if there is none or it is damaged.

        Args:
            situation: everything that a measurement depends on; `describe` gives it.
            folder: of all caches; None is the user's.
        """
        text = json.dumps({"format": FORMAT, **situation}, sort_keys=True)
        name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        path = (folder or cache_folder() / "tune") / f"{name}.json"
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            saved = json.loads(path.read_text())
            return cls(path, *(Facts.from_dict(saved[key]) for key in ("plain", "recomputed")))
        return cls(path)

    def facts(self, *, recompute: bool) -> Facts:
        """Give what is known with, or without, activation checkpointing."""
        return self.recomputed if recompute else self.plain

    def save(self) -> None:
        """Write the file, whole or not at all. A cache that cannot be written is no failure."""
        if self.path is not None:
            content = {"plain": self.plain.to_dict(), "recomputed": self.recomputed.to_dict()}
            with suppress(OSError):
                durable.make_folders(self.path.parent)
                durable.write_json(self.path, content)


def describe(work: Workload, length: int, precision: str) -> dict[str, Any]:
    """List everything a measurement depends on.

    What a class computes is told by the operators of a fake forward; an edit that changes none of
    them changes no measurement.

    Args:
        work: what is computed.
        length: of the longest sample.
        precision: of the forward.
    """
    device, optimizer = work.device, work.make_optimizer(work.model)
    options = [
        {key: value for key, value in group.items() if key not in RATES}
        for group in optimizer.param_groups
    ]
    parts = (*work.model.modules(), work.objective, optimizer)
    tensors = [*work.model.named_parameters(), *work.model.named_buffers()]
    return {
        "classes": sorted({_class_of(part) for part in parts}),
        "tensors": [f"{n} {t.dtype} {tuple(t.shape)} {t.requires_grad}" for n, t in tensors],
        "operators": operators_of(work, Shape(2, length)),
        "optimizer": str(options),
        "fields": {
            key: [str(f.dtype), list(f.shape)] for key, f in work.make_fields(1, length).items()
        },
        "length": length,
        "precision": precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _class_of(part: object) -> str:
    kind = type(part)
    package = sys.modules.get(kind.__module__.partition(".")[0])
    return f"{kind.__module__}.{kind.__qualname__} {getattr(package, '__version__', '')}"


def _text(shape: Shape) -> str:
    return f"{shape.num_samples}x{shape.length}"


def _shape(text: str) -> Shape:
    num_samples, length = map(int, text.split("x"))
    return Shape(num_samples, length)
