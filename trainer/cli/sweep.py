"""Prepare, run and report a sweep: every job is checked before the first starts.

The report is read from the folders of the jobs, so it does not matter which launcher or process
ran a job, or whether the sweep was stopped half-way.
"""

from __future__ import annotations

import csv
import io
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from hydra.core.override_parser.types import Override
from hydra.core.utils import env_override
from hydra.errors import HydraException
from rich.console import Console
from rich.table import Table

from trainer.cli import launchers, saved_runs, sweep_jobs
from trainer.cli.compose import CONFIG_NAME, Composer, Job
from trainer.cli.exit_messages import print_error
from trainer.cli.overrides import (
    classify,
    cover,
    distinct,
    dotted,
    expand,
    parse,
    quote,
    read_override,
    without,
    word_of,
)
from trainer.config.messages import clip, line, show
from trainer.config.metric_mode import is_comparable, mode_of, rank, title_of
from trainer.config.run_config import READING
from trainer.core.durable import write_file_atomic
from trainer.core.errors import INTERRUPTED, ConfigError, Preempted, TrainError
from trainer.core.run_folder import RunFolder
from trainer.core.signals import raise_on_interrupt
from trainer.report.views import views, write_views

_LOGGING = "hydra/hydra_logging"
_AT_USR1 = {"SUBMITIT_PREEMPT_SIGNAL": "USR1"}  # at which a run saves
_TITLES = {"tokens_per_second": "tokens/s"}


def run_sweep(lines: Sequence[str], composer: Composer, faults: Sequence[str] = ()) -> int:
    """Run every job of a sweep as typed, report them all, and give the exit code.

    `faults` were found earlier, of what was typed. With a fault in any job none is started.
    """
    if "LOCAL_RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("-m: a sweep starts its own ranks; run it without torchrun")
    overrides, wrong = parse(lines, is_typed=True)
    interrupted = failed = False
    with composer.open(overrides) as hydra:
        sweep = prepare_sweep(overrides, [*faults, *wrong], composer)
        raise_on_interrupt()
        try:
            if not sweep.jobs:
                launchers.begin_search(sweep.sweeper, sweep.folder, sweep.typed, sweep.storage)
            # Launchers start Python with `-m`, which has the current folder first.
            safe = {"PYTHONSAFEPATH": os.environ.get("PYTHONSAFEPATH", "1"), **_AT_USR1}
            passing = (
                sweep_jobs.passing_signals_on(sweep.folder) if sweep.is_parallel else nullcontext()
            )
            with env_override(safe), passing:
                hydra.multirun(
                    CONFIG_NAME, sweep_jobs.SweepTask.of(sweep, composer), [*sweep.lines]
                )
            launchers.tidy(sweep.folder)
        except KeyboardInterrupt:
            interrupted = True
        except Exception as error:  # of a launcher or sweeper, which may be anybody's
            if isinstance(error, (TrainError, HydraException)):
                raise
            failed = True
            print_error(TrainError(f"-m: {type(error).__name__}: {clip(str(error))}"))
        finally:
            codes = _exit_codes(sweep)
            if sweep.command == "train":
                report(sweep, Console())
    if interrupted or (sweep.is_parallel and (sweep.folder / sweep_jobs.STOP_FILE).exists()):
        return Preempted.exit_code if Preempted.exit_code in codes else INTERRUPTED
    return 1 if failed or {*codes} - {0, Preempted.exit_code} else max(codes, default=0)


def prepare_sweep(
    overrides: Sequence[Override], faults: list[str], composer: Composer
) -> sweep_jobs.Sweep:
    """Check every job of a sweep, over a composer that is open."""
    resume, command = word_of(overrides, "resume"), word_of(overrides, "command")
    if resume not in (None, saved_runs.AUTO):
        faults.append(line("resume", resume, "every job has its own folder; use resume=auto"))
    if command in READING or any(override.key_or_group == "run" for override in overrides):
        faults.append("-m: a sweep can only train; run this command without -m, once for each run")
    parts = classify(without(overrides, "resume"), composer.groups)
    hydra = parse(parts.hydra)[0]
    # A search could have more combinations than anybody can check.
    sweeper = composer.compose(parts.hydra).hydra.sweeper._target_
    jobs = expand(parts.lines) if sweeper == launchers.BASIC_SWEEPER else cover(parts.lines)
    checked: list[Job] = []
    faults += parts.faults
    for each in jobs:
        try:
            checked.append(composer.check([*hydra, *parse(each)[0]]))
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(*distinct(faults))
    first = checked[0]
    metric, mode = first.config.sweep.metric, first.config.sweep.mode
    lines, record = _with_absolute_paths(parts.lines, checked), first.composed.hydra
    folder = _folder_of(first, lines, goes_on=resume is not None)
    goes_on = resume is not None and folder.exists()
    slots = launchers.slots_of(
        checked, record, folder, len(jobs) if sweeper == launchers.BASIC_SWEEPER else None
    )
    direction = mode_of("sweep.metric", metric, mode, "sweep.mode")
    own = [
        *(each for each in parts.hydra if not each.startswith("hydra.sweep.dir=")),
        f"hydra.sweep.dir={quote(folder)}",
        f"hydra.output_subdir={RunFolder.RESUMED if goes_on else RunFolder.HYDRA}",
        *launchers.settings_of(record, parts.hydra, slots, seed=first.config.seed),
    ]
    own += [] if any(_LOGGING in each for each in own) else [f"{_LOGGING}=none"]
    return sweep_jobs.Sweep(
        command=first.config.command,
        jobs=expand(lines) if sweeper == launchers.BASIC_SWEEPER else (),
        lines=(*own, *lines),
        folder=folder,
        goes_on=resume is not None,
        metric=metric,
        mode=direction,
        sweeper=sweeper,
        storage=record.sweeper.get("storage"),
        typed=lines,
        slots=slots,
        is_parallel=record.launcher._target_ != launchers.BASIC_LAUNCHER,
    )


