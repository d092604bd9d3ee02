"""Find runs on disk, and say whether one can go on, and as what is asked for now.

A run folder may come from somebody else. What is read from it is settings and nothing more: no
setting of Hydra, no trust, no class that the user did not name themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override

from trainer.cli.overrides import ConfigGroups, dotted, parse, read_override, without
from trainer.cli.run_names import called, unknown_run
from trainer.config import run_config, trackers
from trainer.config.amounts import range_texts, step_ranges
from trainer.config.command_words import OF_OTHER_DATA, READING
from trainer.config.components import EVAL_SETS
from trainer.config.consent import acting, refuse_odd_files
from trainer.config.data_sets import OF_OWN_DATA
from trainer.config.messages import ancestors, first_of, line, lookup, one_line
from trainer.config.validate import from_plain
from trainer.core import durable
from trainer.core.errors import ConfigError, NoCheckpointError
from trainer.core.format import expanded
from trainer.core.run_folder import UNREADABLE, RunFolder, runs_below

COMPLETED = "completed"
PREEMPTED = "preempted"
SKIPS = "data.skip_steps"

_CLOCKS = frozenset({"steps", "epochs"})


def find(typed: str, key: str, outputs: Path, *, to_train: bool) -> RunFolder:
    """Find a run as typed under `run` or `resume`, a path or a name, by its absolute path.

    With `to_train` it has to be a training run that can go on.
    """
    path = expanded(typed).absolute()
    if not _is_whole(path):
        suits: Callable[[RunFolder], object] = can_go_on if to_train else RunFolder.steps
        path = called(key, typed, outputs.absolute(), suits=suits) or path
    if not os.path.isdir(path):  # noqa: PTH112 - of pathlib it raises for long names
        raise NoCheckpointError(unknown_run(key, typed, outputs.absolute()))
    if not _is_whole(path):
        raise NoCheckpointError(f"{key}={typed}: not a run folder (no config.yaml, .hydra/ in it)")
    refuse_odd_files(path)
    run = RunFolder(path)
    if to_train and (command := run.config().get("command")) != "train":
        why = f"not a training run; its config.yaml says command={command}"
        raise NoCheckpointError(f"{key}={typed}: {why}")
    if to_train and not can_go_on(run):
        raise NoCheckpointError(f"{key}={typed}: no checkpoint was written there")
    return run


def _is_whole(path: Path) -> bool:
    """Whether a folder is of a run that can be read."""
    # Of pathlib it raises for long names.
    return all(map(os.path.exists, (path / RunFolder.CONFIG, path / RunFolder.HYDRA)))


def newest(outputs: Path, name: str | None, *, is_read: bool = False) -> RunFolder | None:
    """The newest training run of a name below `outputs` that can go on, or `None`; none of a sweep.

    One that is to be read needs a checkpoint, and no name stands for any.
    """
    found = []
    for run in runs_below(outputs):
        is_named = run.word("name") == name or (is_read and name is None)
        if is_named and can_go_on(run) and (run.steps() or not is_read):
            found.append(run)
    return max(found, key=RunFolder.by_start, default=None)


def can_go_on(run: RunFolder) -> bool:
    """Whether a folder holds a training run with a checkpoint, or one that ended before its first.

    Such a run begins again there with its settings; a fork cannot, without what it began with.
    """
    if run.word("command") != "train":
        return False
    state = run.status().get("state")
    is_saved = state == COMPLETED or (state == PREEMPTED and run.last_step() > 0)
    return bool(run.steps()) or not (is_saved or (run.path / RunFolder.FORK).exists())


def checkpoint_of(run: RunFolder, step: str) -> int:
    """Find the checkpoint of a run that `step` names, to begin another run with."""
    if step == "ema":
        text = "is no state to go on from; a new run begins with these weights by init=RUN step=ema"
        raise ConfigError(f"step=ema: the average of weights {text}")
    steps, best = run.steps(), run.record(f"{RunFolder.CHECKPOINTS}/{RunFolder.BEST}").get("step")
    number: int | None = None
    if step == "best":
        number = best
    elif step.isdecimal():
        number = int(step)
    if number is None or number not in steps:
        has = ", ".join(map(str, steps)) or "none"
        raise NoCheckpointError(f"step={step}: {run} has no such checkpoint; it has {has}")
    return number


def past_steps(run: RunFolder, step: str | None, typed: list[Override]) -> list[Override]:
    """Write the steps that a fork goes past, typed as steps of its run, as steps of the data.

    The run may be a fork that goes past steps itself, so that its own numbers lie behind those.
    """
    values = [override.value() for override in typed if dotted(override) == SKIPS]
    is_fork = step not in (None, "last")
    try:
        wanted = step_ranges(values[-1])
        before = step_ranges(lookup(run.config(), SKIPS) or ())
    except (IndexError, ValueError):
        # None are typed, or what are none: the check of the whole config says so.
        return typed
    if not is_fork and wanted == before:
        return typed
    begin = checkpoint_of(run, str(step)) if is_fork else run.last_step()
    if not is_fork or (wanted and wanted[0][0] <= begin):
        steps = run.steps()[::-1]
        behind = [each for each in steps if wanted and each < wanted[0][0]] or steps
        text = "has to lie behind a checkpoint to go on from: type step=N, of "
        raise ConfigError(line(SKIPS, values[-1], text + first_of([*map(str, behind)])))
    found = [(_in_data(first, before), _in_data(last, before)) for first, last in wanted]
    texts = range_texts([f"{first}-{last}" for first, last in (*before, *found)])
    return [*without(typed, SKIPS), read_override(f"{SKIPS}=[{','.join(texts)}]")]


def _in_data(step: int, skips: Sequence[tuple[int, int]]) -> int:
    """Give the step of the data that a step stands for, where these are skipped, in order."""
    for first, last in skips:
        if first <= step:
            step += last - first + 1
    return step


def saved_overrides(run: RunFolder, own_folder: str | None) -> list[Override]:
    """Read the overrides of a run, of its latest resumption if there was one.

    What only the command line may give, such as where metrics are sent, is left out.
    """
    path = run.overrides_file
    try:
        lines = durable.read_yaml(path)
    except UNREADABLE:
        lines = None
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        what = "cannot be read"
        if path.is_file() and not path.stat().st_size:
            what = "is empty"
        remedy = f"restore it, or begin a new run from these weights with init={run}"
        raise ConfigError(f"{path}: {what}; it holds a list of overrides, `[]` for none: {remedy}")
    overrides, faults = parse(lines)
    harmless = []
    for override in overrides:
        key, line = dotted(override), override.input_line or ""
        if key.partition(".")[0] == "hydra":
            faults.append(f"{line}: settings of Hydra are not taken from a run; type it again")
        elif ":" in line.partition("${")[2]:
            faults.append(f"{line}: resolvers are not taken from a run; type it again")
        elif not any(acting(key, override.value(), own_folder)):
            harmless.append(override)
    if faults:
        raise ConfigError(*(one_line(f"{path}: {fault}") for fault in faults))
    return harmless


def staying(
    saved: Sequence[Override], typed: Sequence[Override], groups: ConfigGroups
) -> list[Override]:
    """List the overrides of a run that nothing replaces which is typed now.

    A new value replaces the old one of its key, and a key that says the same in another unit. A new
    option replaces also the old values inside its group: they were the old option's.
    """
    before = {dotted(override): override.value() for override in saved}
    now = {dotted(override): override.value() for override in typed}
    gone, within = {*now}, list[str]()
    if _CLOCKS & gone:
        gone |= _CLOCKS
    for size, other in (("accum.micro", "accum.steps"), ("accum.steps", "accum.micro")):
        if now.get(size) is not None and before.get(size) is None:
            # batch.global gives it.
            gone.add(other)
    # All of other data is read.
    is_of_others = now.get("command") in OF_OTHER_DATA
    if is_of_others or now.get("data.holdout") == "all":
        gone |= {"eval.samples", "data.eval_path"}
        # What chose some of the run's own data chooses none of others.
        gone.update(OF_OWN_DATA * is_of_others)
        within.append(EVAL_SETS)
    for key, value in now.items():
        if key in groups and (key not in before or value != before[key]):
            within.append(f"{key}.")
    # Settings of those go that are listed no more.
    if trackers.TRACKER_GROUP in now:
        listed = now[trackers.TRACKER_GROUP]
        names = map(str, listed) if isinstance(listed, list) else [str(listed)]
        within += [f"{name}." for name in trackers.options().keys() - {*names}]
    found = []
    for override in saved:
        key = dotted(override)
        if key not in gone and not key.startswith(tuple(within)):
            found.append(override)
    return found


def is_finished(run: RunFolder, config: run_config.RunConfig) -> bool:
    """Whether a run has done all that is asked of it now."""
    if run.status().get("state") != COMPLETED:
        return False
    if config.total_epochs is None:
        return run.last_step() >= (config.steps or 0)
    saved = run.config()
    # One epoch, where nothing is said
    epochs = saved.get("epochs") or (saved.get("steps") is None)
    return isinstance(epochs, int) and epochs >= config.total_epochs


def refuse_changes(
    run: RunFolder, config: run_config.RunConfig, typed: Collection[str] = ()
) -> None:
    """Compare the step of a run, or what its figures depend on, with what is asked for now.

    Of the keys that were `typed`, each is a line, with all that follows from it.
    """
    try:
        before = from_plain(run.config())
        old = run_config.contract(before)
    except ConfigError as error:
        hint = f"to go on from its weights, init={run}"
        lines = (
            one_line(f"{run.path / RunFolder.CONFIG}: {fault}; {hint}") for fault in error.faults
        )
        raise ConfigError(*lines) from None
    compare = run_config.step_faults
    if config.command in READING:
        compare = run_config.reading_faults
    faults = dict[str, str]()
    for fault in compare(config, old):
        key = fault.partition("=")[0]
        owner = next((each for each in (key, *ancestors(key)) if each in typed), key)
        option, had = (each.choices.get(owner.replace(".", "/")) for each in (config, before))
        text = fault
        if owner != key and option != had:
            # An option was typed, of whose settings this is the first.
            text = line(owner, option, _of_group(fault, key, owner, str(had)))
        faults.setdefault(owner, text)
    own = [fault for key, fault in faults.items() if key in typed]
    # A recipe has keys that were not typed.
    if "recipe" in typed:
        own = []
    if faults:
        raise ConfigError(*(own or faults.values()))


def _of_group(fault: str, key: str, group: str, had: str) -> str:
    """Turn what is said of a setting into what is to be said of its group's option."""
    remedy = fault.partition("; ")[2].replace(f"resume_allow=[{key}]", f"resume_allow=[{group}]")
    return f"the run has {group}={had}; {remedy}"
