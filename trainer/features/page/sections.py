"""Gather what a run's records say, as rows of texts: figures, notes, samples, machine, config."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.config.messages import show
from trainer.config.metric_mode import is_comparable, mode_of, rank, title_of
from trainer.config.secrets import without_secrets
from trainer.core.errors import ConfigError
from trainer.core.format import duration, loss, number, plural, short, size
from trainer.core.run_folder import RunFolder
from trainer.features.page.saved_run import SavedRun, as_mapping, is_number, numbers_of

_MOST_JOBS = 500
_MOST_LETTERS = 100_000  # of a traceback
_NAMES = ("name", "run", "resume", "outputs", "unset")

TableRows = Sequence[Sequence[str]]


def facts(run: SavedRun) -> list[str]:
    """Say when a run began, how long it took, what it trains, and from where it went on."""
    found = [
        run.started,
        duration(run.seconds) + " of steps and evaluations" if run.seconds else None,
        str(run.config.get("model._target_") or "").rpartition(".")[2],
        *run.continuation,
    ]
    return [each for each in found if each]


def ending(run: SavedRun) -> str | None:
    """Say why it ended."""
    code, reason = run.status.get("exit_code"), run.status.get("reason")
    reason = reason or run.result.get("stopped")
    return reason and without_secrets(f"exit {code}: {reason}" if code else str(reason), os.environ)


def traceback(run: SavedRun) -> str:
    """Give the traceback, of the first rank that left one, of a run that failed."""
    found = (run.folder / RunFolder.ERRORS).glob("rank*.txt")
    files = sorted(found) if run.state == "failed" else []
    with suppress(OSError):
        for file in filter(Path.is_file, files):
            with file.open(errors="replace") as lines:
                return without_secrets(lines.read(_MOST_LETTERS), os.environ)
    return ""


def figures(run: SavedRun) -> list[tuple[str, str, str | None]]:
    """Give the figures that a person looks for first: name, value, note."""
    plan, result, best = numbers_of(run.plan), numbers_of(run.result), run.best
    speed = result.get("tokens_per_second") or run.last("tokens_per_second")
    planned, peak = plan.get("steps"), run.peak_bytes
    peak_of = "of the whole process" if run.plan.get("device") == "cpu" else "of tensors"
    tiles = [
        ("training loss", _loss(run.last("loss")), None),
        (
            "held-out loss",
            _loss(run.last("eval_loss")),
            f"best {loss(best[0])} at step {number(best[1])}" if best else None,
        ),
        *_metrics(run),
        ("steps", number(run.last_step), f"of {number(planned)} planned" if planned else None),
        (f"{run.noun}s per second", short(speed) if speed else None, None),
        ("peak memory", size(peak) if peak else None, peak_of),
        ("skipped steps", _count(run, "skipped"), "without an update"),
        ("replays", _count(run, "replays"), "after memory ran out"),
    ]
    return [(name, value, note) for name, value, note in tiles if value is not None]


def _metrics(run: SavedRun) -> Iterator[tuple[str, str, str | None]]:
    """Give the last evaluation's other figures, at most three, and the best of what is followed."""
    names = (n for e in run.evaluations[-1:] for n, v in e.items() if is_number(v))
    others = (n for n in names if n not in ("step", "eval_loss", "eval_seconds"))
    for name in islice(others, 3):
        yield name.removeprefix("eval_").replace("_", " "), f"{run.last(name):.4g}", None
    found = as_mapping(run.result.get("best"))
    name, value = str(found.get("metric")).removeprefix("eval_"), found.get("value")
    if is_number(value) and name != "loss":  # which has its best beside it
        yield f"best {name.replace('_', ' ')}", f"{value:.4g}", f"at step {found.get('step')}"


def _count(run: SavedRun, name: str) -> str | None:
    count = sum(1 for entry in run.steps if name in entry)
    return number(count) if count else None


def _loss(value: float | None) -> str | None:
    return None if value is None else loss(value)


def notes(run: SavedRun) -> list[tuple[str, str]]:
    """List warnings of the plan, where a run lost time, and what its noise says of the batch."""
    result = run.result
    return [
        *(("warning", each) for each in _texts(run.plan.get("warnings"))),
        *(("time", each) for each in _texts(result.get("advice"))),
        *(("noise", each) for each in _texts([result.get("batch_advice")])),
    ]


