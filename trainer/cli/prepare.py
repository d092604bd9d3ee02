"""From what was typed to jobs that Hydra may start: fresh, resumed, reading a run, or swept.

Every fault of every job is found here, before a folder is made or torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import open_dict

from trainer.cli import existing_runs
from trainer.cli.compose import Composer, Job
from trainer.cli.exit_messages import is_led
from trainer.cli.settings import (
    Groups,
    Told,
    dotted,
    is_of,
    jobs,
    parse,
    quote,
    read,
    renamed,
    repeated,
    tell_apart,
    text,
    value_of,
    values,
    without,
)
from trainer.config import recipes
from trainer.config.messages import clip
from trainer.config.messages import line as fault
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError, NoCheckpointError

READING = frozenset({"evaluate", "export"})
"""Commands that read a run that is there, and make no folder."""

_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"

_LOOKING = frozenset({"plan", "verify"})  # on a run as well, but into folders of their own


@final
@dataclass(frozen=True, kw_only=True)
class Ready:
    """A checked run in its place.

    Attributes:
        job: the run; its composed config holds the folder for Hydra.
        makes_folder: it writes a config of its own; not so where a run is only read.
        is_resumed: it goes on in a folder that is there.
        done: why there is nothing to do, or `None`.
        note: what is to be said before the run starts, or `None`.
    """

    job: Job
    makes_folder: bool = True
    is_resumed: bool = False
    done: str | None = None
    note: str | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A checked sweep.

    Attributes:
        ready: its jobs in order; `job.lines` are the overrides that Hydra will give each.
        lines: the overrides Hydra gets, several values in some of them.
        folder: the sweep folder.
        is_planned: its jobs are those that run; not so where a sweeper chooses as it goes.
    """

    ready: tuple[Ready, ...]
    lines: tuple[str, ...]
    folder: Path
    is_planned: bool


def prepare_run(lines: Sequence[str], composer: Composer) -> Ready:
    """Prepare one run from overrides as typed.

    Raises:
        ConfigError: one line per fault.
        NoCheckpointError: the run to go on with, or to read, is not there.
    """
    overrides, faults = _read_all(lines)
    # These are read, and taken out, before the others are told apart.
    faults += repeated(each for each in overrides if dotted(each) in ("run", "resume"))
    if value_of(overrides, "run") is not None and value_of(overrides, "resume") is not None:
        faults.append("run, resume: both name a run; keep run to read one, resume to go on")
    several = [override for override in overrides if override.is_sweep_override()]
    faults += map(_several, several)
    single = [override for override in overrides if override not in several]
    with composer.open(), _after(faults):
        return Preparation(composer, composer.groups(_search_path(overrides))).single(single)


def prepare_sweep(lines: Sequence[str], composer: Composer) -> Sweep:
    """Prepare every job of a sweep from overrides as typed.

    Raises:
        ConfigError: one line per fault, of whichever job.
    """
    overrides, faults = _read_all(lines)
    with composer.open(), _after(faults):
        return Preparation(composer, composer.groups(_search_path(overrides))).sweep(overrides)


def prepare_job(lines: Sequence[str], folder: Path, composer: Composer) -> RunConfig:
    """Check one job of a sweeper that chooses as it goes.

    Args:
        lines: its overrides.
        folder: of the job.
        composer: of the sweep.

    Raises:
        ConfigError: one line per fault.
    """
    overrides, faults = parse(lines)
    with composer.open(), _after(faults):
        job = composer.check(overrides, composer.groups(_search_path(overrides)))
        return _in_sweep(job, tuple(lines), folder, goes_on=False).job.config


