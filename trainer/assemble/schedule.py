"""Build the schedule, and count the steps of its lengths that are typed in samples or tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from trainer.assemble.instantiate import arguments_of, construct, look_up
from trainer.config.amounts import warmup_steps
from trainer.config.components import AMOUNT, SHARED
from trainer.config.messages import line
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.optim.schedules import OwnScheduler, Schedule
from trainer.plan.lengths import Lengths
from trainer.plan.order import Order

AMOUNT_TOLERANCE = 1e-6  # of an amount: shares of an epoch do not add up to the last bit


def typed_schedule(config: RunConfig) -> Schedule:
    """Build the schedule of a config, and refuse one that does not fit into its steps."""
    kind = look_up(config.scheduler, "scheduler", config.trust)
    if not (inspect.isclass(kind) and issubclass(kind, LRScheduler)):
        schedule = construct(config.scheduler, "scheduler", Schedule, config.trust)
        if config.steps is not None:  # else they are counted once data are read
            schedule.check(config.steps)
        return schedule
    options = arguments_of(config.scheduler, "scheduler", config.trust)
    shared = {name: options.pop(name) for name in SHARED["scheduler"] if name in options}
    return OwnScheduler(kind=kind, options=options, **shared)


def with_length_steps(
    schedule: Schedule, order: Order, lengths: Lengths, total_steps: int
) -> Schedule:
    """Turn lengths such as `warmup=2000samples` or `1epoch` into steps that train on as many.

    The step that reaches the amount counts. They are counted in the order of the run, so that a
    run which goes on has the same.

    Raises:
        ConfigError: the run has fewer.
    """
    for name, span in schedule.lengths.items():
        if match := AMOUNT.fullmatch(str(value := getattr(schedule, name))):
            number, prefix, unit = match.groups()
            begin = warmup_steps(schedule.warmup, total_steps) if span == "after warm-up" else 0
            end = None if span == "after warm-up" else total_steps
            counts: Iterable[float] = islice(_counts(order, lengths, unit), begin, end)
            counts = reversed([*counts]) if span == "last" else counts
            wanted, most = float(number) * 1000 ** " kMG".index(prefix or " "), 0.0
            for steps, most in enumerate(accumulate(counts), 1):
                if most > wanted - AMOUNT_TOLERANCE:
                    changed: dict[str, Any] = {name: steps}
                    schedule = replace(schedule, **changed)
                    break
            else:
                shown = f"{most:.4g} epochs" if unit.startswith("epoch") else f"{most:.0f} {unit}"
                text = f"exceeds the {shown} of the run's {total_steps} steps"
                raise ConfigError(line(f"scheduler.{name}", value, text))
    schedule.check(total_steps)
    return schedule


def _counts(order: Order, lengths: Lengths, unit: str) -> Iterator[float]:
    """Give the samples, tokens or epochs of each step, without an end."""
    cursor = order.start
    while True:
        batch = order.next(cursor)
        if unit.startswith("epoch"):
            yield order.fractional_epoch(batch.after) - order.fractional_epoch(cursor)
        else:
            yield len(batch.ids) if unit == "samples" else int(lengths[batch.ids].sum())
        cursor = batch.after
