"""Prepare, run and report a sweep: every job is checked before the first starts.

The report is read from the folders of the jobs, so it does not matter which launcher or process
ran a job, or whether the sweep was stopped half-way.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.utils import env_override
from rich.console import Console
from rich.table import Table

from trainer.checkpoint.status import read_status
from trainer.cli import saved_runs
from trainer.cli.compose import CONFIG_NAME, Composer, Job
from trainer.cli.exit_messages import print_error, print_out
from trainer.cli.overrides import classify, dotted, expand, parse, quote, read, without, word_of
from trainer.cli.start import must_stage, run_and_report, write_config
from trainer.config.messages import line, show
from trainer.config.run_config import READING
from trainer.core.durable import read_json, write_file_atomic
from trainer.core.errors import INTERRUPTED, ConfigError, Preempted, TrainError
from trainer.core.own_code import OWN_CODE
from trainer.core.signals import raise_on_interrupt
from trainer.report.page import write_own_page
from trainer.report.run_status import staged

# The only sweeper that runs every combination of the values; Hydra names it by a private module.
_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
_LOGGING = "hydra/hydra_logging"
_TITLES = {"tokens_per_second": "tokens/s"}


def run_sweep(lines: Sequence[str], composer: Composer) -> int:
    """Run every job of a sweep as typed, report them all, and give the exit code.

    Raises:
        ConfigError: one line per fault, of whichever job; none was started.
    """
    if "LOCAL_RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("-m: a sweep starts its own ranks; run it without torchrun")
    overrides, faults = parse(lines)
    codes: list[int] = []
    all_done = interrupted = False
    with composer.open(overrides) as hydra:
        sweep = prepare_sweep(overrides, faults, composer)
        raise_on_interrupt()
        try:
            # Launchers start Python with `-m`, which has the current folder first.
            safe = {"PYTHONSAFEPATH": os.environ.get("PYTHONSAFEPATH", "1")}
            task = _task_of(sweep, composer, codes)
            with env_override(safe):
                hydra.multirun(CONFIG_NAME, task, [*sweep.lines])
        except KeyboardInterrupt:
            interrupted = True
        finally:
            is_train = sweep.command == "train"
            all_done = not is_train or report(sweep.folder, sweep.jobs, Console())
    if interrupted:
        return Preempted.exit_code if Preempted.exit_code in codes else INTERRUPTED
    return 1 if any(codes) or not all_done else 0


@final
@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A checked sweep."""

    command: str  # what each of its jobs does
    jobs: Sequence[Sequence[str]]  # overrides of each; none where a sweeper chooses as it goes
    lines: Sequence[str]  # the overrides Hydra gets, several values in some of them
    folder: Path
    goes_on: bool  # `resume=auto` was typed


def prepare_sweep(overrides: Sequence[Override], faults: list[str], composer: Composer) -> Sweep:
    """Check every job of a sweep, over a composer that is open.

    Raises:
        ConfigError: one line per fault, of whichever job.
    """
    resume, command = word_of(overrides, "resume"), word_of(overrides, "command")
    if resume not in (None, saved_runs.AUTO):
        faults.append(line("resume", resume, "every job has its own folder; use resume=auto"))
    if command in READING or any(override.key_or_group == "run" for override in overrides):
        faults.append("-m: a sweep can only train; run this command without -m, once for each run")
    parts = classify(without(overrides, "resume"), composer.groups)
    hydra, jobs = parse(parts.hydra)[0], expand(parts.lines)
    checked: list[Job] = []
    faults += parts.faults
    for each in jobs:
        try:
            checked.append(composer.check([*hydra, *parse(each)[0]]))
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(*dict.fromkeys(faults))
    first = checked[0]
    lines = _with_absolute_paths(parts.lines, checked)
    folder = Path(str(first.composed.hydra.sweep.dir)).absolute()
    is_planned = first.composed.hydra.sweeper._target_ == _BASIC_SWEEPER
    if resume:
        if not is_planned:
            raise ConfigError("resume=auto: this sweeper chooses its jobs anew; leave resume out")
        outputs = Path(first.config.outputs).absolute()
        folder = saved_runs.newest_sweep(outputs, lines) or folder
    goes_on = resume is not None and folder.exists()
    own = [
        *(each for each in parts.hydra if not each.startswith("hydra.sweep.dir=")),
        f"hydra.sweep.dir={quote(folder)}",
        f"hydra.output_subdir={saved_runs.RESUMED if goes_on else saved_runs.SUBFOLDER}",
    ]
    own += [] if any(_LOGGING in each for each in own) else [f"{_LOGGING}=none"]
    return Sweep(
        command=first.config.command,
        jobs=expand(lines) if is_planned else (),
        lines=(*own, *lines),
        folder=folder,
        goes_on=resume is not None,
    )


