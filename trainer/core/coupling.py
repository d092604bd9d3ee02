"""Say how far the samples of a step depend on each other, in one word and with the reason.

Everything that asks whether a step depends on how it is cut asks this: which strategy and cut may
compute it, whether smaller micro-batches may repeat it, what a resumed run may change, and what a
person is warned of. Objective, model and normalizer each declare their own; a run has the
strictest of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, final, get_args

if TYPE_CHECKING:
    from torch import nn

CouplingKind = Literal["none", "group", "batch", "micro_batch"]
"""Which samples depend on each other, by what it asks of the step, the least first.

* `none`: none; every sum over samples is the same however the step is cut.
* `group`: those of a group of `size` consecutive samples, which no cut divides.
* `batch`: all of a step, however it is cut: its strategy must bring them together (two passes).
* `micro_batch`: those that share a micro-batch, so the cut itself is a part of what is computed.
"""

KINDS: tuple[CouplingKind, ...] = get_args(CouplingKind)


@final
@dataclass(frozen=True, slots=True)
class Coupling:
    """How far samples depend on each other. Each text may be empty where nobody can ask for it."""

    kind: CouplingKind = "none"
    size: int = 1  # samples of a group, which no cut divides
    why: str = ""  # what couples them, a clause: "a mean of means depends on ..."
    key: str = ""  # what an error begins with
    remedy: str = ""  # what to type, or to use, instead
    accepts: str = ""  # what else to type, so that a fixed cut is taken
    # Whether each micro-batch waits for those of other ranks, so that all ranks need as many
    joins_ranks: bool = False
    # A sentence for a step that is not the whole batch's; empty where the user has accepted it
    warning: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.size < 1 or (self.kind == "group") > (self.size > 1):
            text = f"must be one of {', '.join(KINDS)}; a group has 2 samples or more"
            raise ValueError(f"coupling={self.kind}, size={self.size}: {text}")

    @property
    def fixes_cut(self) -> bool:
        """Whether the cut is a part of what is computed."""
        return self.kind == "micro_batch"


NONE = Coupling()

MEAN_OF_MEANS = Coupling(
    "micro_batch",
    why="a mean of means depends on the micro-batch size",
    key="batch.normalizer=micro_batches",
    remedy="type batch.normalizer=tokens",
    warning=(
        "batch.normalizer=micro_batches is a mean of means, so the step depends on the "
        "micro-batch size; batch.normalizer=tokens is exact"
    ),
)


def strictest(*couplings: Coupling) -> Coupling:
    """Give the coupling that asks most of a step, with groups that all of them leave whole.

    Of several of one kind it is the first of which a user is to be warned, else the first.
    """
    # Groups of 4 and groups of 6 are both whole in groups of 12.
    most = max(couplings, key=lambda each: (KINDS.index(each.kind), bool(each.warning)))
    joins = any(each.joins_ranks for each in couplings)
    return replace(most, size=math.lcm(*(each.size for each in couplings)), joins_ranks=joins)


def model_coupling(model: nn.Module) -> Coupling:
    """Find the strictest coupling of samples that a module of a model declares.

    A module declares it by an attribute `coupling`, a `Coupling`.
    """
    declared = [getattr(part, "coupling", None) for part in model.modules()]
    return strictest(NONE, *(each for each in declared if isinstance(each, Coupling)))