@final
@dataclass(frozen=True)
class Preparation:
    """Prepares runs over one search path.

    Attributes:
        composer: open.
        groups: what is on the search path.
    """

    composer: Composer
    groups: Groups

    def single(self, overrides: Sequence[Override]) -> Ready:
        """Prepare one run.

        Args:
            overrides: one value each.

        Raises:
            ConfigError: one line per fault.
            NoCheckpointError: the run to go on with, or to read, is not there.
        """
        overrides = _at_checkpoint(overrides)
        command, named = _word(overrides, "command"), _word(overrides, "run")
        if command in READING and named is not None:
            return self._reading(overrides, named)
        key = "run" if command == "verify" and named is not None else "resume"
        resume = _word(overrides, key)
        # It begins where the run is, and in a folder of its own, as with `resume=`.
        overrides = [renamed(each, key, "resume") for each in overrides]
        run = self._to_resume(overrides, resume, key)
        if run is not None:
            with self._hinting(run, overrides):
                return self._resumed(overrides, run, keeps_folder=command not in _LOOKING)
        job = self.composer.check(without(overrides, "resume"), self.groups)
        begins_again = resume == existing_runs.AUTO and not existing_runs.can_go_on(job.folder)
        is_there = (job.folder / "config.yaml").exists() and not is_led(job.config)
        if is_there and not begins_again:
            raise ConfigError(
                clip(
                    f"hydra.run.dir={job.folder}: holds a run; resume={job.folder} goes on with it"
                )
            )
        return Ready(job=_pinned(job, job.folder))

    def sweep(self, overrides: Sequence[Override]) -> Sweep:
        """Prepare every job of a sweep.

        Raises:
            ConfigError: one line per fault, of whichever job.
        """
        resume = value_of(overrides, "resume")
        told = tell_apart(without(overrides, "resume"), self.groups)
        if resume not in (None, existing_runs.AUTO):
            raise ConfigError(
                f"resume={resume}: every job of a sweep has its own folder; use resume=auto",
                *told.faults,
            )
        if _word(overrides, "command") in READING or any(is_of(each, "run") for each in overrides):
            text = "-m: jobs of a sweep make runs and read none; leave -m out, once for each run"
            raise ConfigError(text, *told.faults)
        with _after(told.faults):
            checked = self._check_all(told)
        first = checked[0]
        is_planned = first.composed.hydra.sweeper._target_ == _BASIC_SWEEPER
        if resume == existing_runs.AUTO and not is_planned:
            raise ConfigError("resume=auto: this sweeper chooses its jobs anew; leave resume out")
        swept = (*told.choices, *told.value_lines(first.known))
        folder = first.sweep_folder
        if resume == existing_runs.AUTO:
            outputs = Path(first.config.outputs).absolute()
            folder = existing_runs.newest_sweep(outputs, swept) or folder
        named = jobs(swept, self.groups)
        ready = tuple(
            _in_sweep(job, tuple(mine), folder / str(number), goes_on=resume == existing_runs.AUTO)
            for number, (job, mine) in enumerate(zip(checked, named, strict=True))
        )
        subfolder = existing_runs.next_subfolder(
            *(job.job.folder for job in ready if job.is_resumed)
        )
        pinned = [line for line in told.hydra if not line.startswith("hydra.sweep.dir=")]
        pinned += [f"hydra.sweep.dir={quote(folder)}", f"hydra.output_subdir={subfolder}"]
        lines = (*pinned, *swept)
        return Sweep(ready=ready, lines=lines, folder=folder, is_planned=is_planned)

    def _check_all(self, told: Told) -> list[Job]:
        """Check every combination of swept values.

        Raises:
            ConfigError: all faults of all jobs.
        """
        hydra, _ = parse(told.hydra)
        checked: list[Job] = []
        faults: list[str] = []
        for lines in jobs([*told.choices, *told.value_lines(())], self.groups):
            overrides, _ = parse(lines)
            try:
                checked.append(self.composer.check([*hydra, *overrides], self.groups))
            except ConfigError as error:
                faults += error.faults
        if faults:
            raise ConfigError(*dict.fromkeys(faults))
        return checked

    def _to_resume(
        self, overrides: Sequence[Override], resume: str | None, key: str
    ) -> Path | None:
        """The run to go on with, as typed under a key; `None` for a new one."""
        if resume != existing_runs.AUTO:
            return None if resume is None else existing_runs.find_training(resume, key)
        try:
            outlook = self.composer.look_ahead(without(overrides, "resume"), self.groups)
        except ConfigError:
            return None  # the check of the new run will say all that is wrong
        if key == "run":
            return existing_runs.newest_to_read(outlook.outputs, outlook.name)
        if existing_runs.can_go_on(outlook.folder):
            return outlook.folder
        return existing_runs.newest(outlook.outputs, outlook.name)

    def _resumed(self, overrides: Sequence[Override], run: Path, *, keeps_folder: bool) -> Ready:
        """Prepare a run that goes on from another's state, in its folder or in one of its own."""
        old, is_begun = existing_runs.saved_overrides(run), existing_runs.has_checkpoint(run)
        # The same command as before, with `resume=auto`, may name the weights the run began with.
        is_same = is_begun and value_of(overrides, "resume") == existing_runs.AUTO
        begun = ("init", "step") if is_same and value_of(overrides, "init") is not None else ()
        asked = without(overrides, "resume", "hydra.run.dir", *begun)
        merged = existing_runs.merge(old, asked, self.groups)
        resume = [read(f"resume={quote(run)}")] if is_begun else []
        job = self.composer.check(
            [*merged, *resume],
            self.groups,
            replayed=_from(old, asked, merged),
            consented=existing_runs.consented(run),
        )
        existing_runs.refuse_another_step(run, job.config)
        if not keeps_folder:
            return Ready(job=_pinned(job, job.folder))
        if not is_begun:
            existing_runs.refuse_other_weights(run, job.config)
            note = f"{run} was stopped before its first step; it begins again"
            return Ready(job=_pinned(job, run, existing_runs.next_subfolder(run)), note=note)
        done = None
        if existing_runs.is_finished(run, job.config):
            clock = "steps" if job.config.total_epochs is None else "epochs"
            done = (
                f"{run} is done after step {existing_runs.noted_step(run)}; {clock}=N asks for more"
            )
        subfolder = existing_runs.next_subfolder(run)
        return Ready(job=_pinned(job, run, subfolder), is_resumed=True, done=done)

    @contextmanager
    def _hinting(self, run: Path, typed: Sequence[Override]) -> Iterator[None]:
        """Where a run's options cannot be found, say only which folder it had them from.

        Yields:
            Nothing.

        Raises:
            ConfigError: as raised inside, with the hint.
        """
        try:
            yield
        except ConfigError as error:
            own = existing_runs.own_folder(run)
            if own is None or self.composer.own_folder is not None:
                raise
            hint = f"--config-dir: the run was started with --config-dir={own}; give it again"
            raise ConfigError(*existing_runs.about(error.faults, typed), clip(hint)) from None

    def _reading(self, overrides: Sequence[Override], named: str) -> Ready:
        """Prepare a command that reads a run which is there."""
        if named == existing_runs.AUTO:
            outlook = self.composer.look_ahead(without(overrides, "run"), self.groups)
            named = str(existing_runs.newest_to_read(outlook.outputs, outlook.name))
        run = existing_runs.find(named, "run")
        with self._hinting(run, overrides):
            asked, old = (
                without(overrides, "run", "hydra.run.dir"),
                existing_runs.saved_overrides(run),
            )
            merged = existing_runs.merge(old, asked, self.groups)
            job = self.composer.check(
                [*merged, read(f"run={quote(run)}")],
                self.groups,
                replayed=_from(old, asked, merged),
                consented=existing_runs.consented(run),
            )
            return Ready(job=_pinned(job, run, None), makes_folder=False)


