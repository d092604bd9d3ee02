"""Define how the BatchNorm layers of a run normalise: the feature that `batchnorm` names.

To add a way, subclass `BatchNormMode` and name the class in a YAML file of the group `batchnorm`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from trainer.assemble.features import Feature, StepShape
from trainer.assemble.run import Run
from trainer.assemble.run_plan import RunPlan
from trainer.config.components import SamplesToEvaluate
from trainer.core.coupling import Coupling
from trainer.core.rows import Row
from trainer.core.stateful import Stateful
from trainer.core.world import World
from trainer.features.batch_norm import checks, rows
from trainer.features.batch_norm.layers import BatchNormLayer, RunningStatistics, use_mode
from trainer.features.batch_norm.precise_statistics import precise_statistics
from trainer.models.norms import normalizes_batch
from trainer.parallel.base import Parallel
from trainer.training.batches import Feed

DEFAULT_GROUP = 32  # samples that are normalised together, where nobody says


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

    @abstractmethod
    def coupling(self, name: str) -> Coupling:
        """Say how far the samples of a step depend on each other through the layer of a name."""

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
        checks.check_layers(self, run)
        checks.check_lone_samples(run)

    def parts(self, module: nn.Module, world: World) -> Sequence[Stateful]:
        """See the base class."""
        return [RunningStatistics(module, world)]

    def rows(self, run_plan: RunPlan) -> Sequence[Row]:
        """See the base class."""
        return rows.batch_norm_rows(run_plan, self.precise)

    def warnings(self, run_plan: RunPlan) -> Sequence[str]:
        """See the base class."""
        return [] if self.accepts_cut else rows.batch_norm_warnings(run_plan, DEFAULT_GROUP)

    def notes(self, run_plan: RunPlan) -> Sequence[str]:
        """See the base class."""
        return rows.batch_norm_notes(run_plan)

    @property
    def estimates(self) -> bool:
        """See the base class."""
        return self.precise is not None

    def evaluating(self, model: Parallel, feed: Feed) -> AbstractContextManager[object]:
        """See the base class."""
        if self.precise is None:
            return nullcontext()
        return precise_statistics(model, feed, self.precise)


def batch_norm_coupling(name: str) -> Coupling:
    """Say that the layer of a name normalises each micro-batch over itself."""
    return Coupling(
        "micro_batch",
        why=f"{name} is BatchNorm, which normalises within each micro-batch",
        key="model",
        remedy="use GroupNorm",
        accepts=" batchnorm=micro",
    )
