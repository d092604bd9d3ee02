"""Define what a feature adds to a run: the engine asks each one, and knows none by name.

A feature is a group of `conf/` whose classes derive from `Feature`, or an entry of
`conf/features.yaml`. Its code lives in one folder of `trainer/features`, or in a user's own module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

from torch import nn

from trainer.config.run_config import RunConfig
from trainer.core.rows import Row
from trainer.core.stateful import Stateful
from trainer.data.shown import ShownSample
from trainer.data.view import DataView
from trainer.objectives.base import Objective
from trainer.plan.cut import Plan
from trainer.training.batches import Feed, PlannedBatch
from trainer.training.context import Measuring, StepContext
from trainer.training.data import HeldOut
from trainer.verify.report import Added, VerifyReport

if TYPE_CHECKING:
    from trainer.assemble.run import Run
    from trainer.assemble.run_plan import RunPlan
    from trainer.checkpoint.store import Loaded
    from trainer.training.loop import OpenRun


@final
@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What is known of a run's steps before its model is built."""

    largest: int  # samples of the largest global batch
    is_stated: bool  # whether the cut takes the sizes of micro-batches as they were typed
    is_padded: bool  # whether samples of different length share a micro-batch


@final
@dataclass(frozen=True, kw_only=True)
class EndOfRun:
    """What is known of a run once its steps are over."""

    run: Run
    opened: OpenRun
    plan: Mapping[str, Any]  # what plan.json holds
    phases: Sequence[Mapping[str, Any]]  # what each rank's steps took: `PhaseTimes.spending`


@final
@dataclass(frozen=True, kw_only=True)
class ExportedWeights:
    """What is known of weights that are exported."""

    config: RunConfig
    run: Path  # the folder of their run
    loaded: Loaded  # their checkpoint
    to: Path  # where they will be
    model: str  # what its users call the model
    labels: Mapping[str, str]  # what a hub asks for: `library_name`, `pipeline_tag`
    base: str | None  # folder, or name on the hub, of the weights that it began with
    lines: Sequence[str]  # of Python, which load it; none where it takes more than lines


