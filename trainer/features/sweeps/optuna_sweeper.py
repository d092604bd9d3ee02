"""Start the jobs of a search by whichever launcher was chosen, all of them at once.

The launcher runs as many at a time as there is room for. Each asks for its values as it starts, so
that a job which ends early makes room for one that knows of it.
"""

from __future__ import annotations

from typing import Any, final

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from trainer.cli.exit_messages import print_out
from trainer.cli.overrides import read_override
from trainer.features.sweeps.search import Search

OPTUNA = "hydra_plugins.step_trainer.OptunaSweeper"
"""Its name in `conf/hydra/sweeper/optuna.yaml`: Hydra makes sweepers of `hydra_plugins` alone."""


@final
class OptunaSweeper(Sweeper):
    """Hydra's part of a search; the task of its jobs has the other."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - which `Search` reads
        self._task: Any = None
        self._launcher: Any = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """See the base class."""
        self._task, made = task_function, Plugins.instance().instantiate_launcher
        self._launcher = made(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> None:
        """See the base class; also a search that is stopped says what it found."""
        search: Search = self._task.sweep.search
        jobs = search.begin()
        common = [line for line in arguments if not read_override(line).is_sweep_override()]
        if not jobs:
            text = f"study {search.study} has its {search.num_trials} jobs"
            print_out(f"{text}; a larger hydra.sweeper.n_trials goes on\n")
        try:
            if jobs:
                ended = self._launcher.launch([common for _ in jobs], initial_job_idx=jobs.start)
                for each in ended:
                    _ = each.return_value  # raises what was raised outside of a job's own run
        finally:
            if (best := search.write_found()) is not None:
                print_out(f"{best}\n")


def register_sweeper() -> None:
    """Let Hydra find the sweeper."""
    Plugins.instance().class_name_to_class[OPTUNA] = OptunaSweeper
