"""Say when gradients are reduced over the ranks: once a step, or in every micro-batch.

The default form is a window: gather | compute | agree | reduce. No collective runs inside, so
memory may run out, counts may differ between ranks, and a step can be replayed or skipped.

To add one, subclass `SyncPolicy` and name the class in a YAML file of the group `sync`.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import final

from trainer.parallel.base import Parallel, Replicated
from trainer.plan.traffic import Collectives


class SyncPolicy(ABC):
    """When gradients are reduced within one step."""

    name: str  # on the screen and in records
    # Whether every micro-batch contains a collective. Then all ranks need equal counts, and one
    # that runs out of memory ends the run, since the others wait for it.
    lockstep: bool = False

    def gather(self, model: Parallel) -> None:
        """Begin a step. Collective."""
        if self.lockstep:
            model.begin_lockstep()
        else:
            model.gather()

    def micro_batch(self, model: Parallel, *, is_last: bool) -> AbstractContextManager[None]:
        """Wrap forward and backward of one micro-batch."""
        model.world.rank_progress.next_micro_batch()
        return nullcontext()

    def reduce(self, model: Parallel, used: Sequence[bool]) -> None:
        """End a step: leave its gradient, summed over ranks. Collective.

        Args:
            model: laid out over ranks.
            used: which of its parameters have a gradient on any rank.
        """
        model.reduce(used)

    def collectives(self, micro_batches: float) -> Collectives | None:
        """Tell how often a step sends what, for the table of policies; None leaves it out.

        Args:
            micro_batches: of one rank in a step.
        """
        return None


@final
@dataclass(frozen=True)
class Deferred(SyncPolicy):
    """One reduction a step, after every rank has agreed that its micro-batches succeeded."""

    name = "deferred"

    def collectives(self, micro_batches: float) -> Collectives:
        """See the base class."""
        return Collectives(gathers=1, reductions=1, across=1)


@final
@dataclass(frozen=True)
class Overlapped(SyncPolicy):
    """One reduction a step of whole copies, sent while the last backward of a rank goes on.

    Ranks agree after it: a step that failed somewhere is dropped on all and replayed.
    """

    name = "overlapped"

    def gather(self, model: Parallel) -> None:
        """See the base class."""
        assert isinstance(model, Replicated)  # others refuse it, as they are configured
        model.begin_overlap()

    def micro_batch(self, model: Parallel, *, is_last: bool) -> AbstractContextManager[None]:
        """See the base class."""
        if is_last and isinstance(model, Replicated):
            model.begin_last()
        return super().micro_batch(model, is_last=is_last)

    def collectives(self, micro_batches: float) -> Collectives:
        """See the base class."""
        return Collectives(gathers=1, reductions=1, across=1, needs_whole=True)


class _EachMicroBatch(SyncPolicy):
    """A reduction in every micro-batch."""

    lockstep = True
    within_copies: bool = False  # whether those before the last stay within a copy

    def micro_batch(self, model: Parallel, *, is_last: bool) -> AbstractContextManager[None]:
        """See the base class."""
        model.world.rank_progress.next_micro_batch()
        return model.reducing(across=is_last or not self.within_copies)


@final
@dataclass(frozen=True)
class Immediate(_EachMicroBatch):
    """A reduction over all ranks in every micro-batch: shards never add up to a whole gradient."""

    name = "immediate"

    def collectives(self, micro_batches: float) -> Collectives:
        """See the base class: blocks are gathered for forward, and again for backward."""
        return Collectives(
            gathers=2 * micro_batches, reductions=micro_batches, across=micro_batches
        )


@final
@dataclass(frozen=True)
class Hierarchical(_EachMicroBatch):
    """Within the group that shares one copy every micro-batch, between the copies once a step."""

    name = "hierarchical"
    within_copies = True

    def collectives(self, micro_batches: float) -> Collectives:
        """See the base class."""
        return Collectives(
            gathers=2 * micro_batches, reductions=micro_batches, across=1, needs_copies=True
        )


@final
@dataclass(frozen=True)
class Exact(_EachMicroBatch):
    """One reduction a step of integer sums, the same bits for every layout of the ranks."""

    name = "exact"
    lockstep = False  # a rank's micro-batch only joins its own sums


POLICIES: tuple[SyncPolicy, ...] = (Deferred(), Overlapped(), Hierarchical(), Immediate())
"""What `sync=auto` weighs, the one that sends least first."""
