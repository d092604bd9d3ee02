"""The sections of a config and the types of their values: range, unit and doc of every key."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from trainer.config.durations import parse_time
from trainer.config.messages import whole

DEFAULT_GLOBAL = 512
"""Samples behind one optimizer step unless a batch is asked for."""

_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?))?B")


def parse_bytes(value: object) -> object:
    """Turn `"80GiB"`, `"512 MB"` or `"100B"` into bytes; leaves everything else alone."""
    match = _BYTES.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return whole(value)
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " "))


def _cadence(value: object) -> object:
    """Refuse what is neither a number of steps nor a share of the run.

    Raises:
        ValueError: it is not.
    """
    number = whole(value)
    if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
        raise ValueError("no number of steps, and no share of the run")
    if isinstance(number, float) and number > 1:
        raise ValueError("no whole number of steps, and no share of the run")
    return number


def _cadence_or_time(value: object) -> object:
    return value if isinstance(value, str) and parse_time(value) else _cadence(value)


def _warmup(value: object) -> object:
    return value if whole(value) == 0 and not isinstance(value, bool) else _cadence(value)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


@final
@dataclass(frozen=True)
class Kind:
    """What a value must be, in the words of an error and of the help."""

    text: str


HIDDEN = Kind("")
"""Marks a field that is no key of its own."""

Natural = Annotated[int, BeforeValidator(whole), Field(ge=0), Kind("a whole number, 0 or more")]
Count = Annotated[int, BeforeValidator(whole), Field(ge=1), Kind("a whole number of at least 1")]
Cadence = Annotated[
    int | float,
    BeforeValidator(_cadence),
    Kind("a whole number of steps, 1 or more, or a share below 1"),
]
CadenceOrTime = Annotated[
    int | float | str,
    BeforeValidator(_cadence_or_time),
    Kind("a time, a number of steps or a share of the run below 1"),
]
_WARMUP = Kind("a whole number of steps, 0 or more, or a share below 1")
Warmup = Annotated[
    int | float,
    BeforeValidator(_warmup),
    _WARMUP,
]
Seed = Annotated[
    int, BeforeValidator(whole), Field(ge=0, lt=2**63), Kind("a whole number from 0 to 2**63 - 1")
]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), Kind("a number above 0")]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), Kind("a number, 0 or more")]
Share = Annotated[float, Field(ge=0, lt=1), Kind("a share of at least 0 and below 1")]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1), Kind("a size such as 80GiB")]
Flag = Annotated[bool, Kind("true or false")]
Text = Annotated[str, Field(min_length=1), Kind("text")]
Word = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Field(pattern=r"^\w[\w.-]{0,99}$", strict=True),
    Kind("one word of letters, digits, -, _ and ."),
]
Address = Annotated[
    str,
    Field(pattern=r"^(\[[0-9A-Fa-f:.%]+\]|[\w.-]+):\d{1,5}$", strict=True),
    Kind("host:port, e.g. 10.0.0.1:29500"),
]
Words = Annotated[
    tuple[str, ...], BeforeValidator(_as_list), Field(strict=False), Kind("a list, e.g. [a,b]")
]
Auto = Literal["auto"]


COMPONENT_PATHS: tuple[str, ...] = (
    "accum",
    "accum.gradient",
    "sync",
    "model",
    "data",
    "objective",
    "optimizer",
    "scheduler",
)
"""Where a config names a class, by `_target_`."""

GROUPS: tuple[str, ...] = ("batch", "parallel", *COMPONENT_PATHS)
"""Where a folder of `conf/` gives options; `accum.gradient` is the folder `accum/gradient`."""

OWN = "own"
"""The option of every component group that names no class: the user does."""


class Section(BaseModel):
    """Keys that belong together; frozen, and strict about types and names."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


class Batch(Section):
    """The optimizer step."""

    global_: Annotated[Count | None, Kind("a whole number of at least 1")] = Field(
        DEFAULT_GLOBAL,
        alias="global",
        description="samples (or tokens) behind one optimizer step, all ranks",
    )
    unit: Literal["samples", "tokens"] = Field(
        "samples", description="what batch.global counts; tokens: samples in order until reached"
    )
    normalizer: Literal["tokens", "samples", "micro_batches"] = Field(
        "tokens",
        description="what the summed loss is divided by; micro_batches is the mean of means of "
        "other trainers, inexact, for comparison under accum=fixed",
    )
    tail: Literal["keep", "drop"] = Field(
        "keep", description="the last, short global batch of an epoch; kept with its own normalizer"
    )


