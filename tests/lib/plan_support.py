"""The cost of a plan and what no plan can beat, for the tests of planning."""

from trainer.plan.cut import Cost, Layout, Plan


def tokens_of(cost: Cost, num_samples: int, length: int) -> float:
    """Cost of one padded micro-batch in token equivalents."""
    return cost.fixed + num_samples * length * (1.0 + cost.quadratic * length)


def costs_of(plan: Plan, cost: Cost) -> list[list[float]]:
    """Give the cost of every padded micro-batch, rank by rank; an empty slot costs its start."""
    return [
        [tokens_of(cost, len(ids), length) for ids, length in zip(slots, lengths, strict=True)]
        for slots, lengths in zip(plan.ranks, plan.padded_lengths, strict=True)
    ]


def efficiency(plan: Plan, layout: Layout) -> float:
    """Give the share of the time of a plan that any plan on as many ranks needs.

    Without any padding the busiest rank computes at least the mean over ranks and at least the
    longest sample, in at least one micro-batch.
    """
    costs, work = costs_of(plan, layout.cost), layout.cost.per_sample(plan.lengths)
    bound = layout.cost.fixed + max(float(work.sum()) / layout.world_size, float(work.max()))
    return bound / (
        sum(map(max, zip(*costs, strict=True))) if layout.lockstep else max(map(sum, costs))
    )