class Feature:
    """Adds to a run what the engine does not know of; every method may be left out.

    `docs/architecture.md` says when each is called.
    """

    accepts_cut: ClassVar[bool] = False
    """Whether whoever types it says that micro-batches are a part of the step."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Build it by the settings of a run, where `conf/features.yaml` names the class."""
        return cls()

    def adjust(self, module: nn.Module, shape: StepShape) -> None:
        """Change how a model computes, in place, and none of its weights.

        A layer that couples the samples of a step declares it: an attribute `coupling`.

        Args:
            module: the model as it was built, in training, before it is laid out over ranks.
            shape: what the steps are like.

        Raises:
            ConfigError: what was typed does not fit the model or the steps.
        """

    def decided(
        self, objective: Objective, data: DataView, recorded: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Give arguments of the objective that the training data decide, by their new values.

        A run that is read again has those of its contract, `recorded`, so that no data are read.
        """
        return {}

    def check(self, run: Run) -> None:
        """Refuse a run that it does not fit, before anything is measured.

        Raises:
            ConfigError: naming the key, and what to type.
        """

    def planned(self, run_plan: RunPlan) -> Feature:
        """Give what takes its place once the cut is found; it may refuse that as `check` does."""
        return self

    def parts(self, context: StepContext) -> Sequence[Stateful]:
        """Give what follows every update, before the parts of the user."""
        return ()

    def saved_parts(self) -> Mapping[str, Stateful]:
        """Give what follows every update and is saved, by name; a checkpoint may be without it."""
        return {}

    def rows(self, run_plan: RunPlan) -> Sequence[Row]:
        """Describe it for the start block and plan.json."""
        return ()

    def warnings(self, run_plan: RunPlan) -> Sequence[str]:
        """Name what makes the step another than that of the whole batch."""
        return ()

    def notes(self, run_plan: RunPlan) -> Sequence[str]:
        """Say what `train verify` is to say beside its verdict."""
        return ()

    def verified(
        self,
        context: StepContext,
        batch: PlannedBatch,
        feed: Feed,
        report: VerifyReport,
        folder: Path,
    ) -> Added | None:
        """Look further at the step that `train verify` compared; None adds nothing.

        Args:
            context: the run in one process; copies of its model may be changed.
            batch: the planned step, with the micro-batches of all ranks.
            feed: loads its samples in other groups.
            report: what was found.
            folder: of the verification; it has a verify.json where two ranks have compared.
        """
        return None

    def saved_rows(self, run: Run, loaded: Loaded) -> Sequence[Row]:
        """Describe for `train plan` what is known by the checkpoint that a run goes on from."""
        return ()

    def recut(self, plan: Plan, feed: Feed, step: int) -> Plan:
        """Cut the samples of a step otherwise: a pure function, the same on every rank."""
        return plan

    def measuring(self) -> Sequence[Measuring]:
        """Give what measures the steps of this run."""
        return ()

    @property
    def estimates(self) -> str | None:
        """The setting by which `evaluating` sets buffers from training data; None without one.

        An export writes these buffers, too.
        """
        return None

    def around_steps(self, opened: OpenRun, folder: Path) -> AbstractContextManager[object]:
        """Follow the steps that this process takes in the folder of a run, inside the block."""
        return nullcontext()

    def evaluating(self, context: StepContext, feed: Feed) -> AbstractContextManager[object]:
        """Change the model for an evaluation, inside the block alone. Collective."""
        return nullcontext()

    def further_means(
        self, run: OpenRun, held_out: Mapping[str, HeldOut]
    ) -> Mapping[str, Mapping[str, float]]:
        """Give further means over what is held out, by names of parts that no other has.

        Called ahead of every evaluation, whose line they stand in, outside of `evaluating`.
        Collective; `Preempted` ends the run.
        """
        return {}

    def figures(
        self, context: StepContext, parts: Mapping[str, HeldOut], was_asked: Callable[[], bool]
    ) -> Mapping[str, Mapping[str, float]]:
        """Give more figures of an evaluation, by parts, equal on all ranks. Collective.

        `Preempted` where `was_asked`, on any rank, says that a signal asks to stop.
        """
        return {}

    def complete(self, part: str, lines: Sequence[dict[str, Any]]) -> None:
        """Add to lines of predictions.jsonl what `figures` found of the samples of a part."""

    def scores(self, lines: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        """Give figures of records, each with a `label` and a `prediction`, which may be no more."""
        return {}

    def after_evaluation(self, run: OpenRun) -> None:
        """Look further at a model in training, within `evaluating`. Collective.

        `Preempted` ends the run as a signal does. A `run.progress.early_end`, the same on every
        rank, ends it as one that has done all its steps: saved, with exit code 0.
        """

    def shown(self, samples: Sequence[ShownSample], folder: Path) -> Sequence[Row]:
        """Show the first samples of step 1 otherwise than in words, in the folder of a run."""
        return ()

    def picture(self, sample: ShownSample) -> bytes | None:
        """Draw a held-out sample with a large loss, as a PNG; None where there is nothing to see.

        Asked by `train evaluate eval.predictions=true`, for the page of the run.
        """
        return None

    def remark(self, entry: Mapping[str, Any], ids: Sequence[int], folder: Path) -> str | None:
        """Say in a line what is odd about a step, if anything is. Called on the main rank alone.

        Args:
            entry: the step's line of metrics.jsonl; on an accelerator it comes a step late.
            ids: the samples behind the step, in the order of its global batch.
            folder: of the run.
        """
        return None

    def end_rows(self, end: EndOfRun) -> Sequence[Row]:
        """Say on the first rank what a run has shown: for the end of the screen and result.json.

        Rows of `computed` stand beside the speed, those of `below` under the other figures.
        """
        return ()

    def exported(self, weights: ExportedWeights, folder: Path) -> Sequence[str]:
        """Write more files into the unpublished folder of exported weights; give lines on them."""
        return ()


@final
@dataclass(frozen=True)
class Features:
    """The features of a run, by their keys."""

    by_key: Mapping[str, Feature]

    def __iter__(self) -> Iterator[Feature]:
        return iter(self.by_key.values())

    def adjust(self, module: nn.Module, shape: StepShape) -> None:
        """Have all of them change how a model computes."""
        for feature in self:
            feature.adjust(module, shape)

    def planned(self, run_plan: RunPlan) -> Features:
        """Let all of them know the cut."""
        return Features({key: each.planned(run_plan) for key, each in self.by_key.items()})

    def recut(self, plan: Plan, feed: Feed, step: int) -> Plan:
        """Let all of them cut the samples of a step."""
        for feature in self:
            plan = feature.recut(plan, feed, step)
        return plan

    def around_steps(self, opened: OpenRun, folder: Path) -> AbstractContextManager[None]:
        """Have all of them follow the steps."""
        return _within(feature.around_steps(opened, folder) for feature in self)

    def evaluating(self, context: StepContext, feed: Feed) -> AbstractContextManager[None]:
        """Have all of them change the model for an evaluation. Collective."""
        return _within(feature.evaluating(context, feed) for feature in self)

    def further_means(
        self, run: OpenRun, held_out: Mapping[str, HeldOut]
    ) -> Mapping[str, Mapping[str, float]]:
        """Let all of them evaluate the model otherwise. Collective."""
        found = dict[str, Mapping[str, float]]()
        for feature in self:
            found.update(feature.further_means(run, held_out))
        return found

    def after_evaluation(self, run: OpenRun) -> None:
        """Have all of them look at a model that was evaluated. Collective."""
        for feature in self:
            feature.after_evaluation(run)


@contextmanager
def _within(contexts: Iterable[AbstractContextManager[object]]) -> Iterator[None]:
    """Enter one context after the other, and leave them in reverse."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
