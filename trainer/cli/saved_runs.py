"""Find runs on disk, and turn what they were started with into overrides for the next one.

A run folder may come from somebody else. What is read from it is settings and nothing more: no
setting of Hydra, no trust, no class that the user did not name themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override

from trainer.checkpoint.status import read_status
from trainer.cli.overrides import ConfigGroups, dotted, parse, text
from trainer.cli.referenced_files import refuse_odd_files
from trainer.cli.trust import is_signed, sign
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

_UNREADABLE = (OSError, ValueError, RecursionError, yaml.YAMLError, KeyError, TypeError)
_WANDB_SETTINGS = ("wandb/settings", ".wandb/settings")

_MAX_RECORD = 1 << 20
"""Characters of a file beyond which it is no record of a run."""

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
        # They would say where the key of W&B is sent.
        if (path / name).exists():
            raise NoCheckpointError(f"{path / name}: settings of W&B are not taken from a run")
    return path


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


def newest(outputs: Path, name: str | None) -> Path | None:
    """The newest training run of a name that can go on, or `None`.

    Args:
        outputs: root of the run folders; runs of sweeps, deeper down, are not looked at.
        name: the run's `name`; `None` for the runs that have none.
    """
    found = [run for run in _runs(outputs) if saved_config(run).get("name") == name]
    return max(found, key=_age, default=None)


def newest_to_read(outputs: Path, name: str | None) -> Path:
    """The newest training run that has a checkpoint to evaluate or export.

    Args:
        outputs: as for `newest`.
        name: of the run; `None` for whichever.

    Raises:
        NoCheckpointError: there is none.
    """
    begun = [run for run in _runs(outputs) if has_checkpoint(run)]
    found = [run for run in begun if name in (None, saved_config(run).get("name"))]
    if not found:
        called = "run" if name is None else f"run named {name}"
        raise NoCheckpointError(f"run=auto: no {called} below {outputs} has a checkpoint")
    return max(found, key=_age)


def _runs(outputs: Path) -> list[Path]:
    runs = [path.parent for depth in ("*", "*/*") for path in outputs.glob(f"{depth}/config.yaml")]
    return [run for run in runs if run.parent.name != "multirun" and can_go_on(run)]


def newest_sweep(outputs: Path, overrides: Sequence[str]) -> Path | None:
    """The newest sweep folder that was started with the same overrides, or `None`.

    Args:
        outputs: root of the run folders.
        overrides: what was typed, as Hydra got it.
    """
    found = [
        path.parent
        for path in outputs.glob("multirun/**/multirun.yaml")
        if _settings(_swept_overrides(path)) == _settings(overrides)
    ]
    return max(found, key=_age, default=None)


def _swept_overrides(multirun: Path) -> list[str]:
    try:
        return [str(line) for line in _read_yaml(multirun)["hydra"]["overrides"]["task"]]
    except _UNREADABLE:
        return []


def _settings(lines: Iterable[str]) -> frozenset[str]:
    """Give overrides in any order, without those that are typed anew for every command."""
    pairs = ((dotted(override), text(override)) for override in parse(lines)[0])
    return frozenset(f"{k}={v}" for k, v in pairs if k.partition(".")[0] not in ONLY_TYPED)


def _age(folder: Path) -> tuple[float, str]:
    """When a run or sweep began: its first record is never written again."""
    records = (folder / SUBFOLDER / "overrides.yaml", folder / "multirun.yaml")
    began = [record.stat().st_mtime for record in records if record.is_file()]
    return min(began, default=0.0), str(folder)


def can_go_on(run: Path) -> bool:
    """Whether a folder holds a training run with a checkpoint, or one stopped before its first."""
    if saved_config(run).get("command", "train") != "train":
        return False
    is_stopped = read_status(run).get("state") == PREEMPTED and not last_step(run)
    return is_stopped or has_checkpoint(run)


def has_checkpoint(run: Path) -> bool:
    """Whether a run wrote a checkpoint."""
    return any(run.glob("checkpoints/step-*/manifest.json"))


def last_step(run: Path) -> int:
    """The last step of a run, as its status.json has it; 0 where it has none."""
    step = read_status(run).get("step")
    return step if isinstance(step, int) else 0


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
    for override in overrides:
        line = override.input_line or ""
        if override.is_hydra_override() or dotted(override).partition(".")[0] == "hydra":
            faults.append(f"{line}: settings of Hydra are not taken from a run; type it again")
        elif "${" in line and ":" in line.partition("${")[2]:
            faults.append(f"{line}: resolvers are not taken from a run; type it again")
    if faults:
        raise ConfigError(*(clip(f"{path}: {fault}") for fault in faults))
    # What only the command line may give is typed again, or not in force: where metrics are sent.
    return [o for o in overrides if not any(asked(dotted(o), None if o.is_delete() else o.value()))]


def _newest_overrides(run: Path) -> Path:
    records = sorted(run.glob(f"{SUBFOLDER}/resume_*/overrides.yaml"), key=_resumption)
    # A process that was killed while Hydra wrote this file left it empty; none is `[]`.
    resumed = [record for record in records if record.stat().st_size]
    return resumed[-1] if resumed else run / SUBFOLDER / "overrides.yaml"


def _resumption(overrides: Path) -> int:
    number = overrides.parent.name.removeprefix("resume_")
    return int(number) if number.isdecimal() else 0


def next_subfolder(*runs: Path) -> str:
    """Where Hydra keeps the records of the next resumption, so that the first stay as they are.

    Args:
        runs: all that are resumed at once; without any, the place for a run's first records.
    """
    if not runs:
        return SUBFOLDER
    earlier = [path for run in runs for path in run.glob(f"{SUBFOLDER}/resume_*/overrides.yaml")]
    return f"{SUBFOLDER}/resume_{max(map(_resumption, earlier), default=0) + 1}"


def sign_run(run: Path, records: Path) -> str | None:
    """Give the user's signature of a run that is about to begin or go on; None without a key.

    Args:
        run: its folder.
        records: where its new config.yaml is, and perhaps its new overrides.
    """
    path = _newest_overrides(records)
    try:
        overrides = _read_yaml(path if path.exists() else _newest_overrides(run))
    except _UNREADABLE:
        return None
    return sign(saved_config(records), overrides)


def signed_classes(run: Path) -> frozenset[tuple[str, str]]:
    """List the classes of a run by dotted key, if this user signed it; else nothing."""
    config, signature = saved_config(run), read_json(run / CONSENT_FILE).get("hmac_sha256")
    try:
        is_own = is_signed(signature, config, _read_yaml(_newest_overrides(run)))
    except _UNREADABLE:
        return frozenset()
    found = (pair for key, value in config.items() for pair in targets_in(key, value))
    return frozenset(found if is_own else ())


class _Loader(yaml.SafeLoader):
    """Reads YAML without aliases, ten levels of which stand for ten billion values."""

    def compose_node(self, parent: Any, index: Any) -> Any:  # noqa: ANN401 - as in PyYAML
        """See the base class.

        Raises:
            ValueError: an alias.
        """
        if self.check_event(yaml.AliasEvent):
            raise ValueError("an alias")
        return super().compose_node(parent, index)


def _read_yaml(path: Path) -> Any:  # noqa: ANN401 - any YAML
    """Read a record of a run, perhaps a stranger's.

    Raises:
        ValueError: it is larger than any record, or has aliases.
    """
    with path.open(encoding="utf-8") as file:
        content = file.read(_MAX_RECORD + 1)
    if len(content) > _MAX_RECORD:
        raise ValueError("too large")
    return _Loader(content).get_single_data()


def merge(old: Sequence[Override], new: Sequence[Override], groups: ConfigGroups) -> list[Override]:
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
    same = {dotted(o) for o in new if text(o) == options.get(dotted(o))}
    chosen = (replaced & groups.paths.keys()) - same
    staying = [
        override
        for override in old
        if dotted(override) not in replaced and groups.of(dotted(override)) not in chosen
    ]
    return [*staying, *new]


def is_finished(run: Path, config: RunConfig) -> bool:
    """Whether a run has done all that is asked of it now.

    Args:
        run: its folder.
        config: what is asked for.
    """
    if read_status(run).get("state") != COMPLETED:
        return False
    if config.total_epochs is None:
        return last_step(run) >= (config.steps or 0)
    saved = saved_config(run)
    passes = saved.get("epochs") or (saved.get("steps") is None)
    return isinstance(passes, int) and passes >= config.total_epochs


def refuse_another_step(run: Path, config: RunConfig) -> None:
    """Compare the step of a run with the one asked for now.

    Raises:
        ConfigError: one line per key that differs, old and new.
    """
    try:
        old = contract(from_plain(saved_config(run)))
    except ConfigError as error:
        hint = f"to go on from its weights, init={run}"
        raise ConfigError(
            *(clip(f"{run / 'config.yaml'}: {fault}; {hint}") for fault in error.faults)
        ) from None
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
