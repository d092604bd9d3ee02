"""Give the learning rate as a pure function of the step.

A schedule gives a factor; the base learning rate of each parameter group is multiplied by it. It
has no state, so a resumed run, a replayed step and another split see the same learning rate.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, final

import torch
from torch.optim.lr_scheduler import LRScheduler

from trainer.config.amounts import cadence_steps, warmup_steps
from trainer.config.components import AMOUNT, Amount, Cadence, Count, Part, Positive, Warmup
from trainer.config.messages import line
from trainer.core.errors import ConfigError
from trainer.core.rows import Described
from trainer.optim.optimizers import without_compiler
from trainer.plan.lengths import Lengths
from trainer.plan.order import Order

if TYPE_CHECKING:
    from torch.optim import Optimizer

# Of an amount: shares of an epoch do not add up to the last bit.
AMOUNT_TOLERANCE = 1e-6
Span: TypeAlias = Literal["first", "last", "after warm-up"]
"""The first or last steps of a run, or those behind its warm-up, which may be more than it has."""


@dataclass(frozen=True, kw_only=True)
class Schedule(Described, ABC):
    """A factor for the learning rate at every step.

    Subclasses are frozen dataclasses whose fields are the keys of their YAML file.
    """

    reference_batch: Count | None = None  # the global batch that `optimizer.lr` was tuned for.
    # How the learning rate follows the global batch away from it
    scale: Literal["none", "linear", "sqrt"] = "none"
    # Whether the optimizer's means and weights forget over as many samples away from it
    keep_half_life: bool = False
    warmup: Warmup = 0  # steps that rise linearly to 1, or a share of the run below 1

    lengths: ClassVar[Mapping[str, Span]] = {"warmup": "first"}
    """Fields that count steps, and may be typed in samples or tokens: those of which steps."""

    def __post_init__(self) -> None:
        """Refuse to follow a batch away from none."""
        if self.reference_batch is not None or (self.scale == "none" and not self.keep_half_life):
            return
        key = "keep_half_life=true" if self.keep_half_life else f"scale={self.scale}"
        text = "needs scheduler.reference_batch, the global batch that optimizer.lr was tuned for"
        raise ConfigError(f"scheduler.{key}: {text}")

    def check(self, total_steps: int) -> None:
        """Refuse a schedule that does not fit into a run; a length may still be an amount of data.

        Args:
            total_steps: steps of the whole run, at least 1.

        Raises:
            ConfigError: naming the length, and the largest that fits.
        """
        _phases(total_steps, self.warmup)

    def factor(self, step: int, total_steps: int) -> float:
        """Give the share of the base learning rate, that of the warm-up included.

        The last step of the warm-up has a factor of 1, where others begin at 0.

        Args:
            step: from 0, less than `total_steps`.
            total_steps: steps of the whole run, at least 1.

        Raises:
            ConfigError: the schedule does not fit into `total_steps`.
        """
        warmup, _ = _phases(total_steps, self.warmup)
        if step < warmup:
            # The first step has a rate above 0: at 0 it would train nothing.
            return (step + 1) / warmup
        return self.after_warmup(step, warmup, total_steps)

    @abstractmethod
    def after_warmup(self, step: int, warmup_steps: int, total_steps: int) -> float:
        """Give the share of the base learning rate once the warm-up is over.

        Args:
            step: of the run, from `warmup_steps`, less than `total_steps`.
            warmup_steps: how many steps of the run were warm-up.
            total_steps: steps of the whole run, at least 1.

        Returns:
            A finite number, 0 or more, and as a rule at most 1.

        Raises:
            ConfigError: the schedule does not fit into `total_steps`.
        """

    def batch_factor(self, global_batch: float) -> float:
        """Scale the base learning rates to the size of the global batch.

        Linear keeps the update per sample of SGD (Goyal et al. 2017, 1706.02677); the square root
        keeps how far updates of Adam scatter (Malladi et al. 2022, 2205.10287).
        """
        if self.scale == "none" or self.reference_batch is None:
            return 1.0
        ratio = global_batch / self.reference_batch
        return ratio if self.scale == "linear" else math.sqrt(ratio)


@final
@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The base learning rate, after a linear warm-up."""

    def after_warmup(self, step: int, warmup_steps: int, total_steps: int) -> float:
        """See the base class."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Decay(Schedule):
    """A fall from 1 to `floor` over all steps after the warm-up."""

    floor: Part = 0.0  # what it falls towards; the last step is just above it

    def after_warmup(self, step: int, warmup_steps: int, total_steps: int) -> float:
        """See the base class."""
        progress = (step - warmup_steps) / (total_steps - warmup_steps)
        return self.floor + (1.0 - self.floor) * self.remaining(progress)

    @abstractmethod
    def remaining(self, progress: float) -> float:
        """Give the share of the fall that is still ahead, by that of the steps that are over."""


@final
@dataclass(frozen=True, kw_only=True)
class Cosine(Decay):
    """Half a cosine (Loshchilov & Hutter 2017, eq. 5)."""

    def remaining(self, progress: float) -> float:
        """See the base class."""
        return 0.5 * (1.0 + math.cos(math.pi * progress))


@final
@dataclass(frozen=True, kw_only=True)
class LinearDecay(Decay):
    """A straight line, as `get_linear_schedule_with_warmup` has it."""

    def remaining(self, progress: float) -> float:
        """See the base class."""
        return 1.0 - progress


@final
@dataclass(frozen=True, kw_only=True)
class PolynomialDecay(Decay):
    """A power of the share of steps that is ahead, as PyTorch's `PolynomialLR`."""

    power: Positive = 1.0  # 1 is a straight line, 2 falls fast at first

    def remaining(self, progress: float) -> float:
        """See the base class."""
        return float((1.0 - progress) ** self.power)


