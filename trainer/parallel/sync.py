"""Sync policies: which backward reduces gradients over the ranks, and when parameters gather.

The default form is a window: gather | compute | agree | reduce. No collective runs inside, so
memory may run out, counts may differ between ranks, and a step can be replayed or skipped.

To add one, subclass `SyncPolicy` and name the class in a YAML file of the group `sync`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import final

from trainer.parallel.base import Parallel


class SyncPolicy(ABC):
    """When gradients are reduced within one step."""

    name: str
    lockstep: bool = False
    """Whether every micro-batch contains a collective, so that all ranks need equal counts."""

    @abstractmethod
    def gather(self, model: Parallel) -> None:
        """Open the window. Collective."""

    @abstractmethod
    def micro_batch(self, model: Parallel, *, is_last: bool) -> AbstractContextManager[None]:
        """Wrap forward and backward of one micro-batch."""

    @abstractmethod
    def reduce(self, model: Parallel, used: Sequence[bool]) -> None:
        """Close the window: leave the step's gradient, summed over ranks. Collective.

        Args:
            model: the model, laid out over ranks.
            used: which of its parameters have a gradient on any rank.
        """


@dataclass(frozen=True)
class _Lockstep(SyncPolicy):
    """Every micro-batch reduces its own gradient, so ranks take the same number of them.

    A rank whose allocation fails goes on with the collectives of the step, of nothing, so that no
    other waits in one of them; then all replay.
    """

    lockstep = True

    def gather(self, model: Parallel) -> None:
        """See the base class."""
        model.begin_lockstep()

    def reduce(self, model: Parallel, used: Sequence[bool]) -> None:
        """See the base class."""
        model.end_lockstep(used)


@final
@dataclass(frozen=True)
class Immediate(_Lockstep):
    """A reduction over all ranks in every micro-batch: no whole gradient is ever held."""

    name = "immediate"

    def micro_batch(self, model: Parallel, *, is_last: bool) -> AbstractContextManager[None]:
        """See the base class."""
        model.world.note_micro_batch()
        return model.reducing(across=True, is_last=is_last)


@final
@dataclass(frozen=True)
class Hierarchical(_Lockstep):
    """Within the group that shares one copy every micro-batch, between the copies once a step."""

    name = "hierarchical"

    def micro_batch(self, model: Parallel, *, is_last: bool) -> AbstractContextManager[None]:
        """See the base class."""
        model.world.note_micro_batch()
        return model.reducing(across=is_last, is_last=is_last)


@final
@dataclass(frozen=True)
class Exact(SyncPolicy):
    """One reduction a step of integer sums, the same bits for every layout of the ranks."""

    name = "exact"

    def gather(self, model: Parallel) -> None:
        """See the base class."""
        model.gather()

    def micro_batch(self, model: Parallel, *, is_last: bool) -> AbstractContextManager[None]:
        """See the base class."""
        model.world.note_micro_batch()
        return model.reducing(across=True, is_last=is_last)

    def reduce(self, model: Parallel, used: Sequence[bool]) -> None:
        """See the base class."""
        model.reduce(used)


@final
@dataclass(frozen=True)
class Deferred(SyncPolicy):
    """One reduction a step, after every rank has agreed that its micro-batches succeeded."""

    name = "deferred"

    def gather(self, model: Parallel) -> None:
        """See the base class."""
        model.gather()

    def micro_batch(self, model: Parallel, *, is_last: bool) -> AbstractContextManager[None]:
        """Leave it alone: no collective runs inside the window."""
        model.world.note_micro_batch()
        return nullcontext()

    def reduce(self, model: Parallel, used: Sequence[bool]) -> None:
        """See the base class."""
        model.reduce(used)
