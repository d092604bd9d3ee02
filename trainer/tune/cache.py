"""Remembers what was measured, so that the next run of the same model begins at once.

Facts are kept, not decisions: predicted peaks and timed seconds by shape. Which cap follows from
them depends on the data, the global batch and the memory of the moment, and costs nothing.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, final

import numpy as np
import torch
from torch import nn

from trainer.core import durable
from trainer.data.index import cache_folder
from trainer.plan.memory import Shape
from trainer.report.environment import cpu_model
from trainer.tune.sources import digest_of_sources
from trainer.tune.speed import QUIET
from trainer.tune.tensors import MemoryEstimate
from trainer.tune.workload import Workload

FORMAT = 4
"""Raised when what a fact means changes; files of another format are not read."""

BUSY_TRIES = 3
"""Runs that time again where every one of them was disturbed; then the quickest must do."""

Key = tuple[Shape, bool]
"""A shape, and whether it is computed under activation checkpointing."""


@final
@dataclass(frozen=True)
class Notebook:
    """What is known of one model on one machine.

    Attributes:
        path: the file it is kept in; None keeps it for this process only.
        peaks: predicted peak of a step whose largest micro-batch has the shape.
        seconds: of one forward and backward, the quickest that was ever seen.
        open_timings: how many more runs are to time again, by activation checkpointing, since
            other programs were in the way; 0 once a quiet one was had.
        noise: of the timings, the least of any run; see `Timings`.
        methods: how peaks are predicted, with and without activation checkpointing.
        ratios: resident bytes per byte of tensors, likewise.
    """

    path: Path | None = None
    peaks: dict[Key, MemoryEstimate] = field(default_factory=dict)
    seconds: dict[Key, float] = field(default_factory=dict)
    open_timings: dict[bool, int] = field(default_factory=dict)
    noise: dict[bool, float] = field(default_factory=dict)
    methods: dict[bool, str] = field(default_factory=dict)
    ratios: dict[bool, float] = field(default_factory=dict)

    @classmethod
    def open(cls, facts: Mapping[str, Any], folder: Path | None = None) -> Self:
        """Open the notebook of a situation; an empty one if there is none or it is damaged.

        Args:
            facts: everything that a measurement depends on; `describe` gives it.
            folder: of all notebooks; None is the user's cache.
        """
        text = json.dumps({"format": FORMAT, **facts}, sort_keys=True)
        name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        path = (folder or cache_folder() / "tune") / f"{name}.json"
        book = cls(path)
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            book._read(path)
        return book

    def is_settled(self, recompute: bool) -> bool:
        """Tell whether the timings of a variant need not be taken again."""
        return self.open_timings.get(recompute, 1) == 0

    def note(self, seconds: Mapping[Shape, float], *, recompute: bool, noise: float) -> None:
        """Keep the quickest of old and new timings; busy machines are given a few more tries."""
        self.noise[recompute] = min(noise, self.noise.get(recompute, noise))
        for shape, new in seconds.items():
            key = shape, recompute
            self.seconds[key] = min(new, self.seconds.get(key, new))
        left = self.open_timings.get(recompute, BUSY_TRIES) - 1
        self.open_timings[recompute] = 0 if noise <= QUIET else max(0, left)

    def save(self) -> None:
        """Write the file, whole or not at all. A cache that cannot be written is no failure."""
        if self.path is None:
            return
        content = {
            "peaks": {_text(key): asdict(peak) for key, peak in self.peaks.items()},
            "seconds": {_text(key): seconds for key, seconds in self.seconds.items()},
            "open_timings": {str(int(key)): left for key, left in self.open_timings.items()},
            "noise": {str(int(key)): noise for key, noise in self.noise.items()},
            "methods": {str(int(key)): method for key, method in self.methods.items()},
            "ratios": {str(int(key)): ratio for key, ratio in self.ratios.items()},
        }
        with suppress(OSError):
            durable.make_folders(self.path.parent)
            durable.write_json(self.path, content)

    def _read(self, path: Path) -> None:
        saved = json.loads(path.read_text())
        # Read in full before the first entry is taken, so that half a file gives nothing.
        peaks = {_key(k): MemoryEstimate.from_dict(v) for k, v in saved["peaks"].items()}
        seconds = {_key(k): float(v) for k, v in saved["seconds"].items()}
        open_timings = {bool(int(k)): int(v) for k, v in saved["open_timings"].items()}
        # JSON has no infinity: it is written as null.
        noise = {bool(int(k)): math.inf if v is None else v for k, v in saved["noise"].items()}
        methods = {bool(int(k)): str(v) for k, v in saved["methods"].items()}
        ratios = {bool(int(k)): float(v) for k, v in saved["ratios"].items()}
        self.peaks.update(peaks)
        self.seconds.update(seconds)
        self.open_timings.update(open_timings)
        self.noise.update(noise)
        self.methods.update(methods)
        self.ratios.update(ratios)


def describe(work: Workload, length: int, precision: str) -> dict[str, Any]:
    """List everything a measurement depends on.

    Args:
        work: what is computed.
        length: of the longest sample.
        precision: of the forward.
    """
    fields = work.make_fields(1, length)
    device, optimizer = work.device, work.make_optimizer(work.model)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()
    return {
        "model": structure(work.model),
        "objective": _stable(work.objective) + _source(type(work.objective)),
        "optimizer": _optimizer(optimizer),
        "sources": digest_of_sources(_modules_behind(work, optimizer)),
        "fields": {key: [str(f.dtype), list(f.shape)] for key, f in fields.items()},
        "length": length,
        "precision": precision,
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _modules_behind(work: Workload, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """List the modules that hold what is computed.

    Yields:
        Names.
    """
    for part in (*work.model.modules(), work.objective, optimizer):
        yield from (base.__module__ for base in type(part).__mro__)
        held = getattr(part, "__dict__", {})
        yield from (value.__module__ for value in held.values() if inspect.isfunction(value))


def structure(model: nn.Module) -> str:
    """Hash what a model computes: its modules, their settings, tensors' shapes, and classes."""
    digest = hashlib.blake2b(_stable(model).encode(), digest_size=16)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        facts = (name, str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad)
        digest.update(repr(facts).encode())
    for name, module in model.named_modules():
        digest.update(f"{name} {_settings(module)}".encode())
    bases = {base for module in model.modules() for base in type(module).__mro__}
    for kind in sorted(bases, key=lambda base: (base.__module__, base.__qualname__)):
        digest.update(_definition(kind).encode())
    return digest.hexdigest()


