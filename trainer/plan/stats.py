"""What a plan costs, beside what no plan could beat: the numbers of `train plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from trainer.plan.cut import Cost, Layout, Plan


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStats:
    """A plan in numbers.

    Attributes:
        num_samples: of the global batch.
        num_tokens: real tokens of the global batch.
        num_micro_batches: of the step, over all ranks, empty slots not counted.
        num_empty_slots: slots of zero weight that only fill a count.
        accum_steps: micro-batches of the busiest rank.
        fewest_accum_steps: micro-batches of the least busy rank.
        smallest_micro: samples of the smallest micro-batch.
        largest_micro: samples of the largest micro-batch.
        max_positions: computed positions of the largest micro-batch.
        max_shape: its samples and their padded length (packed: one row).
        num_lengths: distinct padded lengths.
        padding: share of computed positions that hold no token.
        cost: predicted time of the step, in token equivalents, until its slowest rank is done (in
            lockstep: the sum over slots of the slowest rank's micro-batch).
        cost_bound: time that no plan on as many ranks can beat.
        rank_costs: predicted time of each rank, waiting not counted, in token equivalents.
    """

    num_samples: int
    num_tokens: int
    num_micro_batches: int
    num_empty_slots: int
    accum_steps: int
    fewest_accum_steps: int
    smallest_micro: int
    largest_micro: int
    max_positions: int
    max_shape: tuple[int, int]
    num_lengths: int
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
    counts = [len(slots) for slots in plan.ranks]
    shapes = [
        (plan.positions(rank, slot), len(plan.ranks[rank][slot]), plan.padded_lengths[rank][slot])
        for rank, slot in plan.slots()
        if len(plan.ranks[rank][slot])
    ]
    costs = [
        [micro_batch_cost(plan, rank, slot, layout.cost) for slot in range(count)]
        for rank, count in enumerate(counts)
    ]
    _, num_samples, length = max(shapes)
    return PlanStats(
        num_samples=plan.num_samples,
        num_tokens=int(plan.lengths.sum()),
        num_micro_batches=len(shapes),
        num_empty_slots=plan.num_micro_batches - len(shapes),
        accum_steps=plan.accum_steps,
        fewest_accum_steps=min(counts),
        smallest_micro=min(size for _, size, _ in shapes),
        largest_micro=max(size for _, size, _ in shapes),
        max_positions=plan.max_positions,
        max_shape=(1 if plan.packed else num_samples, length),
        num_lengths=len({length for _, _, length in shapes}),
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
    held, length = plan.ranks[rank][slot], plan.padded_lengths[rank][slot]
    if not plan.packed:
        return cost.tokens(len(held), length)
    lengths = plan.lengths[held]
    return cost.fixed + length - int(lengths.sum()) + float(cost.per_sample(lengths).sum())


def cost_bound(plan: Plan, layout: Layout) -> float:
    """Bound from below the time of every plan of the same samples on as many ranks.

    Without any padding the busiest rank computes at least the mean over ranks and at least the
    largest sample, in at least one micro-batch.
    """
    work = layout.cost.per_sample(plan.lengths)
    return layout.cost.fixed + max(float(work.sum()) / layout.world_size, float(work.max()))


def batch_equation(plan: Plan) -> str:
    """Say in one line how the global batch is computed.

    Returns:
        For example `512 = 1 rank x 11 micro-batches of 12 to 181 samples`. Where ranks differ in
        their count, or micro-batches in their size, the range is given.
    """
    counts = [len(slots) for slots in plan.ranks]
    sizes = [len(ids) for slots in plan.ranks for ids in slots if len(ids)]
    return (
        f"{plan.num_samples} = {_count([len(counts)], 'rank')} x "
        f"{_count(counts, 'micro-batch', 'es')} of {_count(sizes, 'sample')}"
    )


def _count(numbers: list[int], noun: str, plural: str = "s") -> str:
    low, high = min(numbers), max(numbers)
    amount = f"{low}" if low == high else f"{low} to {high}"
    return f"{amount} {noun}{'' if high == 1 else plural}"
