"""Read where a run stands from its checkpoint, and check that it goes on with the same steps.

A checkpoint keeps the contract that its steps obeyed and the fingerprint of their data. What
`resume_allow` let a run change after a checkpoint is written into the run folder, so that a run
that is killed before its next checkpoint goes on by the same command; checkpoints then keep the
new terms.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from trainer.build.parts import Parts
from trainer.checkpoint.codec import decode
from trainer.checkpoint.store import Loaded
from trainer.config.run_config import contract, contract_diff
from trainer.core.durable import read_json
from trainer.core.errors import ConfigError, DataError, NoCheckpointError
from trainer.models.check import batch_statistics
from trainer.plan.cut import Cost
from trainer.plan.order import Order
from trainer.plan.traffic import Network

# By step of a checkpoint: the terms of the steps after it, where they are not the checkpoint's
ALLOWED_FILE = "allowed.json"

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _CutState(BaseModel):
    cost: Cost | None = None
    max_tokens: _Count | None = None
    alone: _Count | None = None
    lowered: _Count | None = None


class _Prepared(BaseModel):
    accum: dict[str, Any]
    state: _CutState
    tuning: dict[str, Any] | None
    evaluation_tokens: Annotated[_Count, Field(ge=1)]


class _Position(BaseModel, extra="forbid"):
    step: _Count
    epoch: _Count
    offset: _Count
    samples: _Count


class _Terms(BaseModel):
    """What steps obey: the contract, and the data."""

    contract: dict[str, Any]
    fingerprint: str


class _RunState(_Terms):
    """Types of what is read; there may be more."""

    cursor: _Position
    tokens: _Count
    failures: _Count = 0
    total_steps: _Count = 0
    network: Network | None = None
    wandb: Annotated[str, Field(pattern=r"\A[A-Za-z0-9_-]{1,256}\z")] | None = None
    cut: _Prepared


def read_run_state(loaded: Loaded) -> dict[str, Any]:
    """Read what a checkpoint, perhaps a stranger's, keeps beside weights and moments.

    Raises:
        NoCheckpointError: it is not what a run of this version keeps.
    """
    loaded.check_format()
    try:
        extra: dict[str, Any] = decode(loaded.meta["extra"], loaded.read)
        state = _RunState.model_validate(extra)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = " ".join(repr(error).split())
        raise NoCheckpointError(
            f"{loaded.path}: not a training state of this version ({text:.80}): use init="
        ) from error
    at = state.cursor
    if at.step != loaded.step or max(at.epoch, state.failures) > at.step or at.offset > at.samples:
        raise NoCheckpointError(
            f"{loaded.path}: {loaded.step} steps do not lead to its data position ({at}): use init="
        )
    return extra


def check_position(state: Mapping[str, Any], order: Order, path: object) -> None:
    """Check that an epoch of the same data reaches as far as a run came.

    Raises:
        NoCheckpointError: it does not.
    """
    offset = state["cursor"]["offset"]
    if offset > order.num_samples:
        raise NoCheckpointError(
            f"{path}: data position {offset} exceeds the epoch of {order.num_samples} samples: "
            "start a new run with init="
        )


def terms_of(parts: Parts) -> dict[str, Any]:
    """Return what the steps of a run depend on: its contract, and the fingerprint of its data."""
    has_statistics = batch_statistics(parts.module) is not None
    ranks = parts.world.size
    return {
        "contract": contract(parts.config, has_batch_statistics=has_statistics, ranks=ranks),
        "fingerprint": parts.train_set.fingerprint,
    }


def check_terms(now: Mapping[str, Any], begun: Mapping[str, Any], allow: Collection[str]) -> None:
    """Refuse to go on with other terms than those that were begun with, unless it is allowed.

    The run's config.yaml was compared before; it cannot know the data, nor the cut of a model that
    normalises over it, and it may be newer than the checkpoint.

    Raises:
        DataError: the data are not the same.
        ConfigError: the step is not the same; one line per key.
    """
    if begun["fingerprint"] != now["fingerprint"] and "data" not in allow:
        raise DataError(
            "data: changed since the checkpoint was written, so its steps would not be the ones "
            "that were begun: restore the data, or allow it with resume_allow=[data]"
        )
    if faults := contract_diff(begun["contract"], now["contract"], allow):
        raise ConfigError(*faults)


def differ(begun: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether terms differ by more than there being more steps."""
    is_same = begun["fingerprint"] == now["fingerprint"]
    return not is_same or bool(contract_diff(begun["contract"], now["contract"]))


def read_allowed(folder: Path, step: int) -> dict[str, Any]:
    """Read the terms of the steps after a checkpoint; empty where they are the checkpoint's.

    Raises:
        NoCheckpointError: what is written there are no terms.
    """
    path = folder / ALLOWED_FILE
    terms = read_json(path).get(str(step))
    try:
        return {} if terms is None else _Terms.model_validate(terms, strict=True).model_dump()
    except ValueError as error:
        raise NoCheckpointError(f"{path}: holds no terms of step {step}: delete it") from error
