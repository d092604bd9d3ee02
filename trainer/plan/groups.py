"""Samples that must stay together, as one thing to cut: groups of the global batch.

A group is `group_size` consecutive samples in sample order. A cut that respects groups is a cut of
the groups themselves, each as long as its longest sample; of size 1 a group is its sample.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trainer.plan.cut import IntArray, Layout


def longest_of_groups(padded: IntArray, group_size: int) -> IntArray:
    """Give the padded length of every group, `(groups,)`, from that of every sample."""
    if group_size == 1:
        return padded
    longest: IntArray = np.maximum.reduceat(padded, np.arange(0, len(padded), group_size))
    return longest


def totals_of_groups(lengths: IntArray, group_size: int) -> IntArray:
    """Give the tokens of every group, `(groups,)`, from those of every sample."""
    if group_size == 1:
        return lengths
    totals: IntArray = np.add.reduceat(lengths, np.arange(0, len(lengths), group_size))
    return totals


def per_group(layout: Layout) -> Layout:
    """Count the fixed cost of a micro-batch in groups: `fixed + k G c` is `G (fixed / G + k c)`."""
    fixed = layout.cost.fixed / layout.group_size
    return replace(layout, cost=replace(layout.cost, fixed=fixed))


def samples_of_groups(groups: IntArray, group_size: int, num_samples: int) -> IntArray:
    """List the samples of some groups, group by group, a short one last.

    Args:
        groups: indices, in any order; given back as they are for groups of one sample.
        group_size: samples of a group.
        num_samples: of the global batch, whose last group may be short.
    """
    if group_size == 1:
        return groups
    samples = np.sort(groups)[:, None] * group_size + np.arange(group_size)
    found: IntArray = samples[samples < num_samples]
    return found