@final
@dataclass(frozen=True, kw_only=True)
class InverseSqrt(Schedule):
    """One over the root of the step (Zhai et al. 2022, 2106.04560), for runs without an end."""

    lengths = MappingProxyType({"warmup": "first", "timescale": "after warm-up"})

    # Steps until the square of the factor is a half, or their share of the run below 1
    timescale: Cadence | Amount | None = None

    def after_warmup(self, step: int, warmup_steps: int, total_steps: int) -> float:
        """See the base class."""
        # As `get_inverse_sqrt_schedule` has it where nobody says.
        timescale: float = warmup_steps or 10_000
        if self.timescale is not None:
            # An amount of data was turned into steps by `with_length_steps`.
            assert not isinstance(self.timescale, str)
            timescale = cadence_steps(self.timescale, total_steps)
        return 1.0 / math.sqrt((step - warmup_steps + timescale) / timescale)


@final
@dataclass(frozen=True, kw_only=True)
class WSD(Schedule):
    """Warm-up, stable, decay: constant, then linear to `floor` (Hu et al. 2024, 2404.06395)."""

    lengths = MappingProxyType({"warmup": "first", "decay": "last"})

    decay: Warmup | Amount = 0.2  # steps at the end that decay, or their share of the run below 1
    floor: Part = 0.0  # what it falls towards; the last step is just above it

    def check(self, total_steps: int) -> None:
        """See the base class."""
        _phases(total_steps, self.warmup, self.decay)

    def after_warmup(self, step: int, warmup_steps: int, total_steps: int) -> float:
        """See the base class."""
        _, decay_steps = _phases(total_steps, self.warmup, self.decay)
        # As the warm-up reaches 1 with its last step, the decay leaves it with its first.
        share = min(1.0, (total_steps - step) / (decay_steps + 1))
        return self.floor + (1.0 - self.floor) * share