class Parallel(Section):
    """The ranks of a run."""

    mode: Literal["auto", "none", "ddp", "fsdp", "hsdp"] = Field(
        "auto", description="where parameters and gradients live; type parallel=ddp"
    )
    ranks: Auto | Count = Field("auto", description="local processes; auto: one per GPU, else 1")
    nodes: Count = Field(1, description="machines; type the same command on each")
    node: Auto | Natural = Field(
        "auto", description="number of this machine, from 0; auto: SLURM_NODEID"
    )
    rendezvous: Address | None = Field(
        None, description="host:port of machine 0, where all meet; null: found under Slurm"
    )
    timeout_s: Positive = Field(
        120.0,
        description="seconds a rank may be waited for; outside of steps, without a sign of life",
    )
    shard: Auto | Count = Field("auto", description="hsdp: ranks that share one copy of the model")
    replicate: Auto | Count = Field("auto", description="hsdp: number of copies of the model")
    max_restarts: Natural = Field(0, description="restarts after a lost rank")


class Eval(Section):
    """Evaluation on held-out data."""

    every: Cadence | None = Field(
        0.1, description="steps between evaluations, or a share of the run; null: only at the end"
    )


class Checkpoint(Section):
    """Saving."""

    every: CadenceOrTime | None = Field(
        "10min", description="time or steps between checkpoints, or a share of the run; null: end"
    )
    keep: Count = Field(2, description="newest checkpoints that stay on disk")
    asynchronous: Flag = Field(False, description="write behind the next steps")
    on_full: Literal["stop", "continue"] = Field(
        "stop", description="what a full disk does to the run; saved checkpoints stay intact"
    )


class Log(Section):
    """What a run tells."""

    every: Count = Field(
        1, description="optimizer steps between lines on the screen; metrics.jsonl has every step"
    )
    samples: Flag = Field(False, description="write the sample ids of every step, samples.jsonl")


class Wandb(Section):
    """Weights & Biases, a mirror of metrics.jsonl."""

    mode: Literal["offline", "disabled", "online"] = Field(
        "offline", description="offline writes to the run folder only; WANDB_MODE sets the default"
    )
    project: Text | None = Field("train", description="W&B project")
    entity: Text | None = Field(None, description="W&B user or team")
    group: Text | None = Field(None, description="W&B group; null: the sweep's folder")
    tags: Words = Field((), description="W&B tags")


class Nonfinite(Section):
    """Steps whose loss or gradient is not finite."""

    limit: Count = Field(10, description="such steps in a row, all skipped, before exit 6")


class Export(Section):
    """Weights for other programs."""

    to: Text | None = Field(None, description="folder that train export writes into")


class CutKeys(Section):
    """Constructor keys that cuts share."""

    micro: Count | None = Field(
        None, description="samples per micro-batch per rank: exact under fixed, else an upper bound"
    )
    steps: Count | None = Field(None, description="fixed: micro-batches per rank per step")
    max_tokens: Count | None = Field(
        None, description="budget: largest padded micro-batch, in tokens"
    )
    memory: Bytes | None = Field(
        None, description='auto: bytes or "80GiB"; null: what the device or the cgroup has'
    )


class DataKeys(Section):
    """Constructor keys that data sets share."""

    max_length: Annotated[Count | None, Kind("a whole number of at least 1")] = Field(
        None, description="tokens of a sample at most, special tokens counted"
    )
    overlong: Annotated[Literal["chunk", "cut", "drop"] | None, Kind("chunk, cut or drop")] = Field(
        None, description="a longer document: several samples, its head alone, or none"
    )
    holdout: Annotated[Share | None, Kind("a share of at least 0 and below 1")] = Field(
        None, description="share held out, by seed, where the data brings no split of its own"
    )


class OptimizerKeys(Section):
    """Constructor keys that optimizers share."""

    lr: Annotated[NonNegative | None, Kind("a number, 0 or more")] = Field(
        None, description="learning rate at schedule factor 1"
    )
    weight_decay: Annotated[NonNegative | None, Kind("a number, 0 or more")] = Field(
        None, description="decay per unit of lr; not on norms and biases"
    )


class SchedulerKeys(Section):
    """Constructor keys that schedules share."""

    warmup: Annotated[Warmup | None, _WARMUP] = Field(
        None, description="steps that the learning rate rises, or a share of the run"
    )


SHARED_KEYS: dict[str, type[Section]] = {
    "accum": CutKeys,
    "data": DataKeys,
    "optimizer": OptimizerKeys,
    "scheduler": SchedulerKeys,
}
"""Range and doc of constructor keys whose meaning does not depend on the option."""
