"""Show the runs that are named by one of the views: `train report run=RUN[,RUN]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.cli import remote
from trainer.cli.feature_commands import read_settings
from trainer.cli.run_names import called, unknown_run
from trainer.config.consent import refuse_odd_files
from trainer.config.messages import clip, did_you_mean
from trainer.core.durable import as_save_error, make_folders
from trainer.core.errors import ConfigError, NoCheckpointError
from trainer.core.format import expanded, plural, shown_path
from trainer.core.run_folder import AUTO, RunFolder, runs_below, runs_in
from trainer.report.views import views

SETTINGS = {"run": AUTO, "to": "", "outputs": "outputs"}
"""What may be typed, with its default: runs or sweeps, the file, and where both are."""


def show_runs(command: str, settings: Sequence[str]) -> str:
    """Write the file of a view, and say where it is; or give the text that `to=` names."""
    view = views()[command]
    hints = {"name": " Type run=NAME.", "run": " Of several runs type run=RUN,RUN"}
    typed = read_settings(command, settings, SETTINGS, hints)
    outputs = expanded(typed["outputs"])
    remote.bring(outputs, whole=False)
    folders = [_found(name, outputs) for name in _listed(typed["run"])]
    runs = list[Path]()
    for folder in folders:
        runs += runs_in(folder)
    if typed["to"] in view.printed:
        return view.text(typed["to"], runs)
    if hint := did_you_mean(typed["to"], view.printed):
        raise ConfigError(clip(f"to={typed['to']}: a file's name ends as in {view.file}.{hint}"))
    # Beside the one run or sweep that it shows; of several, above them all
    file = outputs / view.file
    if len(folders) == 1:
        file = folders[0] / view.file
    if typed["to"]:
        file = expanded(typed["to"])
    with remote.sent(folders[0]), as_save_error(file):
        make_folders(file.parent.absolute())
        view.write(runs, file)
    return f"{plural(len(runs), 'run')}: {shown_path(file)}"


def _listed(typed: str) -> list[str]:
    """Read one folder, or several with commas between them, in brackets or not."""
    # A comma may be in its name.
    if typed and Path(expanded(typed)).is_dir():
        return [typed]
    names = [each.strip(" '\"") for each in typed.strip("[] ").split(",")]
    if not any(names):
        raise ConfigError(clip(f"run={typed}: names no run; run=auto takes the newest run"))
    return [*filter(None, names)]


def _found(typed: str, outputs: Path) -> Path:
    """Find a run or a sweep; `auto` is the newest run, and a checkpoint is of its run."""
    if typed == AUTO:
        runs = list[RunFolder]()
        for run in runs_below(outputs):
            if (run.path / RunFolder.METRICS).is_file():
                runs.append(run)
        newest = max(runs, key=RunFolder.by_start, default=None)
        if newest is None:
            raise NoCheckpointError(f"run=auto: no run below {outputs} has taken a step")
        refuse_odd_files(newest.path)
        return newest.path.absolute()
    path = expanded(typed).absolute()
    if path.parent.name == RunFolder.CHECKPOINTS:
        path = path.parent.parent
    remote.bring(path, whole=False)
    if not runs_in(path):
        path = called("run", typed, outputs.absolute(), takes_sweep=True) or path
    if not path.is_dir():
        raise NoCheckpointError(unknown_run("run", typed, outputs.absolute()))
    refuse_odd_files(path)
    if not runs_in(path):
        raise NoCheckpointError(clip(f"run={typed}: neither a run nor a sweep"))
    return path
