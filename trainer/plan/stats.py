"""What a plan costs, beside what no plan could beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from trainer.plan.cut import Cost, Layout, Plan


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStats:
    """A plan in numbers.

    Attributes:
        accum_steps: micro-batches of the busiest rank.
        max_positions: computed positions of the largest micro-batch.
        padding: share of computed positions that hold no token.
        cost: predicted time of the step, in token equivalents, until its slowest rank is done (in
            lockstep: the sum over slots of the slowest rank's micro-batch).
        cost_bound: time that no plan on as many ranks can beat.
        rank_costs: predicted time of each rank, waiting not counted, in token equivalents.
    """

    accum_steps: int
    max_positions: int
    padding: float
    cost: float
    cost_bound: float
    rank_costs: tuple[float, ...]

    @property
    def efficiency(self) -> float:
        """Share of the predicted time that the bound says is needed, in (0, 1]."""
        return self.cost_bound / self.cost

    @property
    def imbalance(self) -> float:
        """Time of the busiest rank over the mean, at least 1."""
        return max(self.rank_costs) * len(self.rank_costs) / sum(self.rank_costs)


def describe(plan: Plan, layout: Layout) -> PlanStats:
    """Compute every number of a plan."""
    costs = [
        [micro_batch_cost(plan, rank, slot, layout.cost) for slot in range(len(slots))]
        for rank, slots in enumerate(plan.ranks)
    ]
    return PlanStats(
        accum_steps=plan.accum_steps,
        max_positions=plan.max_positions,
        padding=plan.padding,
        cost=sum(map(max, zip(*costs, strict=True))) if layout.lockstep else max(map(sum, costs)),
        cost_bound=cost_bound(plan, layout),
        rank_costs=tuple(map(sum, costs)),
    )


def micro_batch_cost(plan: Plan, rank: int, slot: int, cost: Cost) -> float:
    """Predict the time of one micro-batch, in token equivalents.

    An empty slot costs what does not depend on size. A packed row pays for attention document by
    document.
    """
    samples, length = plan.ranks[rank][slot], plan.padded_lengths[rank][slot]
    if not plan.packed:
        return cost.tokens(len(samples), length)
    lengths = plan.lengths[samples]
    return cost.fixed + length - int(lengths.sum()) + float(cost.per_sample(lengths).sum())


def cost_bound(plan: Plan, layout: Layout) -> float:
    """Bound from below the time of every plan of the same samples on as many ranks.

    Without any padding the busiest rank computes at least the mean over ranks and at least the
    largest sample, in at least one micro-batch.
    """
    work = layout.cost.per_sample(plan.lengths)
    return layout.cost.fixed + max(float(work.sum()) / layout.world_size, float(work.max()))