@contextmanager
def _after(faults: Sequence[str]) -> Iterator[None]:
    """Add the faults found earlier to those found inside.

    A choice of option that does not exist makes every word about its group moot.

    Yields:
        Nothing.

    Raises:
        ConfigError: there are any.
        NoCheckpointError: as raised inside, where there are none.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*dict.fromkeys([*faults, *error.faults])) from None
    except NoCheckpointError as error:
        if faults:
            raise ConfigError(*dict.fromkeys([*faults, str(error)])) from None
        raise
    if faults:
        raise ConfigError(*dict.fromkeys(faults))


def _read_all(lines: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Parse overrides, and find the recipes that are given as files."""
    overrides, faults = parse(lines)
    placed: list[Override] = []
    for override in overrides:
        if override.key_or_group != recipes.GROUP or override.is_delete():
            placed.append(override)
            continue
        try:
            placed.append(read(f"{recipes.GROUP}={_place_recipes(override)}"))
        except ConfigError as error:
            faults += error.faults
    return placed, faults


def _place_recipes(override: Override) -> str:
    """Write the value of `recipe=` with absolute paths of files, which mean the same later."""
    placed = []
    for value in values(override, Groups({})) or [text(override)]:
        parsed = read(f"x={value}").value()
        listed = parsed if isinstance(parsed, list) else [parsed]
        if all(isinstance(name, str) for name in listed):
            names = [quote(recipes.locate(str(name))) for name in listed]
            placed.append(f"[{','.join(names)}]" if isinstance(parsed, list) else names[0])
        else:
            placed.append(value)
    return ",".join(placed)


