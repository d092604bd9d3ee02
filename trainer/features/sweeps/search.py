"""Search by Optuna: a job asks the study for its values when it starts, and tells how it ended.

The study is a journal in the sweep's folder, or in the storage that was typed. Every process that
sees it takes part, on any host, so that a job knows all those that ended before it began.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast, final

import yaml
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from trainer.cli.overrides import dotted, read_override, values_of
from trainer.config.messages import clip
from trainer.config.metric_mode import mode_of
from trainer.config.run_config import RunConfig
from trainer.core.durable import make_folders, write_file_atomic
from trainer.core.errors import ConfigError
from trainer.core.run_folder import is_locked

FOUND = "optimization_results.yaml"
JOURNAL = "study.log"
"""File of a sweep's folder that holds its study, where no storage was typed."""

TRIAL = "STEP_TRAINER_TRIAL"
"""Environment variable by which the processes of a job know their trial."""

PRUNED = "pruned"
"""Attribute of a trial that its pruner ended, and what the table calls it."""

# Other attributes of a trial: the folder of its sweep, its number there, whether it was killed
_SWEEP, _JOB, _LOST = "sweep", "job", "lost"
_METRIC = "metric"  # of a study
_TABLES_S = 2.0  # within which another command has made the tables of a study
# Of a study without a pruner Optuna makes one that prunes.
_NO_PRUNER = {"_target_": "optuna.pruners.NopPruner"}


def open_study(storage: str, name: str, **settings: Any) -> Any:  # noqa: ANN401 - Optuna's classes
    """Open a study, or begin it; the storage is a URL, or else the file of a journal."""
    optuna, found = _optuna(), cast("Any", storage)
    if "://" not in storage:
        backend = optuna.storages.journal.JournalFileBackend(storage)
        found = optuna.storages.JournalStorage(backend)
    return optuna.create_study(storage=found, study_name=name, load_if_exists=True, **settings)


@final
@dataclass(frozen=True, kw_only=True)
class Search:
    """What the jobs of a search have in common."""

    folder: Path  # of the sweep
    storage: str
    study: str  # its name there
    metric: str
    mode: Literal["min", "max"]
    typed: Sequence[str]  # overrides, those with several values among them
    sampler: Mapping[str, Any]
    pruner: Mapping[str, Any]
    seed: int
    num_trials: int  # of the study in all

    @classmethod
    def of(
        cls, sweeper: DictConfig, folder: Path, config: RunConfig, typed: Sequence[str]
    ) -> Search:
        """Read the settings of `conf/hydra/sweeper/optuna.yaml`."""
        settings: Any = OmegaConf.to_container(sweeper, resolve=True)
        storage = str(settings["storage"] or folder / JOURNAL)
        scheme, is_url, place = storage.partition("://")
        if not is_url:
            storage = str(Path(storage).absolute())
        # A relative path of SQLite: jobs may run in another folder.
        elif scheme.startswith("sqlite") and place[1:] and not place.startswith("//"):
            storage = f"{scheme}:///{Path(place[1:]).absolute()}"
        for key in ("n_trials", "n_jobs"):
            value = settings[key]
            is_count = type(value) is int and value > 0
            if not is_count and (key, value) != ("n_jobs", None):
                raise ConfigError(clip(f"hydra.sweeper.{key}={value}: must be 1 or more"))
        for key in ("sampler", "pruner"):
            _made(key, settings[key])
        return cls(
            folder=folder,
            storage=storage,
            study=str(settings["study_name"] or folder.name),
            sampler=settings["sampler"],
            pruner=settings["pruner"] or _NO_PRUNER,
            num_trials=settings["n_trials"],
            metric=config.sweep.metric,
            mode=sweep_mode(config),
            seed=config.seed,
            typed=typed,
        )

    def begin(self) -> range:
        """Open the study, and give the numbers of the jobs that are left."""
        study, own, counted = self._study(), dict[int, bool](), 0
        found = (study.user_attrs.get(_METRIC, self.metric), study.direction.name.lower())
        if found != (self.metric, self._direction):
            text = f"has values of {found[0]}, to {found[1]}; type another name"
            raise ConfigError(clip(f"hydra.sweeper.study_name={self.study}: {text}"))
        study.set_user_attr(_METRIC, self.metric)
        for trial in study.get_trials(deepcopy=False):
            folder, is_done = trial.user_attrs.get(_SWEEP), trial.state.is_finished()
            if folder == str(self.folder):
                own[trial.user_attrs[_JOB]] = is_done
                counted += is_done and _LOST not in trial.user_attrs
            # Of a sweep that was killed; one that nobody here began is left to others.
            elif folder is not None and not is_done and not is_locked(Path(folder)):
                live(study, trial._trial_id).set_user_attr(_LOST, value=True)
                study.tell(trial.number, state=_optuna().trial.TrialState.FAIL)
            else:
                counted += _LOST not in trial.user_attrs
        todo = [number for number, is_done in own.items() if not is_done]
        number = 0
        while len(todo) < self.num_trials - counted:
            if number not in own:
                todo.append(number)
            number += 1
        # Those between that are done end at once.
        return range(min(todo, default=0), max(todo, default=-1) + 1)

    def take(self, job: int) -> Any:  # noqa: ANN401
        """Give the trial of a job: the one that it has, as after a kill, or a new one.

        None where other commands have done all that are left of the study.
        """
        study, own = self._study(), {_SWEEP: str(self.folder), _JOB: job}
        settings, trials = dict(self.sampler), study.get_trials(deepcopy=False)
        for trial in trials:
            if own.items() <= trial.user_attrs.items():
                return trial
        if sum(_LOST not in each.user_attrs for each in trials) >= self.num_trials:
            return None
        # Each process makes a sampler, which with one seed would draw the same for every job.
        if "seed" in settings:
            seed = self.seed if settings["seed"] is None else settings["seed"]
            # One without a folder may be of a job of this sweep that asks just now.
            folders = [each.user_attrs.get(_SWEEP, str(self.folder)) for each in trials]
            others = sum(folder != str(self.folder) for folder in folders)
            settings["seed"] = (seed + others + job) % 2**32
        study.sampler = _made("sampler", settings)
        new = study.ask(self._space())
        for name, value in own.items():
            new.set_user_attr(name, value)
        return study.get_trials(deepcopy=False)[new.number]

    def lines(self, trial: Any) -> list[str]:  # noqa: ANN401
        """Give the overrides of a job: those of all, and the values of its trial."""
        found = list[str]()
        for line in self.typed:
            name, key = dotted(read_override(line)), line.partition("=")[0]
            found.append(f"{key}={trial.params[name]}" if name in trial.params else line)
        return found

    def variable(self, trial: Any) -> str:  # noqa: ANN401
        """Say to the processes of a job, in words, which trial theirs is."""
        names = ("storage", "study", "pruner", "metric")
        own = {name: getattr(self, name) for name in names}
        return json.dumps({"trial": trial._trial_id, **own})

    def tell(self, trial: Any, value: float | None) -> str | None:  # noqa: ANN401
        """Tell the study how a job ended; gives its state for the table, where it was pruned."""
        study, states = self._study(), _optuna().trial.TrialState
        is_pruned = PRUNED in study.get_trials(deepcopy=False)[trial.number].user_attrs
        state = states.COMPLETE
        if is_pruned or value is None:
            value, state = None, states.PRUNED if is_pruned else states.FAIL
        study.tell(trial.number, value, state=state)
        return PRUNED if is_pruned else None

    def write_found(self) -> str | None:
        """Write the best values into the sweep's folder; gives them in a line, if there are any."""
        study = self._study()
        complete = study.get_trials(deepcopy=False, states=[_optuna().trial.TrialState.COMPLETE])
        if not complete:
            return None
        best, values = study.best_trial, dict[str, Any]()
        for name, value in best.params.items():
            # Choices are held as they are typed.
            values[name] = yaml.safe_load(value) if isinstance(value, str) else value
        found = {"name": "optuna", "best_params": values, "best_value": best.value}
        make_folders(self.folder)
        write_file_atomic(self.folder / FOUND, yaml.safe_dump(found, sort_keys=False).encode())
        words = " ".join(f"{name}={value}" for name, value in best.params.items())
        return f"best of {len(complete)} jobs that completed: {words}"

    @property
    def _direction(self) -> str:
        return {"min": "minimize", "max": "maximize"}[self.mode]

    def _study(self, *, tries_again: bool = True) -> Any:  # noqa: ANN401
        make_folders(self.folder)
        try:
            return open_study(self.storage, self.study, direction=self._direction)
        except ConfigError:
            raise
        except Exception as error:  # of any database
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            # Another command made the study's tables at the same moment.
            if tries_again and ("IntegrityError" in text or "already exists" in text):
                time.sleep(_TABLES_S)
                return self._study(tries_again=False)
            scheme = self.storage.partition("://")[0]  # what follows may hold a password
            raise ConfigError(clip(f"hydra.sweeper.storage={scheme}: {text}")) from error

    def _space(self) -> dict[str, Any]:
        typed = map(read_override, self.typed)
        return {dotted(each): _distribution(each) for each in typed if each.is_sweep_override()}