def _with_absolute_paths(lines: Sequence[str], jobs: Sequence[Job]) -> list[str]:
    """Take overrides as the jobs were checked with them: with paths that are absolute."""
    checked: dict[str, dict[str, None]] = {}
    for override in (each for job in jobs for each in parse(job.lines)[0]):
        checked.setdefault(dotted(override), {})[override.input_line or ""] = None
    found = []
    for typed in lines:
        override = read(typed)
        own = [*checked.get(dotted(override), {typed: None})]
        values = [each.partition("=")[2] for each in own]
        if not override.is_sweep_override():
            found.append(own[0])
        elif override.is_choice_sweep() and any(v.lstrip("'").startswith(os.sep) for v in values):
            found.append(f"++{dotted(override)}={','.join(values)}")
        else:
            found.append(typed)
    return found


def _task_of(sweep: Sweep, composer: Composer, codes: list[int]) -> Callable[[Any], float]:
    """Make Hydra's task of a job; it gives the held-out loss, which sweepers minimise, or inf."""
    common = set.intersection(*map(set, sweep.jobs)) if len(sweep.jobs) > 1 else set()
    here, safe = OWN_CODE.folder, os.environ.get("PYTHONSAFEPATH")

    def task(_: object) -> float:
        OWN_CODE.folder = here  # a launcher may have started another process
        if safe is None:  # what the user's code starts is their own matter
            os.environ["PYTHONSAFEPATH"] = ""  # off
        record = HydraConfig.get()
        folder = Path(record.runtime.output_dir)
        number = f"{record.job.num} of {len(sweep.jobs)}" if sweep.jobs else record.job.num
        swept = (each.lstrip("+") for each in record.overrides.task if each not in common)
        print_out(f"job {number}: {' '.join(swept)}\n")
        code = _run_job(record.overrides.task, folder, composer, goes_on=sweep.goes_on)
        loss = _loss(read_json(folder / "result.json")) if code == 0 else math.inf
        shown = f", held-out loss {loss:.4f}" if math.isfinite(loss) else ""
        # Those of jobs that run at once come in any order.
        print_out(f"job {record.job.num}: exit code {code}{shown}\n")
        codes.append(code)
        if code == Preempted.exit_code:
            raise KeyboardInterrupt
        return loss

    return task


def _run_job(lines: Sequence[str], folder: Path, composer: Composer, *, goes_on: bool) -> int:
    """Run one job in its folder, which Hydra made, or went on with, and give the exit code."""
    from trainer.report.console import BRIEF  # noqa: PLC0415 - imports torch

    try:
        overrides, faults = parse(lines)
        config = composer.check(overrides, faults).config
        if config.wandb.group is None:
            wandb = config.wandb.model_copy(update={"group": folder.parent.name})
            config = config.model_copy(update={"wandb": wandb})
        if goes_on and saved_runs.has_checkpoint(folder):
            saved_runs.refuse_changes(folder, config)
            config = config.model_copy(update={"resume": str(folder)})
            if saved_runs.is_finished(folder, config):
                return 0
        with staged(folder) if must_stage(config, folder) else nullcontext(folder) as records:
            write_config(config, records, folder)
            with env_override({BRIEF: "1"} if config.command == "train" else {}):
                return run_and_report(config, folder)
    except TrainError as error:
        return print_error(error)


