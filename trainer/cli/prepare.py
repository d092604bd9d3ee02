"""Turn what was typed into a checked job: fresh, resumed, or reading another run.

Every fault is found here, before a folder is made or torch is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import open_dict

from trainer.cli import saved_runs
from trainer.cli.compose import Composer, Job
from trainer.cli.overrides import (
    classify,
    distinct,
    dotted,
    parse,
    quote,
    read_override,
    without,
    word_of,
)
from trainer.config import consent
from trainer.config.components import EVAL_SETS
from trainer.config.messages import clip
from trainer.config.run_config import READING
from trainer.core.errors import ConfigError, NoCheckpointError, TrainError
from trainer.core.format import shown_path
from trainer.core.run_folder import RunFolder, step_of
from trainer.launch.membership import global_rank

_FOLDER = "hydra.run.dir"


def prepare_run(lines: Sequence[str], composer: Composer, faults: Sequence[str] = ()) -> Job:
    """Prepare one run from overrides as typed, of which some faults were found before."""
    overrides, unread = parse(lines, is_typed=True)
    swept = [override for override in overrides if override.is_sweep_override()]
    faults = [*faults, *unread, *map(_needs_flag, swept)]
    overrides = [override for override in overrides if override not in swept]
    overrides = _without_checkpoints(overrides)
    if {"run", "resume"} <= {*map(dotted, overrides)}:
        faults.append("run, resume: both name a run; type run= to read one, resume= to go on")
    with composer.open(overrides):
        try:
            job = _prepare(overrides, composer)
        except TrainError as error:
            if faults:
                raise ConfigError(*distinct([*faults, *str(error).split("\n")])) from error
            raise
    if faults:
        raise ConfigError(*faults)
    return job


def _prepare(overrides: Sequence[Override], composer: Composer) -> Job:
    """Prepare a run that begins, goes on, forks or is read."""
    named, resume = word_of(overrides, "run"), word_of(overrides, "resume")
    command = word_of(overrides, "command")
    # `plan run=RUN` and `verify run=RUN` begin where the run is, as with resume=RUN.
    key = "run" if named is not None and command in (*READING, "plan", "verify") else "resume"
    if word_of(overrides, key) is None:
        return _place_new(composer.check(overrides))
    rest = without(overrides, key)
    run = _find(rest, word_of(overrides, key) or "", key, composer)
    if run is None:
        return _begin_instead(composer.check(rest))
    if key == "run" and command in READING:
        job = _check_over(run, rest, composer, key)
        return replace(_place(job, run.path, None), makes_folder=False)
    if command in (None, "train") and word_of(rest, "step") not in (None, "last"):
        return _fork(run, rest, composer)
    goes_on = bool(run.steps())
    # The same command as before, with `resume=auto`, may name the weights the run began with.
    if goes_on and resume == saved_runs.AUTO and word_of(rest, "init") is not None:
        rest = without(rest, "init", "step")
    job = _check_over(run, rest, composer, "resume" if goes_on else None)
    # `plan` and `verify` look on a run as well, but from folders of their own.
    return _place_new(job) if command in ("plan", "verify") else _go_on(run, job)


def _needs_flag(swept: Override) -> str:
    key, _, value = (swept.input_line or "").partition("=")
    remedy = f"several values are a sweep, which takes -m; as a list: {key}=[{value}]"
    return clip(f"{key}={value}: {remedy}")


def _without_checkpoints(overrides: Sequence[Override]) -> list[Override]:
    """Read a checkpoint's folder under `run` or `resume` as the run and the step that it is of."""
    found = list(overrides)
    for key in ("run", "resume"):
        path = Path(word_of(overrides, key) or ".")
        step = step_of(path) if path.parent.name == RunFolder.CHECKPOINTS else None
        if step is not None and word_of(overrides, "step") is None:
            lines = f"{key}={quote(path.parent.parent)}", f"step={step}"
            found = [*without(found, key), *map(read_override, lines)]
    return found


def _fork(run: RunFolder, overrides: Sequence[Override], composer: Composer) -> Job:
    """Prepare a new run that goes on from one checkpoint of another."""
    step = saved_runs.checkpoint_of(run, word_of(overrides, "step") or "")
    job = _check_over(run, overrides, composer, "resume")
    note = f"a new run from step {step} of {shown_path(run.path)}\n"
    return replace(_place_new(job), forked=(run.path, step), note=job.note + note)


def _begin_instead(job: Job) -> Job:
    """Prepare a run that begins since `resume=auto` found none; its folder may hold records."""
    name = job.config.name
    called = "without a name" if name is None else f"named {name}"
    hint = " (type name= for one that has one)" if name is None else ""
    there = f"no run {called} below {job.config.outputs} can be resumed{hint}"
    note = f"resume=auto: {there}; a new one begins\n"
    return replace(_place(job, job.folder), note=job.note + note)


