"""What a checkpoint keeps beside weights and moments, read as a stranger's would be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import BaseModel, Field

from trainer.checkpoint.codec import decode
from trainer.checkpoint.store import Loaded
from trainer.core.errors import NoCheckpointError
from trainer.plan.cut import Cost
from trainer.plan.order import Cursor, Order
from trainer.plan.traffic import Network
from trainer.tune.tuning import Candidate

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_RunId = Annotated[str, Field(pattern=r"\A[A-Za-z0-9_-]{1,256}\z")]
_Positive = Annotated[int, Field(ge=1, lt=1 << 63)]


class _Tuned(BaseModel):
    max_tokens: _Count
    limit_bytes: _Count
    cost: Cost
    candidates: tuple[Candidate, ...]


class _State(BaseModel):
    cost: Cost | None = None
    max_tokens: _Count | None = None
    alone: _Count | None = None
    lowered: _Count | None = None


class _Cut(BaseModel):
    accum: dict[str, Any]
    state: _State
    tuning: _Tuned | None
    evaluation_tokens: _Positive


class _Place(BaseModel):
    step: _Count
    epoch: _Count
    offset: _Count
    samples: _Count


class _Allowed(BaseModel):
    step: _Count
    keys: list[str]


class Terms(BaseModel):
    """What steps obey: the contract, the data, and the changes of both that were allowed."""

    contract: dict[str, Any]
    fingerprint: str
    allowed: list[_Allowed] = []


class _Kept(Terms):
    """Kinds of what is read; there may be more."""

    cursor: _Place
    tokens: _Count
    failures: _Count = 0
    total_steps: _Count = 0
    network: Network | None = None
    wandb: _RunId | None = None
    cut: _Cut


def kept(loaded: Loaded) -> dict[str, Any]:
    """Read what a checkpoint keeps beside weights and moments.

    Raises:
        NoCheckpointError: it is not what a run of this version keeps.
    """
    try:
        extra: dict[str, Any] = decode(loaded.meta["extra"], loaded.tensors)
        extra["cursor"] = asdict(Cursor(**extra["cursor"]))
        if missing := sorted({"contract", "fingerprint", "tokens", "cut"} - extra.keys()):
            raise NoCheckpointError(f"{loaded.path}: lacks {', '.join(missing)}: use init=")
        _check_place(_Kept.model_validate(extra), loaded.step)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = " ".join(repr(error).split())
        raise NoCheckpointError(
            f"{loaded.path}: not a training state of this version ({text:.80}): use init="
        ) from error
    return extra


def check_reach(extra: Mapping[str, Any], order: Order, path: object) -> None:
    """See that an epoch of the same data reaches as far as a run came.

    Args:
        extra: as `kept` gave it.
        order: of the data.
        path: names the checkpoint in the error.

    Raises:
        NoCheckpointError: it does not.
    """
    offset = extra["cursor"]["offset"]
    if offset > order.num_samples:
        raise NoCheckpointError(
            f"{path}: stands at sample {offset} of an epoch of {order.num_samples}: use init="
        )


def _check_place(state: _Kept, step: int) -> None:
    """See that a place is one that this many steps lead to.

    Raises:
        ValueError: it is not.
    """
    place = state.cursor
    if place.step != step or max(place.epoch, state.failures) > step:
        raise ValueError(f"{place}, {state.failures} failures: not after {step} steps")
    if place.offset > place.samples:
        raise ValueError(f"{place}: further than it came")