def _search_path(overrides: Sequence[Override]) -> list[str]:
    lines = (override.input_line for override in overrides)
    return [line for line in lines if line is not None and "hydra.searchpath=" in line]


def _in_sweep(job: Job, lines: tuple[str, ...], folder: Path, *, goes_on: bool) -> Ready:
    """Place a checked job in the sweep folder, where it may have been before."""
    is_resumed = goes_on and existing_runs.has_checkpoint(folder)
    done = None
    config = job.config
    if is_resumed:
        existing_runs.refuse_another_step(folder, job.config)
        config = config.model_copy(update={"resume": str(folder)})
        done = f"{folder} is done" if existing_runs.is_finished(folder, config) else None
    if config.wandb.group is None:
        wandb = config.wandb.model_copy(update={"group": folder.parent.name})
        config = config.model_copy(update={"wandb": wandb})
    placed = replace(job, config=config, folder=folder, lines=lines)
    return Ready(job=placed, is_resumed=is_resumed, done=done)


def _from(
    old: Sequence[Override], asked: Sequence[Override], merged: Sequence[Override]
) -> list[Override]:
    """Tell which overrides are a run's alone; what is typed again is the user's own."""
    typed = {dotted(override) for override in asked}
    return [o for o in merged if dotted(o) not in typed and any(o is each for each in old)]


def _at_checkpoint(overrides: Sequence[Override]) -> Sequence[Override]:
    """Read `run=RUN/checkpoints/step-N` as `run=RUN step=N`.

    Raises:
        ConfigError: `step` is typed as well.
    """
    named = _word(overrides, "run")
    found = None if named is None else existing_runs.checkpoint_of(named)
    if found is None:
        return overrides
    if (step := value_of(overrides, "step")) is not None:
        raise ConfigError(fault("step", step, f"run={named} is a checkpoint; leave step out"))
    run, number = found
    return [*without(overrides, "run"), read(f"run={quote(run)}"), read(f"step={number}")]


def _word(overrides: Sequence[Override], key: str) -> str | None:
    """The value of a key that takes a word.

    Raises:
        ConfigError: it is something else.
    """
    value = value_of(overrides, key)
    if value is None or (isinstance(value, str) and value):
        return value
    kind = "the name of a command" if key == "command" else "a run folder, as in ./1, or auto"
    raise ConfigError(fault(key, value, f"must be {kind}"))


def _pinned(job: Job, folder: Path, subfolder: str | None = existing_runs.SUBFOLDER) -> Job:
    """Fix for Hydra the folder, which holds the time of day, and where its records go."""
    hydra = job.composed.hydra
    with open_dict(hydra):
        hydra.mode = RunMode.RUN
        hydra.run.dir = str(folder)
        hydra.overrides.task = [line for line in job.lines if not read(line).is_hydra_override()]
        if subfolder != existing_runs.SUBFOLDER:
            hydra.output_subdir = subfolder
    return replace(job, folder=folder)


def _several(override: Override) -> str:
    line, (key, _, value) = override.input_line, (override.input_line or "").partition("=")
    return clip(f"{line}: several values are a sweep, which takes -m; as a list: {key}=[{value}]")
