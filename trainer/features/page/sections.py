"""Gather what a run's records say, as rows of texts: figures, notes, samples, machine, config."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from trainer.config.messages import show
from trainer.config.metric_mode import is_comparable, mode_of, rank, title_of
from trainer.config.secrets import without_secrets
from trainer.core.errors import ConfigError
from trainer.core.format import duration, loss, number, plural, short, size
from trainer.core.run_folder import RunFolder
from trainer.features.page.saved_run import SavedRun, as_list, as_mapping, is_number, numbers_of

_MOST_JOBS = 500
_MOST_LETTERS, _MOST_CELL = 100_000, 2000  # of a traceback, and of any other text
_NAMES = ("name", "run", "resume", "outputs", "unset")

TableRows = Sequence[Sequence[str]]


def facts(run: SavedRun) -> list[str]:
    """Say when a run began, how long it took, what it trains, and from where it went on."""
    length, model = "", str(run.config.get("model._target_") or "").rpartition(".")[2]
    if run.seconds:
        length = f"{duration(run.seconds)} of steps and evaluations"
    return [*filter(None, (run.started, length, model, *run.continuation()))]


def ending(run: SavedRun) -> str | None:
    """Say why it ended."""
    if not (reason := run.status.get("reason") or run.result.get("stopped")):
        return None
    if code := run.status.get("exit_code"):
        reason = f"exit {code}: {reason}"
    return without_secrets(str(reason), os.environ)


def traceback(run: SavedRun) -> str:
    """Give the traceback, of the first rank that left one, of a run that failed."""
    if run.state != "failed":
        return ""
    files = sorted((run.folder / RunFolder.ERRORS).glob("rank*.txt"))
    with suppress(OSError):
        for file in filter(Path.is_file, files):
            with file.open(errors="replace") as lines:
                return without_secrets(lines.read(_MOST_LETTERS), os.environ)
    return ""


def figures(run: SavedRun) -> list[tuple[str, str, str | None]]:
    """Give the figures that a person looks for first: name, value, note."""
    tiles = list[tuple[str, str, str | None]]()
    if (trained := run.last("loss")) is not None:
        tiles.append(("training loss", loss(trained), None))
    if (held_out := run.last("eval_loss")) is not None:
        note = None
        if best := run.best():
            note = f"best {loss(best[0])} at step {number(best[1])}"
        tiles.append(("held-out loss", loss(held_out), note))
    tiles += _metrics(run)
    note = None
    if planned := numbers_of(run.plan).get("steps"):
        note = f"of {number(planned)} planned"
    tiles.append(("steps", number(run.last_step), note))
    name = "tokens_per_second"
    if speed := numbers_of(run.result).get(name) or run.last(name):
        tiles.append((f"{run.noun}s per second", short(speed), None))
    if peak := run.peak_bytes():
        # On a GPU torch counts what its tensors take; on a CPU the system counts all of a process.
        note = "of tensors"
        if run.plan.get("device") == "cpu":
            note = "of the whole process"
        tiles.append(("peak memory", size(peak), note))
    if count := sum("skipped" in entry for entry in run.steps):
        tiles.append(("skipped steps", number(count), "without an update"))
    if count := sum("replays" in entry for entry in run.steps):
        tiles.append(("replays", number(count), "after memory ran out"))
    return tiles


def _metrics(run: SavedRun) -> Iterator[tuple[str, str, str | None]]:
    """Give the last evaluation's other figures, at most three, and the best of what is followed."""
    last = dict[str, float]()
    if run.evaluations:
        last = numbers_of(run.evaluations[-1])
    for name in ("step", "eval_loss", "eval_seconds"):
        last.pop(name, None)
    for name in islice(last, 3):
        yield name.removeprefix("eval_").replace("_", " "), f"{run.last(name):.4g}", None
    found = as_mapping(run.result.get("best"))
    name, value = str(found.get("metric")).removeprefix("eval_"), found.get("value")
    # The held-out loss has its best beside it.
    if is_number(value) and name != "loss":
        yield f"best {name.replace('_', ' ')}", f"{value:.4g}", f"at step {found.get('step')}"


def notes(run: SavedRun) -> list[tuple[str, str]]:
    """List warnings of the plan, where a run lost time, and what its noise says of the batch."""
    records = {"warning": run.plan.get("warnings"), "time": run.result.get("advice")}
    records["noise"] = [run.result.get("batch_advice")]
    found = list[tuple[str, str]]()
    for kind, record in records.items():
        found += [(kind, text) for text in _texts(record)]
    return found