def _phases(total_steps: int, warmup: float | str, decay: float | str = 0.0) -> tuple[int, int]:
    """Resolve a warm-up, and the share of a run that decays at its end, to steps.

    Amounts of data, which are not counted yet, have none. A `ConfigError` names the largest value
    that fits.
    """
    # In whole steps, so that a share such as 0.2 of 10 steps is 2 and not 1.9999
    begin, end = (
        0 if isinstance(each, str) else warmup_steps(each, total_steps) for each in (warmup, decay)
    )
    if begin > total_steps:
        text = f"exceeds the run's {total_steps} steps; the largest valid value is {total_steps}"
        raise ConfigError(line("scheduler.warmup", warmup, text))
    if begin + end > total_steps:
        text = f"{end} steps of decay and {begin} of warm-up exceed the run's {total_steps} steps"
        most: float = total_steps - begin
        if isinstance(decay, float) and decay < 1:
            most /= total_steps
        fits = f"the largest valid value is {most:.3g}"
        raise ConfigError(line("scheduler.decay", decay, f"{text}; {fits}"))
    return begin, end


def apply_factor(optimizer: Optimizer, base_lrs: Sequence[float], factor: float) -> None:
    """Set the learning rate of every parameter group from its rate at factor 1."""
    if not 0.0 <= factor < math.inf:
        raise ConfigError(f"scheduler: `factor` gave {factor}; give a finite number, 0 or more")
    for group, base_lr in zip(optimizer.param_groups, base_lrs, strict=True):
        group["lr"] = base_lr * factor


@final
@dataclass(frozen=True, kw_only=True)
class OwnScheduler(Schedule):
    """Any subclass of `LRScheduler`, a user's too; it counts steps from the end of the warm-up."""

    kind: type[LRScheduler]  # the class
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments beside the optimizer

    def after_warmup(self, step: int, warmup_steps: int, total_steps: int) -> float:
        """See the base class."""
        known, following = self._factors
        while len(known) <= step - warmup_steps:
            # A factor is one share of any base rate; a rate that the class sets is not.
            factor, other = next(following)
            if not math.isclose(factor, other, rel_tol=1e-9, abs_tol=1e-12):
                raise ConfigError(
                    f"scheduler: {self.kind.__name__} sets rates, not factors of optimizer.lr, by "
                    "arguments such as eta_min or max_lr; type scheduler=cosine scheduler.floor=0.1"
                )
            known.append(factor)
        return known[step - warmup_steps]

    @cached_property
    def _factors(self) -> tuple[list[float], Iterator[tuple[float, float]]]:
        """The factors of the steps up to now; those of the next, found from two learning rates."""
        return [], zip(self._walk(1.0), self._walk(0.5), strict=True)

    def _walk(self, lr: float) -> Iterator[float]:
        # Without an element: a scheduler reads and writes learning rates alone.
        optimizer = without_compiler(torch.optim.SGD)([torch.nn.Parameter(torch.zeros(0))], lr=lr)
        try:
            scheduler = self.kind(optimizer, **self.options)
            while True:
                yield optimizer.param_groups[0]["lr"] / lr
                optimizer.step()
                scheduler.step()
        except (TypeError, ValueError, KeyError) as error:  # such as of one that asks for a metric
            text = f"{self.kind.__name__} is no function of the step alone, or refuses: {error}"
            raise ConfigError(f"scheduler: {text}") from error


def with_length_steps(
    schedule: Schedule, order: Order, lengths: Lengths, total_steps: int
) -> Schedule:
    """Turn lengths such as `warmup=2000samples` or `1epoch` into steps that train on as many.

    The step that reaches the amount counts. They are counted in the order of the run, so that a
    run which goes on has the same.
    """
    for name, span in schedule.lengths.items():
        value = getattr(schedule, name)
        if (match := AMOUNT.fullmatch(str(value))) is None:
            continue
        number, prefix, unit = match.groups()
        counts = _counts(order, lengths, unit)
        if span == "after warm-up":  # which may be more steps than the run has
            counts = islice(counts, warmup_steps(schedule.warmup, total_steps), None)
        else:
            counts = islice(counts, total_steps)
        if span == "last":
            counts = iter([*counts][::-1])
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
        if unit == "samples":
            yield len(batch.ids)
        elif unit == "tokens":
            yield int(lengths[batch.ids].sum())
        else:
            yield order.fractional_epoch(batch.after) - order.fractional_epoch(cursor)
        cursor = batch.after
