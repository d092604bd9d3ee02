"""Build the schedule, and count the steps of a warm-up that is typed in samples or tokens."""

from __future__ import annotations

import inspect
from dataclasses import replace

from torch.optim.lr_scheduler import LRScheduler

from trainer.assemble.instantiate import arguments_of, construct, look_up
from trainer.config.components import AMOUNT, SHARED
from trainer.config.messages import line
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.optim.library_schedules import OwnScheduler
from trainer.optim.schedules import Schedule
from trainer.plan.lengths import Lengths
from trainer.plan.order import Order


def typed_schedule(config: RunConfig) -> Schedule:
    """Build the schedule of a config.

    Raises:
        ConfigError: an argument does not fit.
    """
    kind = look_up(config.scheduler, "scheduler", config.trust)
    if not (inspect.isclass(kind) and issubclass(kind, LRScheduler)):
        return construct(config.scheduler, "scheduler", Schedule, config.trust)
    options = arguments_of(config.scheduler, "scheduler", config.trust)
    shared = {name: options.pop(name) for name in SHARED["scheduler"] if name in options}
    return OwnScheduler(kind=kind, options=options, **shared)


def with_warmup_steps(
    schedule: Schedule, order: Order, lengths: Lengths, total_steps: int
) -> Schedule:
    """Turn a warm-up such as `2000samples` into the steps that have trained on as many.

    The last of them is whole. They are counted in the order of the run, from its first step, so
    that a run which goes on has the same.

    Raises:
        ConfigError: the run has fewer.
    """
    match = AMOUNT.fullmatch(str(schedule.warmup))
    if match is None:
        return schedule
    number, prefix, unit = match.groups()
    wanted = round(float(number) * 1000 ** " kMG".index(prefix or " "))
    found, steps, cursor = 0, 0, order.start
    while found < wanted:
        if steps == total_steps:
            text = f"exceeds the {found} {unit} of the run's {total_steps} steps"
            raise ConfigError(line("scheduler.warmup", schedule.warmup, text))
        batch = order.next(cursor)
        found += len(batch.ids) if unit == "samples" else int(lengths[batch.ids].sum())
        steps, cursor = steps + 1, batch.after
    return replace(schedule, warmup=steps)
