"""Find runs on disk, and turn what they were started with into overrides for the next one.

A run folder may come from somebody else. What is read from it is settings and nothing more: no
setting of Hydra, no trust, no class that the user did not name themselves.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override

from trainer.checkpoint.status import read_status
from trainer.cli.overrides import ConfigGroups, dotted, parse, right_side
from trainer.config import run_config, trackers
from trainer.config.components import GROUPS, targets_in
from trainer.config.messages import clip
from trainer.config.odd_files import refuse_odd_files
from trainer.config.recipes import ONLY_TYPED, asked
from trainer.config.validate import from_plain
from trainer.core import consent, durable
from trainer.core.errors import ConfigError, NoCheckpointError
from trainer.core.format import expanded, shown_path
from trainer.report.journal import METRICS_FILE, SAMPLES_FILE, TEXTS_FILE, truncate_after

AUTO = "auto"
CHECKPOINTS = "checkpoints"
COMPLETED = "completed"
FORKED = "forked.json"
"""Of a run that began with a checkpoint of another: which."""
PREEMPTED = "preempted"
SUBFOLDER = ".hydra"
STARTED = f"{SUBFOLDER}/started.json"
RESUMED = f"{SUBFOLDER}/resumed"  # Hydra's records of the last time a run went on

_UNREADABLE = (OSError, ValueError, RecursionError, yaml.YAMLError, KeyError, TypeError)
_CLOCKS = frozenset({"steps", "epochs"})


def find(folder: str, key: str, outputs: Path, *, to_train: bool) -> Path:
    """Find a run folder as typed under `run` or `resume`, and give its absolute path.

    What was typed may be the name of a run below `outputs`. With `to_train` it has to be a
    training run that can go on.
    """
    path = expanded(folder).absolute()
    if not os.path.isdir(path):  # noqa: PTH112 - of pathlib it raises for long names
        fault = clip(f"{key}={folder}: no such folder")
        raise NoCheckpointError(f"{fault}{remedy_for(folder, key, outputs)}")
    if not (path / "config.yaml").is_file() or not (path / SUBFOLDER).is_dir():
        raise NoCheckpointError(f"{key}={folder}: not a run folder (no config.yaml, .hydra/ in it)")
    refuse_odd_files(path)
    if to_train and (command := saved_config(path).get("command")) != "train":
        why = f"not a training run; its config.yaml says command={command}"
        raise NoCheckpointError(f"{key}={folder}: {why}")
    if to_train and not can_go_on(path):
        raise NoCheckpointError(f"{key}={folder}: no checkpoint was written there")
    return path


def remedy_for(name: str, key: str, outputs: Path) -> str:
    """Say what to type under a key where there is no folder, but perhaps a run, of this name."""
    if (run := newest(outputs, name, is_read=True)) is not None:
        return f"; the newest run of that name is {key}={shown_path(run)}"
    return "" if key == "init" else f"; {key}=auto takes the newest run"


def newest(outputs: Path, name: str | None, *, is_read: bool = False) -> Path | None:
    """The newest training run of a name below `outputs` that can go on, or `None`; none of a sweep.

    One that is to be read needs a checkpoint, and no name stands for any.
    """
    found = (
        run
        for run in runs_below(outputs, "config.yaml")
        if saved_config(run).get("name") == name or (is_read and name is None)
        if can_go_on(run) and (has_checkpoint(run) or not is_read)
    )
    return max(found, key=_began, default=None)


def runs_below(outputs: Path, record: str) -> Iterator[Path]:
    """Find the runs with a record, none of a sweep."""
    found = (path.parent for d in ("*", "*/*") for path in outputs.glob(f"{d}/{record}"))
    return (run for run in found if run.parent.name != "multirun")


def newest_sweep(
    outputs: Path, overrides: Sequence[str], record: str = "multirun.yaml"
) -> Path | None:
    """The newest sweep folder below `outputs` that was started with the same overrides, or `None`.

    What is typed anew for every command does not count, nor does the order.
    """

    def settings(lines: Iterable[str]) -> set[tuple[str, str]]:
        pairs = {(dotted(override), right_side(override)) for override in parse(lines)[0]}
        return {pair for pair in pairs if pair[0].partition(".")[0] not in ONLY_TYPED}

    found = []
    for path in outputs.glob(f"multirun/**/{record}"):
        with suppress(*_UNREADABLE):
            begun = [str(line) for line in durable.read_yaml(path)["hydra"]["overrides"]["task"]]
            found += [path.parent] if settings(begun) == settings(overrides) else []
    return max(found, key=_began, default=None)


def record_start(run: Path) -> None:
    """Record once when a run begins; file times of a copy are those of the copying."""
    path = run / STARTED
    if not path.exists():
        durable.make_folders(path.parent)
        durable.write_json(path, {"started": time.time()})


def _began(folder: Path) -> tuple[float, str]:
    """When a run, or the first job of a sweep, began, in seconds since the epoch."""
    records = map(durable.read_json, (folder / STARTED, *folder.glob(f"*/{STARTED}")))
    times = [r["started"] for r in records if isinstance(r.get("started"), int | float)]
    return min(times, default=0.0), str(folder)


def can_go_on(run: Path) -> bool:
    """Whether a folder holds a training run with a checkpoint, or one that ended before its first.

    Such a run begins again there with its settings; a fork cannot, without what it began with.
    """
    if saved_config(run).get("command") != "train":
        return False
    state = read_status(run).get("state")
    is_saved = state == COMPLETED or (state == PREEMPTED and last_step(run) > 0)
    return has_checkpoint(run) or not (is_saved or (run / FORKED).exists())


def has_checkpoint(run: Path) -> bool:
    """Whether a run wrote a checkpoint."""
    return any(run.glob("checkpoints/step-*/manifest.json"))


def step_of(checkpoint: Path) -> int | None:
    """Read the step of a checkpoint's folder off its name; None for any other folder."""
    match = re.fullmatch(r"step-(\d{8,})", checkpoint.name, re.ASCII)
    return int(match[1]) if match and checkpoint.parent.name == CHECKPOINTS else None