def _folder_of(first: Job, lines: Sequence[str], *, goes_on: bool) -> Path:
    """Choose the folder of a sweep: the newest of the same words, or a new one."""
    record, found = first.composed.hydra, None
    if goes_on:
        launchers.refuse_other_jobs(record)
        outputs = Path(first.config.outputs).absolute()
        found = saved_runs.newest_sweep(
            outputs, lines, launchers.typed_file(record.sweeper._target_)
        )
    return found or Path(str(record.sweep.dir)).absolute()


def _with_absolute_paths(lines: Sequence[str], jobs: Sequence[Job]) -> list[str]:
    """Take overrides as the jobs were checked with them: with paths that are absolute."""
    checked: dict[str, dict[str, None]] = {}
    for override in (each for job in jobs for each in parse(job.lines)[0]):
        checked.setdefault(dotted(override), {})[override.input_line or ""] = None
    found = []
    for typed in lines:
        override = read_override(typed)
        own = [*checked.get(dotted(override), {typed: None})]
        values = [each.partition("=")[2] for each in own]
        if not override.is_sweep_override():
            found.append(own[0])
        elif override.is_choice_sweep() and any(v.lstrip("'").startswith(os.sep) for v in values):
            found.append(f"++{dotted(override)}={','.join(values)}")
        else:
            found.append(typed)
    return found


def _folders(sweep: Path) -> dict[int, Path]:
    """Find the folders of a sweep's jobs, by number."""
    folders = [path.parent for path in sweep.glob(f"*/{RunFolder.HYDRA}")]
    return {int(n[0]): path for path in folders if (n := re.match(r"\d+", path.name))}


def _exit_codes(sweep: sweep_jobs.Sweep) -> list[Any]:
    """Read the exit code of every job, whichever process ran it; None where it did not end."""
    found = _folders(sweep.folder)
    count = len(sweep.jobs) or max(found, default=0) + 1
    ended = (RunFolder(found[n]).record(RunFolder.END) if n in found else {} for n in range(count))
    return [each.get("exit_code", 1) for each in ended]


def report(sweep: sweep_jobs.Sweep, console: Console) -> None:
    """Show the table of a sweep, best job first, and write `sweep.csv` and `sweep.png`.

    Where the sweep has no folder yet, nothing is written.
    """
    found, planned = _folders(sweep.folder), sweep.jobs
    count = max([len(planned), *(number + 1 for number in found)])
    folders = [found.get(n, sweep.folder / str(n)) for n in range(count)]
    typed = [_overrides(each, planned[n : n + 1]) for n, each in enumerate(folders)]
    # The keys that differ between jobs, in the order they were typed.
    keys = list(dict.fromkeys(key for each in typed for key in each))
    keys = [key for key in keys if len({each.get(key) for each in typed}) > 1]
    rows = [
        {"job": n, **{key: each.get(key, "") for key in keys}, **_ended(folder)}
        for n, (each, folder) in enumerate(zip(typed, folders, strict=True))
    ]
    # Jobs may have other metrics; what matters most comes first
    names = dict.fromkeys(["job", *keys, sweep.metric, "state", *(n for row in rows for n in row)])
    rows = _ranked([names | row for row in rows], sweep.metric, sweep.mode)
    if not rows:
        return
    left_out = _print_table(rows, keys, console)
    for note in _notes(rows, sweep.metric):
        console.print(note, markup=False, soft_wrap=True)
    if sweep.folder.is_dir():
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_file_atomic(sweep.folder / "sweep.csv", text.getvalue().encode())
        is_drawn = _plot(sweep.folder, rows, keys, sweep.metric)
        write_views(sweep.folder)
        if left_out:
            console.print(f"columns that do not fit, in sweep.csv: {', '.join(left_out)}")
        files = [view.file for view in views().values()]
        files += ["sweep.csv", *["sweep.png"] * is_drawn]
        console.print(f"[dim]{', '.join(files)} in[/] {sweep.folder}", soft_wrap=True)


