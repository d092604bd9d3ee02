"""Turn what was typed into a run that Hydra may start: fresh, resumed, or reading another.

Every fault is found here, before a folder is made or torch is imported.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import open_dict

from trainer.cli import saved_runs
from trainer.cli.compose import CheckedRun, Composer
from trainer.cli.exit_messages import is_follower
from trainer.cli.overrides import (
    ConfigGroups,
    classify,
    dotted,
    is_of,
    parse,
    quote,
    read,
    repeated,
    text,
    value_of,
    values_of,
    without,
)
from trainer.config import recipes
from trainer.config.messages import clip
from trainer.config.messages import line as fault
from trainer.core.errors import ConfigError, NoCheckpointError

READING = frozenset({"evaluate", "export"})
"""Commands that read a run that is there, and make no folder."""


@final
@dataclass(frozen=True, kw_only=True)
class Ready:
    """A checked run in its place.

    Attributes:
        job: the run; its composed config holds the folder for Hydra.
        makes_folder: it writes a config of its own; not so where a run is only read.
        is_resumed: it goes on in a folder that is there.
        done: why there is nothing to do, or `None`.
        note: what to print before the run starts.
    """

    job: CheckedRun
    makes_folder: bool = True
    is_resumed: bool = False
    done: str | None = None
    note: str = ""


def prepare_run(lines: Sequence[str], composer: Composer) -> Ready:
    """Prepare one run from overrides as typed.

    Raises:
        ConfigError: one line per fault.
        NoCheckpointError: the run to go on with, or to read, is not there.
    """
    overrides, faults = parse_typed(lines)
    # These are read, and taken out, before the others are classified.
    faults += repeated(each for each in overrides if is_of(each, "run", "resume"))
    if value_of(overrides, "run") is not None and value_of(overrides, "resume") is not None:
        faults.append("run, resume: both name a run; type run= to read one, resume= to go on")
    for line in (each.input_line or "" for each in overrides if each.is_sweep_override()):
        key, _, value = line.partition("=")
        several = f"{line}: several values are a sweep, which takes -m; as a list: {key}=[{value}]"
        faults.append(clip(several))
    single = [override for override in overrides if not override.is_sweep_override()]
    with composer.open(), after(faults):
        return Preparation(composer, composer.groups(search_path(overrides))).single(single)


@final
@dataclass(frozen=True)
class Preparation:
    """Prepares runs over one search path.

    Attributes:
        composer: open.
        groups: what is on the search path.
    """

    composer: Composer
    groups: ConfigGroups

    def single(self, overrides: Sequence[Override]) -> Ready:
        """Prepare one run.

        Args:
            overrides: one value each.

        Raises:
            ConfigError: one line per fault.
            NoCheckpointError: the run to go on with, or to read, is not there.
        """
        overrides = _split_checkpoint(overrides)
        command, named = word_of(overrides, "command"), word_of(overrides, "run")
        if command in READING and named is not None:
            return self._reading(without(overrides, "run"), named)
        # `verify run=RUN` begins where the run is, as `verify resume=RUN` does.
        key = "run" if command == "verify" and named is not None else "resume"
        typed, rest = word_of(overrides, key), without(overrides, key)
        run = self._find_training(rest, typed, key)
        if run is not None:
            job = self._replayed(run, rest, typed)
            # `plan` and `verify` look on a run as well, but from folders of their own.
            is_own = command in ("plan", "verify")
            return Ready(job=_place(job, job.folder)) if is_own else _goes_on(run, job)
        job = self.composer.check(rest, self.groups)
        begins_again = typed == saved_runs.AUTO and not saved_runs.can_go_on(job.folder)
        is_there = (job.folder / "config.yaml").exists() and not is_follower()
        if is_there and not begins_again:
            remedy = f"resume={job.folder} goes on with it"
            raise ConfigError(clip(f"hydra.run.dir={job.folder}: holds a run; {remedy}"))
        return Ready(job=_place(job, job.folder))

    def _look_ahead(self, overrides: Sequence[Override]) -> tuple[Path, Path, str | None]:
        """See where a run would go: its folder, its outputs, its name.

        Raises:
            ConfigError: it cannot even be composed.
        """
        parts = classify(overrides, self.groups)
        full = self.composer.compose([*parts.hydra, *parts.choices], parts.values)
        name = None if full.name is None else str(full.name)
        return Path(str(full.hydra.run.dir)).absolute(), Path(str(full.outputs)).absolute(), name

    def _find_training(
        self, overrides: Sequence[Override], typed: str | None, key: str
    ) -> Path | None:
        """The run to go on with, as typed under a key; `None` for a new one."""
        if typed != saved_runs.AUTO:
            return None if typed is None else saved_runs.find_training(typed, key)
        try:
            folder, outputs, name = self._look_ahead(overrides)
        except ConfigError:
            return None  # the check of the new run names all that is wrong
        if key == "run":
            return saved_runs.newest_to_read(outputs, name)
        return folder if saved_runs.can_go_on(folder) else saved_runs.newest(outputs, name)

    def _replayed(self, run: Path, overrides: Sequence[Override], typed: str | None) -> CheckedRun:
        """Check what goes on from a run: its own overrides, with what is typed now on top.

        Raises:
            ConfigError: one line per fault.
        """
        is_begun = saved_runs.has_checkpoint(run)
        # The same command as before, with `resume=auto`, may name the weights the run began with.
        is_same = is_begun and typed == saved_runs.AUTO and value_of(overrides, "init") is not None
        rest = without(overrides, *(("init", "step") if is_same else ()))
        resume = [read(f"resume={quote(run)}")] if is_begun else []
        job = self._over_saved(run, rest, resume)
        saved_runs.refuse_another_step(run, job.config)
        return job

    def _over_saved(
        self, run: Path, overrides: Sequence[Override], more: Sequence[Override]
    ) -> CheckedRun:
        asked, old = without(overrides, "hydra.run.dir"), saved_runs.saved_overrides(run)
        typed = {dotted(override) for override in asked}
        merged = saved_runs.merge(old, asked, self.groups)
        return self.composer.check(
            [*merged, *more],
            self.groups,
            replayed=[override for override in merged if dotted(override) not in typed],
            signed=saved_runs.signed_classes(run),
        )

    def _reading(self, overrides: Sequence[Override], named: str) -> Ready:
        """Prepare a command that reads a run which is there."""
        if named == saved_runs.AUTO:
            _, outputs, name = self._look_ahead(overrides)
            named = str(saved_runs.newest_to_read(outputs, name))
        run = saved_runs.find(named, "run")
        job = self._over_saved(run, overrides, [read(f"run={quote(run)}")])
        return Ready(job=_place(job, run, None), makes_folder=False)


def _goes_on(run: Path, job: CheckedRun) -> Ready:
    """Prepare a training run that goes on in its folder, or begins again there."""
    job = _place(job, run, saved_runs.next_subfolder(run))
    if not saved_runs.has_checkpoint(run):
        saved_runs.refuse_other_weights(run, job.config)
        note = f"{run} was stopped before its first step; it begins again"
        return Ready(job=job, note=note)
    done = None
    if saved_runs.is_finished(run, job.config):
        clock = "steps" if job.config.total_epochs is None else "epochs"
        done = f"{run} is done after step {saved_runs.last_step(run)}; {clock}=N asks for more"
    return Ready(job=job, is_resumed=True, done=done)


@contextmanager
def after(faults: Sequence[str]) -> Iterator[None]:
    """Add the faults found earlier to those found inside.

    Yields:
        Nothing.

    Raises:
        ConfigError: there are any.
        NoCheckpointError: as raised inside, where there are none.
        OSError: as raised inside; a path that is too long is a ConfigError.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*dict.fromkeys([*faults, *error.faults])) from None
    except NoCheckpointError as error:
        if faults:
            raise ConfigError(*faults, str(error)) from None
        raise
    except RecursionError:
        raise ConfigError(*faults, "a value nests deeper than Python can read") from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise ConfigError(*faults, clip(f"{error.filename}: no path is so long")) from None
    if faults:
        raise ConfigError(*dict.fromkeys(faults))


