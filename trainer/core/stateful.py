"""Define what a part of a run with state is: saved, resumed and resharded with the run.

A checkpoint is a mapping of such parts by name: model, optimizer, position in the data, loss scale,
and the user's own, which the config names under `parts`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, final

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

State = Mapping[str, Any]
"""Tensors, numbers, strings and None, and lists, tuples and mappings of them."""

STEP_KEYS = {
    *("step", "epoch", "samples", "tokens", "loss", "lr", "grad_norm", "accum_steps"),
    *("micro_batches", "padding", "seconds", "tokens_per_second", "memory_bytes"),
    *("model_flops_per_second", "mfu", "skipped", "replays", "batch_size", "passed_samples"),
}
"""What metrics.jsonl has of a step whatever the objective is; the last six where they apply."""

DRAWN = "drawn/"
"""What begins the name of a count of samples of a step, before that of their source."""

NORMS_OF_PARAMETERS = ("weight_norm/", "gradient_norm/", "update_norm/")
"""What begins the names of `log.parameters` in a line of metrics.jsonl, before that of a block."""

StoredCount = Annotated[int, Field(ge=0, lt=1 << 63)]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepGradient:
    """The gradient of a step, reduced over all ranks and not clipped yet."""

    step: int  # from 1
    norm: Tensor  # 2-norm, 0-d; finite
    num_samples: int  # of the global batch
    num_tokens: int  # likewise
    measured: Mapping[str, float | Tensor] = field(default_factory=dict)  # summed over ranks


class Stateful(ABC):
    """A part of a run with state.

    Tensors of a state may be shards (`DTensor`), as those of parameters are: each rank stores its
    rows, and any other number of ranks reads them. All else is to be the same on every rank, and
    the main rank's is stored.
    """

    version: ClassVar[int] = 1
    """Of what `state` gives; a checkpoint with another version is refused."""

    loads_unread: ClassVar[bool] = False
    """Whether `load` gets tensors as `StoredTensor`, to read each when it needs it."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> Any:  # noqa: ANN401 - a bool or NotImplemented
        """Whether a class has `state` and `load`, without inheritance."""
        if cls is not Stateful:
            return NotImplemented
        return all(callable(getattr(kind, name, None)) for name in ("state", "load"))

    def begin(self, module: nn.Module) -> None:  # noqa: B027 - nothing to do by default
        """Begin a run: the model is laid out over the ranks, and has its weights.

        Called once in each process, before `load`. Parameters may be shards.
        """

    @abstractmethod
    def state(self) -> State:
        """Give what the next steps depend on; tensors are not copied."""

    @abstractmethod
    def load(self, state: State) -> None:
        """Take over what `state` gave before.

        A tensor is on the device and in the shards of the one that `state` gives in its place now;
        where there is none of its shape, it is whole and on the CPU.
        """

    def see_gradient(self, gradient: StepGradient) -> None:  # noqa: B027 - nothing to do by default
        """Look at the gradient of a step before its update; a skipped step has none.

        All ranks call it.
        """

    def after_update(self, step: int) -> None:  # noqa: B027 - nothing to do by default
        """Follow an update of the weights, without gradients; a skipped step makes none.

        `step` counts from 1. All ranks call it.
        """

    def metrics(self) -> Mapping[str, float | Tensor]:
        """Give numbers for the step's line of metrics.jsonl; tensors are 0-d. All ranks call it."""
        return {}


_OPTIONAL = ("version", "loads_unread", "begin", "see_gradient", "after_update", "metrics")


@final
class OwnPart(Stateful):
    """Makes a part of an object that has `state` and `load`, and perhaps the other methods."""

    def __init__(self, part: Any) -> None:  # noqa: ANN401 - by its methods
        self.part = part
        for name in _OPTIONAL:
            if hasattr(part, name):
                setattr(self, name, getattr(part, name))

    def state(self) -> State:
        """See the base class."""
        state: State = self.part.state()
        return state

    def load(self, state: State) -> None:
        """See the base class."""
        self.part.load(state)


def as_part(part: Stateful) -> Stateful:
    """Give an object that has `state` and `load` all methods of a part."""
    return part if Stateful in type(part).__mro__ else OwnPart(part)


class SavedFields(BaseModel, Stateful):
    """A part whose state is its own fields, of the types they declare; each has a default."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    def state(self) -> State:
        """See the base class."""
        return self.model_dump()

    def load(self, state: State) -> None:
        """See the base class; `ValueError` where a field is of another type."""
        vars(self).update(vars(type(self).model_validate(dict(state))))