def samples(run: SavedRun) -> list[tuple[str, str]]:
    """List the samples with the largest loss: facts and text."""
    items = []
    for line in run.worst:
        known = [f"loss {cell_text(line['loss']) or 'not finite'}"]
        known.append(f"id {cell_text(line.get('id'))}")
        if line.get("set"):
            known.append(f"in {line['set']}")
        if is_number(line.get("terms")):
            known.append(plural(line["terms"], "loss term"))
        for key, word in (("label", "label"), ("prediction", "predicted")):
            if text := cell_text(line.get(key)):
                known.append(f"{word} {text}")
        items.append((" · ".join(known), cell_text(line.get("text"))))
    return items


def baselines(run: SavedRun) -> TableRows:
    """Set the held-out loss beside those of simple models."""
    own, others = run.result.get("eval_loss"), numbers_of(run.result.get("baselines"))
    if not others or not is_number(own):
        return []
    rows = [("this run", loss(own), "")]
    for name, value in others.items():
        verdict = "better" if own <= value else "worse"
        rows.append((name, loss(value), f"{abs(value - own):.4f} {verdict}"))
    return rows


def machine(run: SavedRun) -> TableRows:
    """Say what the run ran on: versions, revision, hardware; no host's name."""
    found = as_mapping(RunFolder(run.folder).terms().get("environment"))
    hardware, git = as_mapping(found.get("hardware")), as_mapping(found.get("git"))
    rows = dict[str, Any]()
    if hardware:
        rows["cpu"] = f"{hardware.get('cpu')}, {hardware.get('cores')} cores"
        rows["gpus"] = ", ".join(_texts(hardware.get("gpus")))
        rows["memory"] = size(numbers_of(hardware).get("memory_bytes"))
        rows["system"] = hardware.get("system")
    rows |= {"git": git.get("commit"), **as_mapping(found.get("versions"))}
    known = list[tuple[str, str]]()
    for name, value in rows.items():
        if value:
            known.append((name, str(value)))
    return known


def settings(run: SavedRun) -> TableRows:
    """Give the whole config."""
    return [(key, show(value)) for key, value in run.config.items()]


def comparison(runs: Sequence[SavedRun], names: Sequence[str]) -> dict[str, Any]:
    """Set runs side by side by their last figures and the keys that differ, the best first.

    Figures of other held-out samples, or of other tokens of them, do not tell which is the best.
    """
    metric, is_max = ranked_by(runs)
    configs, figures = list[dict[str, str]](), dict.fromkeys(("loss", "eval_loss", metric))
    for run in runs:
        configs.append(_words_of(run))
        for name in chain.from_iterable(map(numbers_of, run.evaluations)):
            if name.startswith("eval_"):
                figures[name] = None
    figures.pop("eval_seconds", None)
    different = list[str]()
    for key in dict.fromkeys(chain.from_iterable(configs)):
        if key not in _NAMES and len({config.get(key, "") for config in configs}) > 1:
            different.append(key)
    order, best = f"the best {metric} first", [*range(len(runs))]
    if not is_comparable(metric, [RunFolder(run.folder) for run in runs]):
        order = f"not ranked: {metric} is of other held-out samples, or other tokens of them"
    else:
        ranks = [rank(run.last(metric), run.state, is_max=is_max) for run in runs]
        best.sort(key=ranks.__getitem__)
    rows = []
    for n in best[:_MOST_JOBS]:
        run, config = runs[n], configs[n]
        cells = [number(run.last_step)]
        for name in figures:
            value = run.last(name)
            cells.append("" if value is None else loss(value))
        cells += [duration(run.seconds), *(config.get(key, "") for key in different)]
        rows.append((n, names[n].partition(": ")[0], run.state, cells))
    head = ["run", "state", "steps done", *map(title_of, figures), "time", *different]
    return {"head": head, "rows": rows, "order": order}


def _words_of(run: SavedRun) -> dict[str, str]:
    """Write each setting of a run as a cell shows it."""
    words = dict[str, str]()
    for key, value in run.config.items():
        # Each choice is a `_target_`, or values, too.
        if not key.startswith("choices."):
            # Of our own classes the last part of the name is enough.
            word = re.sub(r"^trainer\.(.*\.)?", "", show(value))
            words[key.removesuffix("._target_")] = word
    return words


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
    if isinstance(value, str):
        text = value
    elif isinstance(value, float):
        text = f"{value:.4g}"
    else:
        text = show(value)
    # Before it is cut: a part of a secret is no longer known as one.
    return without_secrets(text, os.environ)[:_MOST_CELL]


def _texts(value: object) -> list[str]:
    texts = list[str]()
    for each in as_list(value):
        if isinstance(each, str):
            texts.append(each)
    return texts