def checkpoint_of(run: Path, step: str) -> Path:
    """Find the checkpoint of a run that `step` names, to begin another run with."""
    if step == "ema":
        text = "is no state to go on from; a new run begins with these weights by init=RUN step=ema"
        raise ConfigError(f"step=ema: the average of weights {text}")
    folder = run / CHECKPOINTS
    steps = {step_of(path): path for path in sorted(folder.glob("step-*"))}
    best = durable.read_json(folder / "best.json").get("step")
    number = best if step == "best" else int(step) if step.isdecimal() else None
    if number not in steps:
        has = ", ".join(str(each) for each in steps if each is not None) or "none"
        raise NoCheckpointError(f"step={step}: {run} has no such checkpoint; it has {has}")
    return steps[number]


def fork(checkpoint: Path, folder: Path) -> None:
    """Begin a run's folder with a checkpoint of another run, and its records up to there.

    Files are linked where the disk can do it, and copied elsewhere; none is ever changed.
    """
    step, run = step_of(checkpoint) or 0, checkpoint.parent.parent
    with durable.as_save_error(folder / CHECKPOINTS / checkpoint.name):
        durable.make_folders(folder / CHECKPOINTS)
        for name in (METRICS_FILE, SAMPLES_FILE, TEXTS_FILE):
            if (run / name).is_file():
                shutil.copyfile(run / name, folder / name)
                truncate_after(folder / name, step)
        durable.write_json(folder / FORKED, {"run": str(run), "step": step})
        unfinished = folder / CHECKPOINTS / f"{durable.UNFINISHED}{checkpoint.name}"
        shutil.copytree(checkpoint, unfinished, copy_function=_link)
        durable.rename(unfinished, folder / CHECKPOINTS / checkpoint.name)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def last_step(run: Path) -> int:
    """The last step of a run, as its status.json has it; 0 where it has none."""
    step = read_status(run).get("step")
    return step if isinstance(step, int) else 0


def saved_config(run: Path) -> dict[str, Any]:
    """The resolved config of a run, as its `config.yaml` has it; empty if that is unreadable."""
    try:
        content = durable.read_yaml(run / "config.yaml")
    except _UNREADABLE:
        return {}
    return content if isinstance(content, dict) else {}


def saved_overrides(run: Path) -> list[Override]:
    """The overrides of a run, of its latest resumption if there was one, vetted.

    What only the command line may give, such as where metrics are sent, is left out.
    """
    path = _newest_overrides(run)
    try:
        lines = durable.read_yaml(path)
    except _UNREADABLE:
        lines = None
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        what = "is empty" if path.is_file() and not path.stat().st_size else "cannot be read"
        remedy = f"restore it, or begin a new run from these weights with init={run}"
        raise ConfigError(f"{path}: {what}; it holds a list of overrides, `[]` for none: {remedy}")
    overrides, faults = parse(lines)
    for line, key in ((o.input_line or "", dotted(o)) for o in overrides):
        if key.partition(".")[0] == "hydra":
            faults.append(f"{line}: settings of Hydra are not taken from a run; type it again")
        elif ":" in line.partition("${")[2]:
            faults.append(f"{line}: resolvers are not taken from a run; type it again")
    if faults:
        raise ConfigError(*(clip(f"{path}: {fault}") for fault in faults))
    # Null was a value of a key that is a group now.
    pairs = [(o, dotted(o), None if o.is_delete() else o.value()) for o in overrides]
    pairs = [each for each in pairs if each[2] is not None or each[1] not in GROUPS]
    return [override for override, key, value in pairs if not any(asked(key, value))]