def _notes(rows: Sequence[Mapping[str, Any]], metric: str) -> Iterator[str]:
    """Say why jobs did not complete, how to go on, and which metrics there are."""
    yield from (f"job {row['job']}: {row['reason']}" for row in rows if row["reason"])
    if any(row["state"] in (saved_runs.PREEMPTED, "not started") for row in rows):
        yield "to go on with the sweep, type the same command with resume=auto"
    if not is_comparable(metric, [RunFolder(row["folder"]) for row in rows if row["folder"]]):
        yield f"{metric} is of other held-out samples or tokens in some jobs: ranks do not compare"
    completed = [row for row in rows if row["state"] == saved_runs.COMPLETED]
    if completed and rows[0]["rank"] is None:
        given = [name for name, value in completed[0].items() if "eval_" in name and value]
        yield f"sweep.metric={metric}: no job has it; evaluations gave {', '.join(given) or 'none'}"


def _ranked(rows: Sequence[dict[str, Any]], metric: str, mode: str) -> list[dict[str, Any]]:
    """Put the best job first; those that did not complete with the metric have no rank."""

    def key(row: Mapping[str, Any]) -> tuple[int, float]:
        return rank(row.get(metric), row["state"], is_max=mode == "max")

    ordered = enumerate(sorted(rows, key=key), start=1)
    return [{"rank": None if key(row)[0] else n, **row} for n, row in ordered]


def _overrides(folder: Path, planned: Sequence[Sequence[str]]) -> dict[str, str]:
    """Give what a job ran with, or is to run with, by dotted key."""
    typed = RunFolder(folder).typed() or chain(*planned)
    pairs = (line.lstrip("+").partition("=") for line in typed)
    return {key.replace("/", "."): value for key, _, value in pairs}


def _ended(folder: Path) -> dict[str, Any]:
    """Give how a job ended by its records; it has none where it never started."""
    run = RunFolder(folder)
    status, ended = run.status(), run.record(RunFolder.END)
    return {
        "state": str(status.get("state", "failed" if ended else "not started")),
        "exit_code": status.get("exit_code", ended.get("exit_code")),
        **sweep_jobs.last_figures(folder),
        "reason": status.get("reason") or ended.get("reason"),
        "folder": folder if folder.is_dir() else None,
    }


def _print_table(
    rows: Sequence[Mapping[str, Any]], keys: Sequence[str], console: Console
) -> list[str]:
    """Print as many columns as fit, and return the titles of the others."""
    columns = [name for name in rows[0] if name not in ("exit_code", "folder", "reason")]
    wide, num_needed = console.options.update_width(10_000), len(keys) + 4
    fitting = (
        n
        for n in range(len(columns), num_needed, -1)
        if console.measure(_table(rows, columns[:n], keys), options=wide).maximum <= console.width
    )
    # At least what tells jobs apart, and which is best; all in a file.
    num_shown = next(fitting, num_needed) if console.is_terminal else len(columns)
    width = None if console.is_terminal else wide.max_width
    console.print(_table(rows, columns[:num_shown], keys), width=width, crop=console.is_terminal)
    return [*map(title_of, columns[num_shown:])]


def _table(rows: Sequence[Mapping[str, Any]], shown: Sequence[str], keys: Sequence[str]) -> Table:
    table = Table(title="sweep", title_justify="left", box=None, pad_edge=False)
    for name in shown:
        title = _TITLES.get(name, name).replace(".", ".\n").replace("eval_", "held-out\n")
        justify: Literal["left", "right"] = "left" if name == "state" else "right"
        table.add_column(
            title, justify=justify, overflow="fold", no_wrap=name not in keys, min_width=4
        )
    for row in rows:
        cells = ("-" if (cell := row[name]) is None else cell for name in shown)
        table.add_row(*map(_short, cells), style="bold green" if row["rank"] == 1 else "")
    return table


def _short(cell: object) -> str:
    """Write a figure, or a value that a search chose, with six digits."""
    text = show(cell)
    long = 10  # characters
    if isinstance(cell, float) or (len(text) > long and re.fullmatch(r"-?[\d.]+(e-?\d+)?", text)):
        return f"{float(text):,.6g}"
    return text


def _plot(
    folder: Path, rows: Sequence[Mapping[str, Any]], keys: Sequence[str], metric: str
) -> bool:
    """Draw the metric of each job, best first, by what differs; false where no job has any."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import

    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    ended = [row for row in rows if row["rank"] is not None]
    labels = ["\n".join(f"{key}={_short(row[key])}" for key in keys or ["job"]) for row in ended]
    figure = Figure(figsize=(max(7, len(ended)), 4.2), layout="constrained")
    axes = figure.add_subplot(ylabel=title_of(metric))
    axes.plot([row[metric] for row in ended], "o")
    axes.set_xticks(range(len(ended)), labels, rotation=30, ha="right")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=144)
    write_file_atomic(folder / "sweep.png", image.getvalue())
    return bool(ended)