def report(folder: Path, planned: Sequence[Sequence[str]], console: Console) -> bool:
    """Show the table of a sweep, and write `sweep.csv` and `sweep.png`.

    Args:
        folder: the sweep folder; nothing is written if it does not exist.
        planned: overrides of the jobs that were to run; none where the sweeper chooses as it goes.
        console: where the table goes.

    Returns:
        Whether every job is completed.
    """
    folders = [path.parent for path in folder.glob("*/.hydra")]
    found = {int(n[0]): path for path in folders if (n := re.match(r"\d+", path.name))}
    count = max([len(planned), *(number + 1 for number in found)])
    typed = [_overrides(found.get(n), planned[n] if n < len(planned) else ()) for n in range(count)]
    # The keys that differ between jobs, in the order they were typed.
    keys = list(dict.fromkeys(key for each in typed for key in each))
    keys = [key for key in keys if len({each.get(key) for each in typed}) > 1]
    rows = [
        {"job": n, **{key: each.get(key, "") for key in keys}, **_ended(found.get(n))}
        for n, each in enumerate(typed)
    ]
    columns = dict.fromkeys(name for row in rows for name in row)  # jobs may have other metrics
    rows = [columns | row for row in rows]
    if rows:
        console.print(_table(rows))
    if rows and folder.is_dir():
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_file_atomic(folder / "sweep.csv", text.getvalue().encode())
        files = "sweep.csv and sweep.png" if _plot(folder, rows, keys) else "sweep.csv"
        console.print(f"[dim]{files} in[/] {folder}", soft_wrap=True)
        write_own_page(folder)
    return all(row["state"] == saved_runs.COMPLETED for row in rows)


def _overrides(folder: Path | None, planned: Sequence[str]) -> dict[str, str]:
    """Give what a job ran with, or is to run with, by dotted key."""
    record = None if folder is None else folder / ".hydra" / "overrides.yaml"
    typed = yaml.safe_load(record.read_text()) if record and record.is_file() else None
    pairs = (line.lstrip("+").partition("=") for line in typed or planned)
    return {key.replace("/", "."): value for key, _, value in pairs}


def _ended(folder: Path | None) -> dict[str, Any]:
    """Give how a job ended by its records; a `None` folder is of a job that never started."""
    status = {"state": "not started"} if folder is None else read_status(folder)
    result = {} if folder is None else read_json(folder / "result.json")
    metrics = result.get("metrics")
    pairs = metrics.items() if isinstance(metrics, dict) else ()
    named = {f"eval_{n.removeprefix('eval_')}": v for n, v in pairs if isinstance(v, int | float)}
    figures = {"step": status.get("step"), **result}
    names = dict.fromkeys(["step", "loss", "eval_loss", *named, "tokens_per_second", "seconds"])
    return {
        "state": str(status.get("state", "failed")),
        "exit_code": status.get("exit_code"),
        **{name: (named | figures).get(name) for name in names},
        "folder": folder,
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="sweep", title_justify="left", box=None, pad_edge=False)
    shown = [name for name in rows[0] if name not in ("exit_code", "folder")]
    for name in shown:
        title = _TITLES.get(name, name).replace(".", ".\n").replace("eval_", "held-out\n")
        table.add_column(title, justify="left" if name == "state" else "right", overflow="fold")
    best = min(map(_loss, rows))
    for row in rows:
        cells = ("-" if (cell := row[name]) is None else cell for name in shown)
        texts = (f"{cell:,.6g}" if isinstance(cell, float) else show(cell) for cell in cells)
        table.add_row(*texts, style="bold green" if _loss(row) == best < math.inf else "")
    return table


def _loss(record: Mapping[str, Any]) -> float:
    """Read the held-out loss of a job; infinity where there is none."""
    value = record.get("eval_loss")
    return float(value) if isinstance(value, int | float) else math.inf


def _plot(folder: Path, rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> bool:
    """Draw the held-out loss of each job, by what differs; false where no job has any."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import

    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    ended = [row for row in rows if math.isfinite(_loss(row))]
    labels = ["\n".join(f"{key}={row[key]}" for key in keys or ["job"]) for row in ended]
    figure = Figure(figsize=(max(7, len(ended)), 4.2), layout="constrained")
    axes = figure.add_subplot(ylabel="held-out loss")
    axes.plot([*map(_loss, ended)], "o")
    axes.set_xticks(range(len(ended)), labels, rotation=30, ha="right")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=144)
    write_file_atomic(folder / "sweep.png", image.getvalue())
    return bool(ended)
