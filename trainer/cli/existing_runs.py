"""Runs that are there already: found on disk, vetted, and turned into overrides for the next one.

A run folder may come from somebody else. What is read from it is settings and nothing more: no
setting of Hydra, no trust, no class that the user did not name themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override

from trainer.checkpoint.status import read_status
from trainer.cli.referenced_files import refuse_odd_files
from trainer.cli.settings import Groups, dotted, parse, text
from trainer.cli.signature import is_signed, signature
from trainer.config.components import targets_in
from trainer.config.consent import ONLY_TYPED, asked
from trainer.config.contract import contract, step_faults
from trainer.config.messages import clip
from trainer.config.run_config import RunConfig
from trainer.config.validate import from_plain
from trainer.core.durable import read_json
from trainer.core.errors import ConfigError, NoCheckpointError
from trainer.report.run_status import CONSENT_FILE

AUTO = "auto"
COMPLETED = "completed"
PREEMPTED = "preempted"
SUBFOLDER = ".hydra"

_UNREADABLE = (OSError, ValueError, RecursionError, yaml.YAMLError)
_WANDB_SETTINGS = ("wandb/settings", ".wandb/settings")

_MAX_RECORD = 1 << 20
"""Characters of a file, and values in it with aliases written out, beyond which it is no record."""

_CLOCKS = frozenset({"steps", "epochs"})


def find(folder: str | Path, key: str = "resume") -> Path:
    """Find a run folder.

    Args:
        folder: as typed.
        key: the setting that named it, for the message.

    Returns:
        Its absolute path.

    Raises:
        NoCheckpointError: no such folder, or none that a run wrote.
    """
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise NoCheckpointError(f"{key}={folder}: no such folder; {key}=auto takes the newest run")
    if not (path / "config.yaml").is_file() or not (path / SUBFOLDER).is_dir():
        raise NoCheckpointError(f"{key}={folder}: not a run folder (no config.yaml, .hydra/ in it)")
    refuse_odd_files(path)
    for name in _WANDB_SETTINGS:
        # Read where they lie below the current folder, and they say where the key of W&B is sent.
        if (path / name).exists():
            raise NoCheckpointError(f"{path / name}: settings of W&B are not taken from a run")
    return path


def checkpoint_of(folder: str) -> tuple[Path, int] | None:
    """Tell the run and the step of `RUN/checkpoints/step-N`; `None` for any other folder."""
    path = Path(folder).expanduser().absolute()
    number = path.name.removeprefix("step-")
    is_one = path.parent.name == "checkpoints" and path.name != number and number.isdecimal()
    return (path.parent.parent, int(number)) if is_one else None


def find_training(folder: str, key: str = "resume") -> Path:
    """Find a training run that can go on.

    Args:
        folder: as typed.
        key: the setting that named it, for the message.

    Raises:
        NoCheckpointError: there is none, or no checkpoint in it.
    """
    run = find(folder, key)
    config = saved_config(run)
    if not config:
        raise NoCheckpointError(f"{run / 'config.yaml'}: cannot be read as a config")
    command = config.get("command", "train")
    if command != "train":
        raise NoCheckpointError(f"{key}={folder}: the folder of a {command}, not of a training run")
    if not can_go_on(run):
        raise NoCheckpointError(f"{key}={folder}: no checkpoint was written there")
    return run


def newest_to_read(outputs: Path, name: str | None) -> Path:
    """The newest training run that has a checkpoint to evaluate or export.

    Args:
        outputs: as for `newest`.
        name: of the run; `None` for whichever.

    Raises:
        NoCheckpointError: there is none.
    """
    named = (run for run in _runs(outputs) if name in (None, saved_config(run).get("name")))
    found = [run for run in named if has_checkpoint(run)]
    if not found:
        called = "run" if name is None else f"run named {name}"
        raise NoCheckpointError(f"run=auto: no {called} below {outputs} has a checkpoint")
    return max(found, key=_age)


def newest(outputs: Path, name: str | None) -> Path | None:
    """The newest training run of a name that can go on, or `None`.

    Args:
        outputs: root of the run folders; runs of sweeps, deeper down, are not looked at.
        name: the run's `name`; `None` for the runs that have none.
    """
    found = [run for run in _runs(outputs) if saved_config(run).get("name") == name]
    return max(found, key=_age, default=None)


def _runs(outputs: Path) -> list[Path]:
    depths = ("*", "*/*")
    runs = [path.parent for depth in depths for path in outputs.glob(f"{depth}/config.yaml")]
    return [run for run in runs if run.parent.name != "multirun" and can_go_on(run)]


def newest_sweep(outputs: Path, overrides: Sequence[str]) -> Path | None:
    """The newest sweep folder that was started with the same overrides, or `None`.

    Args:
        outputs: root of the run folders.
        overrides: what was typed, as Hydra got it.
    """
    wanted = _of_the_run(overrides)
    sweeps = [
        path.parent
        for path in outputs.glob("multirun/**/multirun.yaml")
        if _of_the_run(_swept_overrides(path)) == wanted
    ]
    return max(sweeps, key=_age, default=None)


def can_go_on(run: Path) -> bool:
    """Whether a folder holds a training run with a checkpoint, or one that never came to a step."""
    is_training = saved_config(run).get("command", "train") == "train"
    return is_training and (has_checkpoint(run) or _was_stopped_early(run))


def has_checkpoint(run: Path) -> bool:
    """Whether a run wrote a checkpoint."""
    return any(run.glob("checkpoints/step-*/manifest.json"))


def _was_stopped_early(run: Path) -> bool:
    """Whether a signal stopped a run before there was anything to save: it can begin again."""
    return read_status(run).get("state") == PREEMPTED and not noted_step(run)


def saved_config(run: Path) -> dict[str, Any]:
    """The resolved config of a run, as its `config.yaml` has it; empty if that is unreadable."""
    path = run / "config.yaml"
    try:
        content = _read_yaml(path) if path.is_file() else {}
    except _UNREADABLE:
        return {}
    return content if isinstance(content, dict) else {}


def saved_overrides(run: Path) -> list[Override]:
    """The overrides of a run, of its latest resumption if there was one, vetted.

    Raises:
        ConfigError: the file holds something that is no setting of a run.
    """
    path = _newest_overrides(run)
    try:
        lines = _read_yaml(path) or []
    except _UNREADABLE:
        raise ConfigError(f"{path}: cannot be read as a list of overrides") from None
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ConfigError(f"{path}: is not a list of overrides")
    overrides, faults = parse(lines)
    faults += [fault for override in overrides if (fault := _foreign(override)) is not None]
    if faults:
        raise ConfigError(*(clip(f"{path}: {fault}") for fault in faults))
    return [override for override in overrides if not _is_consent(override)]


def _newest_overrides(run: Path) -> Path:
    records = sorted(run.glob(f"{SUBFOLDER}/resume_*/overrides.yaml"), key=_resumption)
    # A process that was killed while Hydra wrote this file left it empty; none is `[]`.
    resumed = [record for record in records if record.stat().st_size]
    return resumed[-1] if resumed else run / SUBFOLDER / "overrides.yaml"


def sign(run: Path, records: Path) -> str | None:
    """Give the user's signature of a run that is about to begin or go on; None without a key.

    Args:
        run: its folder.
        records: where its new config.yaml is, and perhaps its new overrides.
    """
    path = _newest_overrides(records)
    try:
        return signature(
            saved_config(records), _read_yaml(path if path.exists() else _newest_overrides(run))
        )
    except _UNREADABLE:
        return None


def consented(run: Path) -> frozenset[tuple[str, str]]:
    """List the classes of a run by dotted key, if this user signed it; else nothing."""
    config = saved_config(run)
    try:
        overrides = _read_yaml(_newest_overrides(run))
    except _UNREADABLE:
        return frozenset()
    if not is_signed(read_json(run / CONSENT_FILE).get("hmac_sha256"), config, overrides):
        return frozenset()
    return frozenset(pair for key, value in config.items() for pair in targets_in(key, value))


def own_folder(run: Path) -> str | None:
    """The `--config-dir` that a run was started with, if it had one."""
    try:
        content = _read_yaml(run / SUBFOLDER / "hydra.yaml")
        listed = content["hydra"]["runtime"]["config_sources"]
        return next((str(s["path"]) for s in listed if s["provider"] == "command-line"), None)
    except (*_UNREADABLE, KeyError, TypeError):
        return None


def about(faults: Iterable[str], overrides: Iterable[Override]) -> list[str]:
    """Keep the faults of what was typed now; the others are of the run's own settings."""
    typed = {dotted(override) for override in overrides}
    return [f for f in faults if f.partition(":")[0].partition("=")[0].lstrip("~+") in typed]