def _optuna() -> Any:  # noqa: ANN401
    """Import Optuna, and silence it and what it uses: each job has its line already."""
    # It warns in the name of its callers.
    callers = r"hydra|trainer\.features\.sweeps"
    warnings.filterwarnings("ignore", module=rf"(optuna|alembic|sqlalchemy|cmaes|{callers})\b")
    try:
        optuna = import_module("optuna")
        import_module("optuna.storages.journal")
    except ImportError:
        remedy = "needs Optuna 4 or later; pip install '.[optuna]'"
        raise ConfigError(f"hydra/sweeper=optuna: {remedy}") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _made(key: str, settings: Mapping[str, Any] | None) -> Any:  # noqa: ANN401
    """Make a sampler or pruner."""
    _optuna()
    try:
        return instantiate(settings)
    except HydraException as error:
        text = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(clip(f"hydra.sweeper.{key}: {text}")) from None


def sweep_mode(config: RunConfig) -> Literal["min", "max"]:
    """Give which value of `sweep.metric` is better."""
    return mode_of("sweep.metric", config.sweep.metric, config.sweep.mode, "sweep.mode")


def live(study: Any, number: int) -> Any:  # noqa: ANN401
    """Give what writes to a trial of an id; Optuna's list has what reads it."""
    return _optuna().trial.Trial(study, number)


def _distribution(override: Override) -> Any:  # noqa: ANN401
    """Turn an override of several values into what Optuna draws from."""
    kinds, value = _optuna().distributions, override.value()
    low: Any
    high: Any
    more: dict[str, Any]
    if isinstance(value, IntervalSweep):
        low, high, more = value.start, value.end, {"log": "log" in value.tags}
    elif isinstance(value, RangeSweep) and value.step > 0:
        points: Any = [*value.range()]
        low, high, more = points[0], points[-1], {"step": value.step}
    else:
        # As they are typed, so that lists and mappings are choices too; a study wants one order.
        return kinds.CategoricalDistribution(sorted({*values_of(override)}))
    if isinstance(low, int) and isinstance(high, int):
        return kinds.IntDistribution(low, high, **more)
    return kinds.FloatDistribution(float(low), float(high), **more)
