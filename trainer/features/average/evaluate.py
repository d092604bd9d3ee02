"""Average the weights of a run over its steps, and evaluate the average beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Self, final

from torch import Tensor

from trainer.assemble.features import Feature
from trainer.assemble.run import Run
from trainer.assemble.run_plan import RunPlan
from trainer.checkpoint.average import AVERAGE, WeightAverage
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.format import AVERAGED
from trainer.core.rows import Row, row
from trainer.core.stateful import Stateful
from trainer.training.data import HeldOut
from trainer.training.evaluation import evaluate_parts
from trainer.training.loop import OpenRun


@final
@dataclass(frozen=True)
class AveragedWeights(Feature):
    """Follows the weights with their average, as `ema.decay` asks."""

    average: WeightAverage | None
    is_evaluated: bool

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """See the base class."""
        decay = config.ema.decay
        return cls(None if decay is None else WeightAverage(decay), config.ema.evaluate)

    def check(self, run: Run) -> None:
        """Refuse to evaluate the average where nothing is held out."""
        if self.is_evaluated and not run.data.held_out and run.config.command == "train":
            text = "nothing is held out, so nothing is evaluated: type data.holdout=0.05"
            raise ConfigError(f"ema.evaluate=true: {text}")

    def saved_parts(self) -> Mapping[str, Stateful]:
        """See the base class."""
        return {} if self.average is None else {AVERAGE: self.average}

    def rows(self, run_plan: RunPlan) -> Sequence[Row]:
        """Say what is averaged, and what an evaluation of it costs."""
        text = None
        if self.average is not None:
            text = f"of the weights, ema.decay={self.average.decay:g}"
            if self.is_evaluated:
                text += f"; evaluations give {AVERAGED}_loss too, and take twice as long"
        return [row("average", text, group="asked")]

    def further_means(
        self, run: OpenRun, held_out: Mapping[str, HeldOut]
    ) -> Mapping[str, Mapping[str, float]]:
        """See the base class; other features estimate what they need for the average."""
        if self.average is None or not self.is_evaluated:
            return {}
        with in_place(self.average), run.evaluating(run.context, run.feed):
            found = evaluate_parts(run.context, held_out, run.was_asked)
        return {f"{AVERAGED}_{name}".rstrip("_"): means for name, means in found.items()}


@contextmanager
def in_place(average: WeightAverage) -> Iterator[None]:
    """Have the model compute with the average inside the block; all bits are put back.

    What is here of each is exchanged, so that no rank waits for another. Of weights in half
    precision a copy is made, which the average, in fp32, has no room for.
    """
    with ExitStack() as undoing:
        for weight, mean in average.pairs():
            # By `.data`: whoever counts writes to weights, as an optimizer, is to see none.
            here = weight.data
            if here.dtype == mean.dtype:
                _exchange(here, mean)
                undoing.callback(_exchange, here, mean)
            else:
                undoing.callback(here.copy_, here.clone())
                here.copy_(mean)
        yield


def _exchange(one: Tensor, other: Tensor) -> None:
    """Give each of two tensors the values of the other."""
    before = one.clone()
    one.copy_(other)
    other.copy_(before)