def _read_yaml(path: Path) -> Any:  # noqa: ANN401 - any YAML
    """Read a record of a run, perhaps a stranger's.

    Raises:
        ValueError: it is larger than any record, or its aliases make it so.
    """
    with path.open(encoding="utf-8") as file:
        text = file.read(_MAX_RECORD + 1)
    content = yaml.safe_load(text) if len(text) <= _MAX_RECORD else None
    left, seen = [content], 0
    while left and seen + len(left) <= _MAX_RECORD:
        value, seen = left.pop(), seen + 1
        left += value.values() if isinstance(value, dict) else ()
        left += value if isinstance(value, list) else ()
    if left or len(text) > _MAX_RECORD:
        raise ValueError("too large")
    return content


def merge(old: Sequence[Override], new: Sequence[Override], groups: Groups) -> list[Override]:
    """Put what is typed now over what a run was started with.

    A new value replaces the old one of its key, a new option also the old values inside its
    group (they were the old option's), and `steps` the old `epochs`, or the reverse.

    Returns:
        One override per key, the old ones first.
    """
    options = {dotted(override): text(override) for override in old}
    replaced = {dotted(override) for override in new}
    if replaced & _CLOCKS:
        replaced |= _CLOCKS
    chosen = {
        group for group in replaced & groups.paths.keys() if not _same_option(group, options, new)
    }
    kept = [
        override
        for override in old
        if dotted(override) not in replaced and groups.of(dotted(override)) not in chosen
    ]
    return [*kept, *new]