def parse_typed(lines: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Parse overrides; recipes that are files get absolute paths, which mean the same later.

    Returns:
        What could be read, and one fault for each that could not, or is no file.
    """
    overrides, faults = parse(lines)
    placed: list[Override] = []
    for override in overrides:
        if override.key_or_group != recipes.GROUP or override.is_delete():
            placed.append(override)
            continue
        try:
            values = values_of(override, ConfigGroups({})) or [text(override)]
            placed.append(read(f"{recipes.GROUP}={','.join(map(_place_recipe, values))}"))
        except ConfigError as error:
            faults += error.faults
        except OSError as error:  # a path that is too long
            faults.append(clip(f"{override.input_line}: {error.strerror}"))
    return placed, faults


def _place_recipe(value: str) -> str:
    parsed = read(f"x={value}").value()
    listed = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(name, str) for name in listed):
        return value
    names = [quote(recipes.locate(str(name))) for name in listed]
    return f"[{','.join(names)}]" if isinstance(parsed, list) else names[0]


def search_path(overrides: Sequence[Override]) -> list[str]:
    """Give what was typed of `hydra.searchpath`."""
    lines = (override.input_line or "" for override in overrides)
    return [line for line in lines if "hydra.searchpath=" in line]


def _split_checkpoint(overrides: Sequence[Override]) -> Sequence[Override]:
    """Read `run=RUN/checkpoints/step-N` as `run=RUN step=N`.

    Raises:
        ConfigError: `step` is typed as well.
    """
    named = word_of(overrides, "run")
    path = Path(named or "").expanduser().absolute()
    number = path.name.removeprefix("step-")
    is_checkpoint = path.parent.name == "checkpoints" and path.name == f"step-{number}"
    if not is_checkpoint or not number.isdecimal():
        return overrides
    if (step := value_of(overrides, "step")) is not None:
        raise ConfigError(fault("step", step, f"run={named} is a checkpoint; leave step out"))
    run = path.parent.parent
    return [*without(overrides, "run"), read(f"run={quote(run)}"), read(f"step={int(number)}")]


def word_of(overrides: Sequence[Override], key: str) -> str | None:
    """The value of a key that takes a word.

    Raises:
        ConfigError: it is something else.
    """
    value = value_of(overrides, key)
    if value is None or (isinstance(value, str) and value):
        return value
    kind = "the name of a command" if key == "command" else "a run folder, as in ./1, or auto"
    raise ConfigError(fault(key, value, f"must be {kind}"))


def _place(
    job: CheckedRun, folder: Path, subfolder: str | None = saved_runs.SUBFOLDER
) -> CheckedRun:
    """Fix for Hydra the folder, which holds the time of day, and where its records go."""
    hydra = job.composed.hydra
    with open_dict(hydra):
        hydra.mode = RunMode.RUN
        hydra.run.dir = str(folder)
        hydra.overrides.task = [line for line in job.lines if not read(line).is_hydra_override()]
        if subfolder != saved_runs.SUBFOLDER:
            hydra.output_subdir = subfolder
    return replace(job, folder=folder)