def _find(
    overrides: Sequence[Override], typed: str, key: str, composer: Composer
) -> RunFolder | None:
    """Find the run that is typed under a key; `None` for a new one."""
    command = word_of(overrides, "command")
    if typed != saved_runs.AUTO:
        is_read = command in READING and key == "run"
        outputs = Path(word_of(overrides, "outputs") or "outputs")
        return saved_runs.find(typed, key, outputs, to_train=not is_read)
    try:  # where a run would go
        parts = classify(overrides, composer.groups)
        full = composer.compose([*parts.hydra, *parts.choices], parts.values)
    except ConfigError:
        return None  # the check of the new run names all that is wrong
    outputs, folder = (Path(str(path)).absolute() for path in (full.outputs, full.hydra.run.dir))
    name = None if full.name is None else str(full.name)
    if key == "run":
        if (run := saved_runs.newest(outputs, name, is_read=True)) is None:
            called = "run" if name is None else f"run named {name}"
            raise NoCheckpointError(f"run=auto: no {called} below {outputs} has a checkpoint")
    elif saved_runs.can_go_on(RunFolder(folder)):
        run = RunFolder(folder)
    else:
        run = None if word_of(overrides, _FOLDER) else saved_runs.newest(outputs, name)
    if run is not None:
        consent.refuse_odd_files(run.path)
    return run


def _check_over(
    run: RunFolder, typed: Sequence[Override], composer: Composer, key: str | None = None
) -> Job:
    """Check a run's own overrides, with what is typed now on top, and the run under a key."""
    saved = saved_runs.saved_overrides(run, composer.own_folder)
    for size, other in (("accum.micro", "accum.steps"), ("accum.steps", "accum.micro")):
        if word_of(typed, size) is not None and word_of(saved, size) is None:
            saved = without(saved, other)  # batch.global gives it
    if word_of(typed, "data.holdout") == "all":  # of other data
        sets = [key for key in map(dotted, saved) if key.startswith(EVAL_SETS)]
        saved = without(saved, "eval.samples", "data.eval_path", *sets)
    merged = saved_runs.merge(saved, typed, composer.groups)
    job = composer.check(
        [*merged, *([] if key is None else [read_override(f"{key}={quote(run)}")])],
        replayed=[override for override in merged if override not in typed],
        own_classes=consent.own_classes(run),
    )
    saved_runs.refuse_changes(run, job.config)
    return job


def _go_on(run: RunFolder, job: Job) -> Job:
    """Prepare a training run that goes on in its folder, or begins again there."""
    job = _place(job, run.path, RunFolder.RESUMED)
    if not run.steps():
        saved_runs.refuse_other_weights(run, job.config)
        note = f"{shown_path(run.path)} has no checkpoint: it begins again, with its settings\n"
        return replace(job, note=job.note + note)
    if saved_runs.is_finished(run, job.config):
        clock = "steps" if job.config.total_epochs is None else "epochs"
        done = f"{run} is done after step {run.last_step()}; {clock}=N trains further"
        return replace(job, done=done)
    if why := saved_runs.stopped(run, job.config):
        return replace(job, done=f"{run} is done: {why}; stop.metric=null trains further")
    return job


def _place_new(job: Job) -> Job:
    """Give a run a folder of its own; one that is typed may have no run."""
    # Under torchrun the first rank makes the folder, and other ranks may find it there.
    if (job.folder / RunFolder.CONFIG).exists() and global_rank() == 0:
        remedy = f"resume={job.folder} goes on with it"
        raise ConfigError(clip(f"{_FOLDER}={job.folder}: holds a run; {remedy}"))
    return _place(job, job.folder)


def _place(job: Job, folder: Path, subfolder: str | None = RunFolder.HYDRA) -> Job:
    """Fix for Hydra the folder, which holds the time of day, and where its records go."""
    typed = word_of(map(read_override, job.lines), _FOLDER)
    if typed is not None and folder.resolve() != job.folder.resolve():
        text = f"{_FOLDER}={typed}: {shown_path(folder)} has a folder of its own; leave it out"
        raise ConfigError(clip(text))
    hydra = job.composed.hydra
    with open_dict(hydra):
        hydra.mode = RunMode.RUN
        hydra.run.dir = str(folder)
        lines = [line for line in job.lines if not read_override(line).is_hydra_override()]
        hydra.overrides.task = [line.lstrip("+") for line in lines]
        if subfolder != RunFolder.HYDRA:
            hydra.output_subdir = subfolder
    return replace(job, folder=folder)