def samples(run: SavedRun) -> list[tuple[str, str]]:
    """List the samples with the largest loss: facts and text."""
    items = []
    for line in run.worst:
        label, prediction = (cell_text(line.get(key)) for key in ("label", "prediction"))
        known = [
            f"loss {cell_text(line['loss']) or 'not finite'}",
            f"id {cell_text(line.get('id'))}",
            f"in {line['set']}" if line.get("set") else "",
            plural(line["terms"], "loss term") if is_number(line.get("terms")) else "",
            f"label {label}" if label else "",
            f"predicted {prediction}" if prediction else "",
        ]
        items.append((" · ".join(filter(None, known)), cell_text(line.get("text"))))
    return items


def baselines(run: SavedRun) -> TableRows:
    """Set the held-out loss beside those of simple models."""
    own, others = run.result.get("eval_loss"), numbers_of(run.result.get("baselines"))
    if not others or not is_number(own):
        return []
    return [("this run", loss(own), "")] + [
        (n, loss(v), f"{abs(v - own):.4f} {'better' if own <= v else 'worse'}")
        for n, v in others.items()
    ]


def machine(run: SavedRun) -> TableRows:
    """Say what the run ran on: versions, revision, hardware; no host's name."""
    found = as_mapping(RunFolder(run.folder).terms().get("environment"))
    hardware, git = as_mapping(found.get("hardware")), as_mapping(found.get("git"))
    rows = {
        "cpu": f"{hardware.get('cpu')}, {hardware.get('cores')} cores" if hardware else "",
        "gpus": ", ".join(_texts(hardware.get("gpus"))),
        "memory": size(numbers_of(hardware).get("memory_bytes")) if hardware else "",
        "system": hardware.get("system"),
        "git": git.get("commit"),
        **as_mapping(found.get("versions")),
    }
    return [(name, str(value)) for name, value in rows.items() if value]


def settings(run: SavedRun) -> TableRows:
    """Give the whole config."""
    return [(key, show(value)) for key, value in run.config.items()]


def comparison(runs: Sequence[SavedRun], names: Sequence[str]) -> dict[str, Any]:
    """Set runs side by side by their last figures and the keys that differ, the best first.

    Figures of other held-out samples, or of other tokens of them, do not tell which is the best.
    """
    configs = [
        {
            key.removesuffix("._target_"): re.sub(r"^trainer\.(.*\.)?", "", show(value))
            for key, value in run.config.items()
            if not key.startswith("choices.")  # each of which is a `_target_`, or values, too
        }
        for run in runs
    ]
    keys = dict.fromkeys(key for config in configs for key in config)
    different = [k for k in keys if k not in _NAMES and len({c.get(k, "") for c in configs}) > 1]
    metric, is_max = ranked_by(runs)
    entries = (entry for run in runs for each in run.evaluations for entry in each.items())
    others = (n for n, v in entries if n.startswith("eval_") and is_number(v))
    figures = dict.fromkeys(("loss", "eval_loss", metric, *others))
    figures.pop("eval_seconds", None)
    order, best = f"the best {metric} first", [*range(len(runs))]
    if not is_comparable(metric, [RunFolder(run.folder) for run in runs]):
        order = f"not ranked: {metric} is of other held-out samples, or other tokens of them"
    else:
        ranks = [rank(run.last(metric), run.state, is_max=is_max) for run in runs]
        best.sort(key=ranks.__getitem__)
    rows = []
    for n in best[:_MOST_JOBS]:
        run, config = runs[n], configs[n]
        cells = [number(run.last_step), *(_loss(run.last(name)) or "" for name in figures)]
        cells += [duration(run.seconds), *(config.get(key, "") for key in different)]
        rows.append((n, names[n].partition(": ")[0], run.state, cells))
    head = ["run", "state", "steps done", *map(title_of, figures), "time", *different]
    return {"head": head, "rows": rows, "order": order}


def ranked_by(runs: Sequence[SavedRun]) -> tuple[str, bool]:
    """Name the metric that runs are ranked by, and whether more of it is better."""
    config = runs[0].config
    metric, mode = str(config.get("sweep.metric", "eval_loss")), config.get("sweep.mode", "auto")
    with suppress(ConfigError):  # of an odd name
        return metric, mode_of("", metric, mode, "") == "max"
    return metric, False


def cell_text(value: object) -> str:
    """Write any value of a record, without secrets, and not at any length."""
    if value is None:
        return ""
    found = f"{value:.4g}" if isinstance(value, float) else value
    return without_secrets(found if isinstance(found, str) else show(found), os.environ)[:2000]


def _texts(value: object) -> list[str]:
    found = value if isinstance(value, list) else []
    return [each for each in found if isinstance(each, str)]
