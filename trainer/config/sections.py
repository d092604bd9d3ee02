"""Define the sections of a run's config that are no components: their keys, types and ranges."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config import components
from trainer.config.amounts import parse_time
from trainer.config.components import Cadence, Count, Epochs, Figure, Natural, Section

Ranks = Annotated[
    components.Whole, Field(ge=1, le=65_536, description="a whole number from 1 to 65,536")
]


class ParallelSection(Section):
    """The ranks of a run."""

    mode: Literal["auto", "none", "ddp", "fsdp", "hsdp"]
    ranks: components.AutoWord | Ranks
    timeout_s: components.Positive
    shard: components.AutoWord | Count
    replicate: components.AutoWord | Count
    max_restarts: Natural


class Eval(Section):
    """Evaluation on held-out data."""

    every: Cadence | Epochs | None
    samples: Count | None
    at_start: bool
    predictions: bool
    sets: Annotated[
        dict[components.Name, components.Component],
        Field(description="a mapping, e.g. {web: {path: web.jsonl}}"),
    ]


class Ema(Section):
    """An exponential moving average of the weights."""

    decay: components.EmaDecay | None
    evaluate: bool


class Checkpoint(Section):
    """Saving."""

    every: Cadence | components.Time | Epochs | None
    keep: Count
    best: Figure | None
    mode: Literal["auto", "min", "max"]
    asynchronous: bool
    on_full: Literal["stop", "continue"]
    bandwidth: components.Bandwidth | None

    @property
    def every_s(self) -> float | None:
        """Seconds between two; None where steps or epochs are counted."""
        return parse_time(self.every) if isinstance(self.every, str) else None


class Log(Section):
    """What a run shows and records."""

    every: Cadence | Epochs
    samples: bool
    parameters: Count | None
    generate: components.Words
    generate_tokens: Count
    noise_scale: components.AutoWord | Count | None


class Stop(Section):
    """When a run ends before its last step, since it gets no better."""

    metric: Figure | None
    patience: Count
    min_delta: components.NonNegative


class SweepSection(Section):
    """How the jobs of a sweep are compared."""

    metric: Figure
    mode: Literal["auto", "min", "max"]


class Nonfinite(Section):
    """Steps whose loss or gradient is not finite."""

    limit: Count


class Generate(Section):
    """Texts that `train generate` writes."""

    tokens: Count
    temperature: components.NonNegative


class Export(Section):
    """Weights for other programs."""

    to: components.NonEmptyText | None
    merge: bool
