"""Define how the BatchNorm layers of a run normalise: the feature that `batchnorm` names.

To add a way, subclass `BatchNormMode` and name the class in a YAML file of the group `batchnorm`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from torch import Tensor, nn

from trainer.assemble.features import Feature, StepShape
from trainer.assemble.run import Run
from trainer.assemble.run_plan import RunPlan
from trainer.config.components import SamplesToEvaluate
from trainer.config.messages import first_of
from trainer.core.coupling import Coupling
from trainer.core.format import number, plural
from trainer.core.rows import Row, join_parts, row
from trainer.features.batch_norm.checks import check_layers, check_lone_samples
from trainer.features.batch_norm.layers import (
    BatchNormLayer,
    RunningStatistics,
    layers_of,
    precise_statistics,
    use_mode,
)
from trainer.models.norms import normalizes_batch
from trainer.training.batches import Feed
from trainer.training.context import StepContext

# Samples that are normalised together, where nobody says.
DEFAULT_GROUP = 32


@dataclass(frozen=True, kw_only=True)
class BatchNormMode(Feature, ABC):
    """How the BatchNorm layers of a model normalise in training; its fields are keys of the config.

    Subclasses are frozen dataclasses. Evaluations normalise by the running statistics.
    """

    precise: SamplesToEvaluate = None
    """Training samples over which running statistics are estimated again, for evaluations."""

    needs_layers: ClassVar[bool] = True
    """Whether it is refused for a model without BatchNorm."""

    moves_once: ClassVar[bool] = True
    """Whether running statistics move once a step, or in no forward at all."""

    def resolved(self, shape: StepShape) -> BatchNormMode:
        """Give the mode that this one is for steps of such a shape.

        Raises:
            ConfigError: there is none.
        """
        return self

    @property
    def estimating(self) -> BatchNormMode | None:
        """The mode in which statistics are estimated again; None where they never are."""
        return None

    def coupling(self, name: str) -> Coupling:
        """Say how far the samples of a step depend on each other through the layer of a name.

        By default as far as the micro-batch, which it normalises over itself.
        """
        return Coupling(
            "micro_batch",
            why=f"{name} is BatchNorm, which normalises within each micro-batch",
            key="model",
            remedy="use GroupNorm",
            accepts=" batchnorm=micro",
        )

    @abstractmethod
    def normalize(self, layer: BatchNormLayer, values: Tensor) -> Tensor:
        """Normalise `(rows, channels, ...)` in training, as `forward` of the layer.

        Rows are those of whole samples, in sample order: `layer.rows_of(samples)` counts them.
        """

    @abstractmethod
    def scope(self, samples: str, ranks: int) -> str:
        """Say what is normalised over what, and when running statistics move, for a person.

        `samples` are those of a micro-batch in words: `8`, or `6 to 12`.
        """

    def adjust(self, module: nn.Module, shape: StepShape) -> None:
        """See the base class; a model without BatchNorm is left as it is."""
        if any(map(normalizes_batch, module.modules())):
            use_mode(module, self.resolved(shape))

    def check(self, run: Run) -> None:
        """See the base class."""
        check_layers(self, run)
        check_lone_samples(run)

    def parts(self, context: StepContext) -> Sequence[RunningStatistics]:
        """See the base class."""
        return [RunningStatistics(context.parallel.module, context.world)]

    def rows(self, run_plan: RunPlan) -> Sequence[Row]:
        """See the base class; of a model without BatchNorm there is nothing to say."""
        if not (layers := layers_of(run_plan.run.model.module)):
            return [row(batchnorm=None)]
        mode = layers[0].mode
        scope = _scope(mode, run_plan)
        over, _, more = scope.partition("; ")
        text = f"{plural(len(layers), 'layer')}, {over}"
        if self.precise:
            again = f"for evaluations estimated again over {number(self.precise)} samples"
            more = join_parts(more, again) or ""
        name = type(mode).__name__.lower()
        return [
            row("BatchNorm", text, group="computed", batchnorm=scope, batchnorm_mode=name),
            row("", more or None),
        ]

    def warnings(self, run_plan: RunPlan) -> Sequence[str]:
        """Warn of statistics of micro-batches that nobody has asked for."""
        run, plan = run_plan.run, run_plan.plans[0]
        layers = layers_of(run.model.module)
        is_whole = plan.num_micro_batches == 1
        if self.accepts_cut or is_whole or not layers or not layers[0].coupling.fixes_cut:
            return []
        most = max(_counts(run_plan))
        group = f" batchnorm.group={most}" * (most > 1 and most % DEFAULT_GROUP > 0)
        each = f"{plural(plan.accum_steps, 'time')} a step"
        whose = ", by those of rank 0 alone" * (run.world.size > 1)
        return [
            f"BatchNorm normalises over {_samples(run_plan)} samples, the micro-batches of one "
            f"rank, and not over the {number(plan.num_samples)} of the step, and its running "
            f"statistics move {each}{whose}: so the step depends on accum.micro; batchnorm=ghost"
            f"{group} depends on no cut, batchnorm=pooled moves them once a step, and "
            "batchnorm=micro accepts this"
        ]

    def notes(self, run_plan: RunPlan) -> Sequence[str]:
        """Name the layers, and say what the mode has them normalise over."""
        module = run_plan.run.model.module
        if not (layers := layers_of(module)):
            return []
        names = [name for name, part in module.named_modules() if part in layers]
        return [f"BatchNorm normalises {_scope(layers[0].mode, run_plan)}: {first_of(names)}"]

    @property
    def estimates(self) -> str | None:
        """See the base class."""
        if self.precise is None:
            return None
        return f"batchnorm.precise={self.precise}"

    def evaluating(self, context: StepContext, feed: Feed) -> AbstractContextManager[object]:
        """See the base class."""
        if self.precise is None:
            return nullcontext()
        return precise_statistics(context.parallel, feed, self.precise)


def _scope(mode: BatchNormMode, run_plan: RunPlan) -> str:
    return mode.scope(_samples(run_plan), run_plan.run.world.size)


def _counts(run_plan: RunPlan) -> list[int]:
    """Count the samples of each micro-batch of step 1 that has any."""
    return [len(ids) for ids in chain.from_iterable(run_plan.plans[0].ranks) if len(ids)]


def _samples(run_plan: RunPlan) -> str:
    """Write the samples of a micro-batch: `8`, or `6 to 12`."""
    low, high = min(_counts(run_plan)), max(_counts(run_plan))
    return number(low) if low == high else f"{number(low)} to {number(high)}"
