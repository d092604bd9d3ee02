"""Say when gradients are reduced over the ranks: once a step, or within micro-batches.

The default form is a window: gather | compute | agree | reduce. No collective runs inside, so
memory may run out, counts may differ between ranks, and a step can be replayed or skipped.

A policy only answers; a `Parallel` does it, and keeps account of what is reduced, so that no policy
can lose a part of a gradient or count one twice. To add one, subclass `SyncPolicy` and name the
class in a YAML file of the group `sync`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final, get_args

from trainer.core.errors import ConfigError
from trainer.core.rows import Described

Reduction = Literal["none", "within", "across"]
"""What is reduced in a micro-batch: nothing, over the ranks that share a copy, or over all."""


class SyncPolicy(Described):
    """When gradients are reduced within one step."""

    name: str  # on the screen and in records
    # Whether micro-batches are collective. Then all ranks need equal counts, and one that runs out
    # of memory ends the run, since the others wait for it.
    lockstep: bool = False
    # Whether the step's reduction is sent while the last backward of a rank goes on; of whole
    # copies alone (`parallel=ddp`). Ranks agree after it, so a step can be replayed.
    overlaps: bool = False
    needs_copies: bool = False  # whether it is for several copies in shards alone (`parallel=hsdp`)

    def reduction(self, index: int, *, is_last: bool) -> Reduction:
        """Say what to reduce in a micro-batch of a policy in lockstep, the same on every rank.

        What was computed since the last reduction goes along; in the last micro-batch all that is
        left is reduced, whatever the answer.

        Args:
            index: of the micro-batch in its step, from 0.
            is_last: whether it is the last of this step.
        """
        return "none"


def reduction_of(policy: SyncPolicy, index: int, *, is_last: bool) -> Reduction:
    """Ask a policy, and reduce all that is left in the last micro-batch of a step in lockstep."""
    answer, name = policy.reduction(index, is_last=is_last), type(policy).__name__
    if answer not in get_args(Reduction):
        raise ConfigError(
            f"sync: `reduction` of {name} gives {answer!r:.40}: give "
            f"{', '.join(map(repr, get_args(Reduction)))}"
        )
    if policy.lockstep and is_last:
        return "across"
    if policy.lockstep:
        return answer
    if answer != "none":
        raise ConfigError(
            f"sync: `reduction` of {name} gives {answer!r}, which every rank must reach as often: "
            f"set {name}.lockstep = True"
        )
    return "none"


@final
@dataclass(frozen=True)
class Deferred(SyncPolicy):
    """One reduction a step, after every rank has agreed that its micro-batches succeeded."""

    name = "deferred"


@final
@dataclass(frozen=True)
class Overlapped(SyncPolicy):
    """One reduction a step of whole copies, sent while the last backward of a rank goes on.

    Ranks agree after it: a step that failed somewhere is dropped on all and replayed.
    """

    name = "overlapped"
    overlaps = True


@final
@dataclass(frozen=True)
class Immediate(SyncPolicy):
    """A reduction over all ranks in every micro-batch: shards never add up to a whole gradient."""

    name = "immediate"
    lockstep = True

    def reduction(self, index: int, *, is_last: bool) -> Reduction:
        """See the base class."""
        return "across"


@final
@dataclass(frozen=True)
class Hierarchical(SyncPolicy):
    """Within the group that shares one copy every micro-batch, between the copies once a step."""

    name = "hierarchical"
    lockstep = True
    needs_copies = True

    def reduction(self, index: int, *, is_last: bool) -> Reduction:
        """See the base class."""
        return "across" if is_last else "within"