def is_finished(run: Path, config: RunConfig) -> bool:
    """Whether a run has done all that is asked of it now.

    Args:
        run: its folder.
        config: what is asked for.
    """
    status = read_status(run)
    if status.get("state") != COMPLETED:
        return False
    if config.total_epochs is None:
        return noted_step(run) >= (config.steps or 0)
    saved = saved_config(run)
    passes = saved.get("epochs") or (saved.get("steps") is None)
    return _count(passes) >= config.total_epochs


def refuse_another_step(run: Path, config: RunConfig) -> None:
    """Compare the step of a run with the one asked for now.

    Raises:
        ConfigError: one line per key that differs, old and new.
    """
    try:
        old = contract(from_plain(saved_config(run)))
    except ConfigError as error:
        raise ConfigError(*(clip(f"{run / 'config.yaml'}: {f}") for f in error.faults)) from None
    faults = step_faults(config, old)
    if faults:
        raise ConfigError(*faults)


def refuse_other_weights(run: Path, config: RunConfig) -> None:
    """Let a run begin again with the weights it was to begin with; its folder cannot name them.

    Raises:
        ConfigError: they are not typed again.
    """
    saved = saved_config(run)
    before, step = saved.get("init"), saved.get("step", "last")
    if before is not None and (config.init is None or config.step != step):
        which = "" if step == "last" else f" step={step}"
        text = f"init: the run was to begin with init={before}{which}; type it again"
        raise ConfigError(clip(text))


def noted_step(run: Path) -> int:
    """The last step of a run, as its status.json has it."""
    return _count(read_status(run).get("step"))


def _count(value: object) -> int:
    """A number as a run wrote it; 0 for what is none."""
    return value if isinstance(value, int) else 0


def next_subfolder(*runs: Path) -> str:
    """Where Hydra keeps the records of the next resumption, so that the first stay as they are.

    Args:
        runs: all that are resumed at once; without any, the place for a run's first records.
    """
    if not runs:
        return SUBFOLDER
    earlier = [path for run in runs for path in run.glob(f"{SUBFOLDER}/resume_*/overrides.yaml")]
    return f"{SUBFOLDER}/resume_{max(map(_resumption, earlier), default=0) + 1}"


def _age(folder: Path) -> tuple[float, str]:
    """When a run or sweep began: its first record is never written again."""
    records = (folder / SUBFOLDER / "overrides.yaml", folder / "multirun.yaml")
    began = [record.stat().st_mtime for record in records if record.is_file()]
    return min(began, default=0.0), str(folder)


def _resumption(overrides: Path) -> int:
    number = overrides.parent.name.removeprefix("resume_")
    return int(number) if number.isdecimal() else 0


def _swept_overrides(multirun: Path) -> list[str]:
    try:
        content = _read_yaml(multirun)
        return [str(line) for line in content["hydra"]["overrides"]["task"]]
    except (*_UNREADABLE, KeyError, TypeError):
        return []


def _of_the_run(lines: Iterable[str]) -> frozenset[str]:
    overrides, _ = parse(lines)
    return frozenset(
        f"{dotted(override)}={text(override)}"
        for override in overrides
        if _root(override) not in ONLY_TYPED
    )


def _same_option(group: str, options: Mapping[str, str], new: Sequence[Override]) -> bool:
    return any(dotted(o) == group and text(o) == options.get(group) for o in new)


def _root(override: Override) -> str:
    return dotted(override).partition(".")[0]


def _is_consent(override: Override) -> bool:
    """Whether an override, a mapping of several too, says what is the command line's alone to say.

    Where metrics are sent is, and which machines are met: a run goes on online, or on several
    machines, only where that is typed again.
    """
    value = None if override.is_delete() else override.value()
    return any(asked(dotted(override), value))


def _foreign(override: Override) -> str | None:
    """Say why an override may not come from a run folder, or `None` when it may."""
    line = override.input_line or ""
    if override.is_hydra_override() or _root(override) == "hydra":
        return f"{line}: settings of Hydra are not taken from a run; type it again"
    if "${" in line and ":" in line.partition("${")[2]:
        return f"{line}: resolvers are not taken from a run; type it again"
    return None
