"""Remember what was measured, so that the next run of the same model begins at once.

It holds facts and no decisions: predicted peaks and timed seconds by shape. Which cap follows from
them depends on the data, the global batch and the memory of the moment, and costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self, final

import torch
from pydantic import BeforeValidator, Field, PlainSerializer, TypeAdapter

from trainer.config.messages import clip
from trainer.core import durable
from trainer.core.urls import cache_folder
from trainer.plan.memory import Shape
from trainer.report.records import device_name
from trainer.tune.flops import ComputeCounts
from trainer.tune.peak_bytes import MemoryEstimate
from trainer.tune.workload import Workload

_log = logging.getLogger(__name__)

FORMAT = 14  # raised when what a fact means changes; files of another format are not read
# Settings of an optimizer that change neither time nor memory
RATES = {"params", "lr", "initial_lr", "weight_decay", "name"}


def _by_shape(rows: Any) -> dict[Shape, Any]:  # noqa: ANN401 - of a file that anyone may have written
    found = {Shape(count, length): value for count, length, value in rows}
    if any(min(shape) < 1 for shape in found):
        raise ValueError("a shape has no positions")
    return found


# JSON has no keys but strings
_ByShape = BeforeValidator(_by_shape)
_InRows = PlainSerializer(lambda known: [(*shape, value) for shape, value in known.items()])
_Duration = Annotated[float, Field(gt=0, le=1e6)]


def _or_inf(value: Any) -> Any:  # noqa: ANN401 - as for `_by_shape`
    # JSON has no infinity.
    return math.inf if value is None else value


@final
@dataclass
class Measurements:
    """What is known of one model, with or without activation checkpointing."""

    # Predicted peak of a step whose largest micro-batch has the shape
    peaks: Annotated[dict[Shape, MemoryEstimate], _ByShape, _InRows] = field(default_factory=dict)
    # Of one forward and backward, the quickest that was ever seen
    seconds: Annotated[dict[Shape, _Duration], _ByShape, _InRows] = field(default_factory=dict)
    # Of the timings, the least of any run; see `Timings`
    scatter: Annotated[float, Field(ge=0), BeforeValidator(_or_inf)] = math.inf
    method: str = ""  # how peaks are predicted
    # Predicted peak of what ran out of memory when it was timed
    failed_bytes: Annotated[int, Field(ge=1)] | None = None

    def add_timings(self, seconds: Mapping[Shape, float], scatter: float) -> None:
        """Take the quickest of old and new timings: other programs only ever add time."""
        self.scatter = min(scatter, self.scatter)
        for shape, new in seconds.items():
            self.seconds[shape] = min(new, self.seconds.get(shape, new))


_FACTS = TypeAdapter(tuple[Measurements, Measurements])


@final
@dataclass
class TuningCache:
    """What is known of one model on one machine; without a path, for this process only."""

    path: Path | None = None  # of the file; None remembers nothing beyond this process
    # Without and with activation checkpointing, so that a bool chooses one
    facts: tuple[Measurements, Measurements] = field(
        default_factory=lambda: (Measurements(), Measurements())
    )

    @classmethod
    def open(cls, situation: Mapping[str, Any], folder: Path | None = None) -> Self:
        """Open the cache of what `measurement_key` gives; an empty one if none is there.

        A file that is damaged, or no file of ours, is passed over with a warning.
        """
        text = json.dumps({"format": FORMAT, **situation}, sort_keys=True)
        name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        path = (folder or cache_folder() / "tune") / f"{name}.json"
        if path.exists():
            try:
                return cls(path, _FACTS.validate_python(durable.read_json(path)["facts"]))
            except (LookupError, TypeError, ValueError) as error:
                _log.warning("%s: not used, and measured again: %s", path, clip(str(error)))
        return cls(path)

    def save(self) -> None:
        """Write the file, whole or not at all. A cache that cannot be written is no failure."""
        if self.path is not None:
            with suppress(OSError):
                durable.make_own_folder(self.path.parent)
                durable.write_json(self.path, {"facts": _FACTS.dump_python(self.facts)})


def measurement_key(work: Workload, length: int, counts: ComputeCounts | None) -> dict[str, Any]:
    """List everything a measurement depends on.

    What a class computes shows in the operators of a fake run over that length; an edit that
    changes none of them changes no measurement.
    """
    model, module = work.model, work.model.module
    optimizer = model.spec.build(module)
    parts = (*module.modules(), model.objective, optimizer)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    classes = list[str]()
    for kind in set(map(type, parts)):
        package = sys.modules.get(kind.__module__.partition(".")[0])
        version = getattr(package, "__version__", "")
        classes.append(f"{kind.__module__}.{kind.__qualname__} {version}")
    settings = list[dict[str, Any]]()
    for group in optimizer.param_groups:
        setting = dict(group)
        for name in RATES:
            setting.pop(name, None)
        settings.append(setting)
    return {
        "classes": sorted(classes),
        "tensors": [f"{n} {t.dtype} {tuple(t.shape)} {t.requires_grad}" for n, t in tensors],
        "operators": counts and counts.operators,
        "optimizer": str(settings),
        "average": work.ema_decay is not None,
        "length": length,
        "precision": model.precision,
        "compiled": work.compiled,
        "device": device_name(model.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