def _settings(module: nn.Module) -> list[str]:
    """Write the attributes that a forward may read and that no tensor and no `repr` shows."""
    return [
        f"{name}={written}"
        for name, value in sorted(vars(module).items())
        if name not in {"training", "config"} and (written := _written(value)) is not None
    ] + _configured(getattr(module, "config", None))


def _configured(config: object) -> list[str]:
    """Write a configuration object, as Hugging Face's models have one."""
    to_dict = getattr(config, "to_dict", None)
    whole = _stable(to_dict()) if callable(to_dict) else str(_written(config))
    # Which kernel attends is no part of what is saved.
    return [whole, str(getattr(config, "_attn_implementation", None))]


def _written(value: object) -> str | None:
    """Write a plain value, or a collection of such, alike in every process; None for others."""
    if value is None or isinstance(value, int | float | str | torch.dtype | Enum | np.generic):
        return repr(value)
    if isinstance(value, dict):
        parts = [f"{_written(key)}: {_written(held)}" for key, held in value.items()]
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(str(_written(held)) for held in value)}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(str(_written(held)) for held in value))}}}"
    if inspect.isroutine(value) or is_dataclass(value) or isinstance(value, SimpleNamespace):
        return _stable(value)
    return None


def _definition(kind: type) -> str:
    """Give the source of a class, or the version of the library it is from.

    A library changes with its version; a user's class between any two runs.
    """
    package = sys.modules.get(kind.__module__.partition(".")[0])
    version = getattr(package, "__version__", None)
    is_installed = "site-packages" in str(getattr(package, "__file__", None))
    if kind.__module__ == "builtins" or (is_installed and version is not None):
        return f"{kind.__module__}.{kind.__qualname__} {version}"
    return _source(kind)


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Say what shapes an optimizer's state; learning rates and decays do not."""
    rates = {"params", "lr", "initial_lr", "weight_decay", "name"}
    options = [
        {key: value for key, value in group.items() if key not in rates}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__qualname__} {options}"


def _stable(thing: object) -> str:
    """Write an object without its address, which is another one in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return kind.__qualname__


def _text(key: Key) -> str:
    (num_samples, length), recompute = key
    return f"{num_samples}x{length}x{int(recompute)}"


def _key(text: str) -> Key:
    num_samples, length, recompute = map(int, text.split("x"))
    return Shape(num_samples, length), bool(recompute)
