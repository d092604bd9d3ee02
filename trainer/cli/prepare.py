"""Turn what was typed into a checked job: fresh, resumed, or reading another run.

Every fault is found here, before a folder is made or torch is imported.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path

from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import open_dict

from trainer.cli import remote, saved_runs
from trainer.cli.compose import Composer, Job
from trainer.cli.exit_messages import print_notes
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
from trainer.config.command_words import OF_OTHER_DATA, READING, text_faults, text_keys
from trainer.config.messages import clip, lookup
from trainer.config.run_config import to_plain
from trainer.core.errors import ConfigError, NoCheckpointError, TrainError
from trainer.core.format import expanded, shown_path
from trainer.core.run_folder import AUTO, RunFolder, step_of
from trainer.launch.membership import global_rank

_FOLDER = "hydra.run.dir"


def prepare_run(lines: Sequence[str], composer: Composer, faults: Sequence[str] = ()) -> Job:
    """Prepare one run from overrides as typed, of which some faults were found before."""
    lines, texts = _without_texts(lines)
    parsed, unread = parse(lines, is_typed=True)
    faults, overrides = [*faults, *unread], list[Override]()
    for override in parsed:
        if override.is_sweep_override():
            key, _, value = (override.input_line or "").partition("=")
            remedy = f"several values are a sweep, which takes -m; as a list: {key}=[{value}]"
            faults.append(clip(f"{key}={value}: {remedy}"))
        else:
            overrides.append(override)
    if {"run", "resume"} <= {*map(dotted, overrides)}:
        faults.append("run, resume: both name a run; type run= to read one, resume= to go on")
    faults += text_faults(texts, word_of(parsed, "command"))
    with composer.open(overrides):
        try:
            job = _prepare(_without_checkpoints(overrides), composer)
        except TrainError as error:
            if faults:
                raise ConfigError(*distinct([*faults, *str(error).split("\n")])) from error
            raise
    if faults:
        raise ConfigError(*faults)
    return replace(job, config=job.config.model_copy(update=texts))


def _without_texts(lines: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Part overrides from the texts among them, which no grammar reads.

    From Python one is `++key=`, quoted, and stays.
    """
    rest, texts, keys = list[str](), dict[str, str](), text_keys()
    for each in lines:
        key, equals, text = each.partition("=")
        if not equals or key not in keys:
            rest.append(each)
            continue
        if key in texts:
            print_notes([f"{key}: typed several times; the last one counts"])
        texts[key] = text
    return rest, texts


def _prepare(overrides: Sequence[Override], composer: Composer) -> Job:
    """Prepare a run that begins, goes on, forks or is read."""
    named, resume = word_of(overrides, "run"), word_of(overrides, "resume")
    command = word_of(overrides, "command")
    if command in OF_OTHER_DATA and named is None:
        # Without one nothing is known of the data that are named.
        text = "needs a run: type run=RUN, or run=auto for the newest"
        raise ConfigError(f"run: {command} {text}")
    # `plan run=RUN` and `verify run=RUN` begin where the run is, as with resume=RUN.
    key = "resume"
    if named is not None and command in (*READING, "plan", "verify"):
        key = "run"
    if word_of(overrides, key) is None:
        return _place_new(composer.check(overrides))
    rest = without(overrides, key)
    run = _find(rest, word_of(overrides, key) or "", key, composer)
    if run is None:
        job = composer.check(rest)
        called, hint = f"named {job.config.name}", ""
        if job.config.name is None:
            called, hint = "without a name", " (type name= for one that has one)"
        there = f"no run {called} below {job.config.outputs} can be resumed{hint}"
        note = f"resume=auto: {there}; a new one begins\n"
        # Not as `_place_new` does, for the folder may hold records.
        return replace(_place(job, job.folder), note=job.note + note)
    if key == "run" and command in READING:
        if command in OF_OTHER_DATA:
            _refuse_own_data(command, run, {*map(dotted, rest)})
        job = _check_over(run, rest, composer, key)
        return replace(_place(job, run.path, None), makes_folder=False)
    step = word_of(rest, "step")
    rest = saved_runs.past_steps(run, step, rest)
    if command in (None, "train") and step not in (None, "last"):
        number = saved_runs.checkpoint_of(run, step)
        job = _check_over(run, rest, composer, "resume")
        note = f"a new run from step {number} of {shown_path(run.path)}\n"
        return replace(_place_new(job), forked=(run.path, number), note=job.note + note)
    goes_on = bool(run.steps())
    # The same command as before, with `resume=auto`, may name the weights the run began with.
    if goes_on and resume == AUTO and word_of(rest, "init") is not None:
        rest = without(rest, "init", "step")
    key_of_run = "resume" if goes_on else None
    job = _check_over(run, rest, composer, key_of_run)
    # These look on a run as well, but from folders of their own.
    return _place_new(job) if command in ("plan", "verify") else _go_on(run, job)


