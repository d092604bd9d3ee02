"""Define the sections of a run's config that are no components: their keys, types and ranges."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.components import (
    Auto,
    Cadence,
    Component,
    Count,
    Decay,
    Name,
    Natural,
    Positive,
    Section,
    Text,
    Time,
    Words,
)


class ParallelSection(Section):
    """The ranks of a run."""

    mode: Literal["auto", "none", "ddp", "fsdp", "hsdp"]
    ranks: Auto | Count
    timeout_s: Positive
    shard: Auto | Count
    replicate: Auto | Count
    max_restarts: Natural


class Eval(Section):
    """Evaluation on held-out data."""

    every: Cadence | None
    samples: Count | None
    at_start: bool
    predictions: bool
    sets: Annotated[
        dict[Name, Component],
        Field(description="a mapping, e.g. {web: {path: web.jsonl}}"),
    ]


class Ema(Section):
    """An exponential moving average of the weights."""

    decay: Decay | None


class Checkpoint(Section):
    """Saving."""

    every: Cadence | Time | None
    keep: Count
    asynchronous: bool
    on_full: Literal["stop", "continue"]


class Log(Section):
    """What a run shows and records."""

    every: Count
    samples: bool
    parameters: Count | None
    noise_scale: Auto | Count | None


class Wandb(Section):
    """Weights & Biases, a mirror of metrics.jsonl."""

    mode: Literal["offline", "disabled", "online"]
    project: Text | None
    entity: Text | None
    group: Text | None
    tags: Words


class Nonfinite(Section):
    """Steps whose loss or gradient is not finite."""

    limit: Count


class Export(Section):
    """Weights for other programs."""

    to: Text | None
    merge: bool