def _newest_overrides(run: Path) -> Path:
    """Where the overrides of a run are; those of its first start stay beside the newest."""
    resumed = run / RESUMED / "overrides.yaml"
    # A process that was killed while Hydra wrote this file left it empty; none is `[]`.
    is_whole = resumed.is_file() and resumed.stat().st_size
    return resumed if is_whole else run / SUBFOLDER / "overrides.yaml"


def record_consent(run: Path, records: Path, config: run_config.RunConfig) -> None:
    """Note that the user starts a run with a config, whose new files are in `records`."""
    if config.packages:
        consent.note_start(run, _digest(run, records), config.packages)


def own_classes(run: Path) -> frozenset[str]:
    """List the classes of a run that this user made and nobody changed; else nothing."""
    saved = saved_config(run)
    with suppress(ConfigError):
        if consent.is_unchanged(run, _digest(run, run), from_plain(saved).packages):
            return frozenset(t for key, value in saved.items() for _, t in targets_in(key, value))
    return frozenset()


def _digest(run: Path, records: Path) -> str:
    """Hash what a run begins with: its config.yaml, and overrides, which may be the older ones."""
    path = _newest_overrides(records)
    files = (records / "config.yaml", path if path.exists() else _newest_overrides(run))
    texts = (file.read_bytes() if file.is_file() else b"" for file in files)
    return sha256(b"\0".join(texts)).hexdigest()


def merge(old: Sequence[Override], new: Sequence[Override], groups: ConfigGroups) -> list[Override]:
    """Put what is typed now over what a run was started with.

    A new value replaces the old one of its key, a new option also the old values inside its
    group (they were the old option's), and `steps` the old `epochs`, or the reverse.
    """
    before = {dotted(override): override.value() for override in old}
    typed = {dotted(override): override.value() for override in new}
    replaced = {*typed, *(_CLOCKS if _CLOCKS & typed.keys() else ())}
    options = [key for key in typed if key in groups]
    chosen = (*(f"{k}." for k in options if k not in before or typed[k] != before[k]),)
    if trackers.TRACKER_GROUP in typed:  # settings of those that are listed no more
        given = typed[trackers.TRACKER_GROUP]
        listed = [*map(str, given)] if isinstance(given, list) else [str(given)]
        chosen += (*(f"{name}." for name in trackers.options() if name not in listed),)
    staying = [o for o in old if dotted(o) not in replaced and not dotted(o).startswith(chosen)]
    return [*staying, *new]


def is_finished(run: Path, config: run_config.RunConfig) -> bool:
    """Whether a run has done all that is asked of it now."""
    if read_status(run).get("state") != COMPLETED:
        return False
    if config.total_epochs is None:
        return last_step(run) >= (config.steps or 0)
    saved = saved_config(run)
    epochs = saved.get("epochs") or (saved.get("steps") is None)  # one epoch, where nothing is said
    return isinstance(epochs, int) and epochs >= config.total_epochs


def stopped(run: Path, config: run_config.RunConfig) -> str | None:
    """Why a run ended before its last step, where it would do so again without a step."""
    is_same = run_config.to_plain(config)["stop"] == saved_config(run).get("stop")
    ended = is_same and read_status(run).get("state") == COMPLETED
    return durable.read_json(run / "result.json").get("stopped") if ended else None


def refuse_changes(run: Path, config: run_config.RunConfig) -> None:
    """Compare the step of a run, or what its figures depend on, with what is asked for now."""
    try:
        old = run_config.contract(from_plain(saved_config(run)))
    except ConfigError as error:
        hint = f"to go on from its weights, init={run}"
        lines = (clip(f"{run / 'config.yaml'}: {fault}; {hint}") for fault in error.faults)
        raise ConfigError(*lines) from None
    if faults := (
        run_config.reading_faults
        if config.command in run_config.READING
        else run_config.step_faults
    )(config, old):
        raise ConfigError(*faults)


def refuse_other_weights(run: Path, config: run_config.RunConfig) -> None:
    """Let a run begin again with the weights it was to begin with; its folder cannot name them."""
    saved = saved_config(run)
    before, step = saved.get("init"), saved.get("step", "last")
    if before is not None and (config.init is None or config.step != step):
        typed = f"init={before}" if step == "last" else f"init={before} step={step}"
        raise ConfigError(clip(f"init: the saved run started from {before}; type {typed} again"))