def _refuse_own_data(command: str, run: RunFolder, typed: Set[str]) -> None:
    """Refuse a command on all of other data than the run's where none, or a share, is typed."""
    if "data.holdout" in typed:
        raise ConfigError(f"data.holdout: {command} reads all of the data; leave it out")
    is_named = not typed.isdisjoint({"data", "data._target_", "data.path"})
    # Data without a path are others by any of their settings.
    if lookup(run.config(), "data.path") is None:
        is_named |= any(key.startswith("data.") for key in typed)
    if not is_named:
        raise ConfigError(f"data.path: {command} needs data: type data.path=FILE")


def _without_checkpoints(overrides: Sequence[Override]) -> list[Override]:
    """Read a checkpoint's folder under `run` or `resume` as the run and the step that it is of."""
    found = list(overrides)
    for key in ("run", "resume"):
        path = expanded(word_of(overrides, key) or ".")
        step = step_of(path) if path.parent.name == RunFolder.CHECKPOINTS else None
        if step is not None and word_of(overrides, "step") is None:
            lines = f"{key}={quote(path.parent.parent)}", f"step={step}"
            found = [*without(found, key), *map(read_override, lines)]
    return found


def _find(
    overrides: Sequence[Override], typed: str, key: str, composer: Composer
) -> RunFolder | None:
    command = word_of(overrides, "command")
    if typed != AUTO:
        remote.bring(expanded(typed))
        is_read = command in READING and key == "run"
        outputs = expanded(word_of(overrides, "outputs") or "outputs")
        return saved_runs.find(typed, key, outputs, to_train=not is_read)
    # Composed to know where a run would go
    try:
        parts = classify(overrides, composer.groups)
        full = composer.compose([*parts.hydra, *parts.choices], parts.values)
    except ConfigError:
        # The check of the new run names all that is wrong.
        return None
    outputs = expanded(str(full.outputs)).absolute()
    answered = remote.bring(outputs, whole=False)
    folder = Path(str(full.hydra.run.dir)).absolute()
    name = None if full.name is None else str(full.name)
    if key == "run":
        if (run := saved_runs.newest(outputs, name, is_read=True)) is None:
            called = "run"
            if name is not None:
                called += f" named {name}"
            raise NoCheckpointError(f"run=auto: no {called} below {outputs} has a checkpoint")
    elif saved_runs.can_go_on(RunFolder(folder)):
        run = RunFolder(folder)
    elif word_of(overrides, _FOLDER):
        # No other folder is meant than the one that was typed.
        run = None
    else:
        run = saved_runs.newest(outputs, name)
    if run is None and not answered:
        raise NoCheckpointError(f"{key}=auto: the store is away; leave it out to begin a run")
    if run is not None:
        remote.bring(run.path)
        consent.refuse_odd_files(run.path)
    return run


def _check_over(
    run: RunFolder, typed: Sequence[Override], composer: Composer, key: str | None = None
) -> Job:
    """Check a run's own overrides, with what is typed now on top, and the run under a key."""
    saved = saved_runs.saved_overrides(run, composer.own_folder)
    replayed = saved_runs.staying(saved, typed, composer.groups)
    overrides = [*replayed, *typed]
    if key is not None:
        overrides.append(read_override(f"{key}={quote(run)}"))
    job = composer.check(overrides, replayed=replayed, own_classes=consent.own_classes(run))
    saved_runs.refuse_changes(run, job.config, {*map(dotted, typed)})
    return job


def _go_on(run: RunFolder, job: Job) -> Job:
    """Prepare a training run that goes on in its folder, or begins again there."""
    job, saved = _place(job, run.path, RunFolder.RESUMED), run.config()
    if not run.steps():
        before, step = saved.get("init"), saved.get("step", "last")
        # Neither a run folder nor a recipe may say which weights to read.
        if before is not None and (job.config.init is None or job.config.step != step):
            typed = f"init={before}"
            if step != "last":
                typed += f" step={step}"
            fault = f"init: the saved run started from {before}; type {typed} again"
            raise ConfigError(clip(fault))
        note = f"{shown_path(run.path)} has no checkpoint: it begins again, with its settings\n"
        return replace(job, note=job.note + note)
    if saved_runs.is_finished(run, job.config):
        clock = "steps" if job.config.total_epochs is None else "epochs"
        done = f"{run} is done after step {run.last_step()}; {clock}=N trains further"
        return replace(job, done=done)
    stopped = run.record(RunFolder.RESULT).get("stopped")
    # With the same rule it would stop again, without a step; without one something else stopped it.
    rule = to_plain(job.config)["stop"]
    would_stop = rule["metric"] is not None and rule == saved.get("stop")
    if run.status().get("state") == saved_runs.COMPLETED and stopped and would_stop:
        return replace(job, done=f"{run} is done: {stopped}; stop.metric=null trains further")
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
        task = list[str]()
        for line in job.lines:
            if not read_override(line).is_hydra_override():
                task.append(line.lstrip("+"))
        hydra.overrides.task = task
        if subfolder != RunFolder.HYDRA:
            hydra.output_subdir = subfolder
    return replace(job, folder=folder)
