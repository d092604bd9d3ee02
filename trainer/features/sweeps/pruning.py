"""Report the evaluations of a job to its search, and end the job where the pruner says so."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from hydra.utils import instantiate

from trainer.assemble.features import Feature
from trainer.config.run_config import RunConfig
from trainer.core.format import figure_name
from trainer.features.sweeps.search import PRUNED, TRIAL, live, open_study
from trainer.training.loop import OpenRun


@final
@dataclass(frozen=True)
class PrunedJob(Feature):
    """Ends a run that is a job of a search, where others were better by that step."""

    trial: Mapping[str, Any] | None  # as `Search.variable` writes it; None of any other run

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """See the base class."""
        text = os.environ.get(TRIAL)
        return cls(json.loads(text) if text and config.command == "train" else None)

    def after_evaluation(self, run: OpenRun) -> None:
        """See the base class: the main rank asks, and all ranks end at the same step."""
        if self.trial is None:
            return
        if (reason := run.context.world.on_main(lambda: self._ask(run))) is not None:
            run.progress.early_end = reason

    def _ask(self, run: OpenRun) -> str | None:
        """Report the metric; say why the run is to end, if it is."""
        assert self.trial is not None
        step, evaluation = run.progress.step, run.progress.evaluation
        figures = {figure_name(name): figure for name, figure in evaluation.items()}
        value = figures.get(self.trial["metric"])
        if value is None or not math.isfinite(value):
            return None
        try:
            pruner = instantiate(self.trial["pruner"])
            study = open_study(self.trial["storage"], self.trial["study"], pruner=pruner)
            trial = live(study, self.trial["trial"])
            # A run that goes on may evaluate a step again, of which the first counts.
            trial.report(value, step)
            if not 0 < step < run.total_steps or not trial.should_prune():
                return None
            trial.set_user_attr(PRUNED, True)
        except Exception as error:  # of a database, which may be away for a while
            run.reporter.warn(f"hydra.sweeper: the study was not reached: {error}")
            return None
        name = type(pruner).__name__
        return f"pruned: {name} of the search found others better at step {step}"
