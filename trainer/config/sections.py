"""Define the sections of a run's config that are no components: their keys, types and ranges."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.amounts import parse_time
from trainer.config.components import (
    AutoWord,
    Cadence,
    Component,
    Count,
    EmaDecay,
    Epochs,
    Figure,
    Name,
    Natural,
    NonEmptyText,
    NonNegative,
    Positive,
    Section,
    Time,
    Words,
)


class ParallelSection(Section):
    """The ranks of a run."""

    mode: Literal["auto", "none", "ddp", "fsdp", "hsdp"]
    ranks: AutoWord | Count
    timeout_s: Positive
    shard: AutoWord | Count
    replicate: AutoWord | Count
    max_restarts: Natural


class Eval(Section):
    """Evaluation on held-out data."""

    every: Cadence | Epochs | None
    samples: Count | None
    at_start: bool
    predictions: bool
    sets: Annotated[
        dict[Name, Component],
        Field(description="a mapping, e.g. {web: {path: web.jsonl}}"),
    ]


class Ema(Section):
    """An exponential moving average of the weights."""

    decay: EmaDecay | None


class Checkpoint(Section):
    """Saving."""

    every: Cadence | Time | Epochs | None
    keep: Count
    best: Figure | None
    mode: Literal["auto", "min", "max"]
    asynchronous: bool
    on_full: Literal["stop", "continue"]

    @property
    def every_s(self) -> float | None:
        """Seconds between two; None where steps or epochs are counted."""
        return parse_time(self.every) if isinstance(self.every, str) else None


class Log(Section):
    """What a run shows and records."""

    every: Cadence | Epochs
    samples: bool
    parameters: Count | None
    generate: Words
    generate_tokens: Count
    noise_scale: AutoWord | Count | None


class Stop(Section):
    """When a run ends before its last step, since it gets no better."""

    metric: Figure | None
    patience: Count
    min_delta: NonNegative


class SweepSection(Section):
    """How the jobs of a sweep are compared."""

    metric: Figure
    mode: Literal["auto", "min", "max"]


class Nonfinite(Section):
    """Steps whose loss or gradient is not finite."""

    limit: Count


class Export(Section):
    """Weights for other programs."""

    to: NonEmptyText | None
    merge: bool
