"""Lay out what a run's records say: figures, plan, memory, time, samples, config."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice

from trainer.config.messages import show
from trainer.config.metric_mode import mode_of, rank, title_of
from trainer.config.secrets import without_secrets
from trainer.core.errors import ConfigError
from trainer.core.format import duration, loss, number, plural, short, size
from trainer.report.page_html import Html, Piece, card, el, join, table
from trainer.report.page_runs import SavedRun, as_mapping, is_number, numbers_of

MOST_JOBS, MOST_FOLDED = 500, 50
_NAMES = ("name", "run", "resume", "outputs")


def figures(run: SavedRun) -> Html:
    """Show the figures that a person looks for first."""
    plan, result, best = numbers_of(run.plan), numbers_of(run.result), run.best
    speed = result.get("tokens_per_second") or run.last("tokens_per_second")
    planned, peak = plan.get("steps"), run.peak_bytes
    tiles = [
        ("training loss", _loss(run.last("loss")), None),
        (
            "held-out loss",
            _loss(run.last("eval_loss")),
            f"best {loss(best[0])} at step {number(best[1])}" if best else None,
        ),
        *_metrics(run),
        *_best(run),
        ("steps", number(run.last_step), f"of {number(planned)} planned" if planned else None),
        (f"{run.noun}s per second", short(speed) if speed else None, None),
        ("peak memory", size(peak) if peak else None, run.peak_of),
        ("skipped steps", _count(run, "skipped"), "without an update"),
        ("replays", _count(run, "replays"), "after memory ran out"),
    ]
    shown = [tile for tile in tiles if tile[1] is not None]
    return el(
        "dl",
        (
            el("div", el("dt", name), el("dd", value), note and el("dd", note, class_="note"))
            for name, value, note in shown
        ),
        class_="tiles",
    )


def _metrics(run: SavedRun) -> Iterator[tuple[str, str | None, None]]:
    """Give the last evaluation's other figures, at most three."""
    names = (n for e in run.evaluations[-1:] for n, v in e.items() if is_number(v))
    others = (n for n in names if n not in ("step", "eval_loss", "eval_seconds"))
    for name in islice(others, 3):
        yield name.removeprefix("eval_").replace("_", " "), f"{run.last(name):.4g}", None


def _best(run: SavedRun) -> Iterator[tuple[str, str | None, str]]:
    """Give the best value of the metric by which a checkpoint is kept; the loss has it anyway."""
    found = as_mapping(run.result.get("best"))
    name, value = str(found.get("metric")).removeprefix("eval_"), found.get("value")
    if is_number(value) and name != "loss":
        yield f"best {name.replace('_', ' ')}", f"{value:.4g}", f"at step {found.get('step')}"


def _count(run: SavedRun, name: str) -> str | None:
    count = sum(1 for entry in run.steps if name in entry)
    return number(count) if count else None


def _loss(value: float | None) -> str | None:
    return None if value is None else loss(value)


def notes(run: SavedRun) -> Html:
    """List warnings of the plan, where a run lost time, and what its noise says of the batch."""
    result = run.result
    found = [
        *(("warning", text) for text in _texts(run.plan.get("warnings"))),
        *(("time", text) for text in _texts(result.get("advice"))),
        *(("noise", text) for text in _texts([result.get("batch_advice")])),
    ]
    rows = (el("li", el("b", kind), el("span", text), class_=kind) for kind, text in found)
    return card("Worth knowing", el("ul", rows, class_="notes") if found else None)


def samples(run: SavedRun) -> Html:
    """List the samples with the largest loss, or say how to find them."""
    items = []
    for line in run.worst:
        label, prediction = (_text(line.get(key)) for key in ("label", "prediction"))
        facts = [
            f"loss {_text(line['loss']) or 'not finite'}",
            f"id {_text(line.get('id'))}",
            f"in {line['set']}" if line.get("set") else "",
            plural(line["terms"], "loss term") if is_number(line.get("terms")) else "",
            f"label {label}" if label else "",
            f"predicted {prediction}" if prediction else "",
        ]
        text = _text(line.get("text"))
        head = el("p", " · ".join(filter(None, facts)), class_="facts")
        items.append(el("li", head, el("pre", text, class_="command") if text else None))
    note = "of the last evaluation with predictions"
    body = el("ol", items, class_="samples") if items else None
    return card("Samples with the largest loss", body, note=note)


def generated(run: SavedRun) -> Html:
    """Show what prompts gave."""
    items = (
        el("li", el("pre", el("b", _text(each.get("prompt"))), _text(each.get("text"))))
        for each in run.generated
    )
    note = f"after step {number(run.generated[-1]['step'])}" if run.generated else None
    body = el("ol", items, class_="samples") if run.generated else None
    return card("Prompts, and what the model adds", body, note=note)


def baselines(run: SavedRun) -> Html:
    """Set the held-out loss beside those of simple models."""
    own, others = run.result.get("eval_loss"), numbers_of(run.result.get("baselines"))
    if not others or not is_number(own):
        return Html("")
    rows = [("this run", loss(own), "")]
    rows += [
        (n, loss(v), f"{abs(v - own):.4f} {'better' if own <= v else 'worse'}")
        for n, v in others.items()
    ]
    return card(
        "Held-out loss beside simple models", table(("", "loss", "this run is"), rows, "numbers")
    )


def machine(run: SavedRun) -> Html:
    """Say what the run ran on: versions, revision, hardware; no host's name."""
    found = run.environment
    hardware, git = as_mapping(found.get("hardware")), as_mapping(found.get("git"))
    rows: list[Sequence[Piece]] = [
        ("cpu", f"{hardware.get('cpu')}, {hardware.get('cores')} cores" if hardware else ""),
        ("gpus", ", ".join(_texts(hardware.get("gpus")))),
        (
            "memory",
            size(numbers_of(hardware).get("memory_bytes")) if hardware else "",
        ),
        ("system", str(hardware.get("system") or "")),
        ("git", str(git.get("commit") or "")),
        *((name, str(text or "")) for name, text in as_mapping(found.get("versions")).items()),
    ]
    return card("Made with", table((), [row for row in rows if row[1]], "pairs") if found else None)


def settings(run: SavedRun) -> Html:
    """Give the whole config, closed."""
    rows = [(key, show(value)) for key, value in run.config.items()]
    closed = el(
        "details",
        el("summary", f"{plural(len(rows), 'key')} of config.yaml"),
        table((), rows, "pairs"),
    )
    return card("Config", closed if rows else None)


def comparison(runs: Sequence[SavedRun], names: Sequence[str]) -> Html:
    """Set runs side by side by their last figures and the keys that differ, the best first."""
    configs = [{key: _class(show(value)) for key, value in run.config.items()} for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    different = [k for k in keys if k not in _NAMES and len({c.get(k, "") for c in configs}) > 1]
    metric, is_max = ranked_by(runs)
    figures = dict.fromkeys(("loss", "eval_loss", metric))
    order = sorted(
        range(len(runs)), key=lambda n: rank(runs[n].last(metric), runs[n].state, is_max=is_max)
    )
    rows = [
        (
            el("i", class_=f"key s{n % 8}"),
            names[n].partition(": ")[0],
            el("span", runs[n].state, class_=f"pill {runs[n].state}"),
            number(runs[n].last_step),
            *(_loss(runs[n].last(name)) or "" for name in figures),
            duration(runs[n].seconds),
            *(configs[n].get(key, "") for key in different),
        )
        for n in order[:MOST_JOBS]
    ]
    keys_shown = [key.removesuffix("._target_") for key in different]
    head = ("", "run", "state", "steps", *map(title_of, figures), "time", *keys_shown)
    note = f"the best {metric} first"
    return card("Runs, and what differs", table(head, rows, "numbers"), note=note)


def _class(text: str) -> str:
    """Shorten the name of a class of ours to its last word."""
    return text.rpartition(".")[2] if text.startswith("trainer.") else text


def ranked_by(runs: Sequence[SavedRun]) -> tuple[str, bool]:
    """Name the metric that runs are ranked by, and whether more of it is better."""
    config = runs[0].config
    metric, mode = str(config.get("sweep.metric", "eval_loss")), config.get("sweep.mode")
    with suppress(ConfigError):  # of an odd name
        is_open = mode not in ("min", "max")
        return metric, (mode_of("", metric, "auto", "") if is_open else mode) == "max"
    return metric, False


def _text(value: object) -> str:
    if value is None:
        return ""
    text = (
        value
        if isinstance(value, str)
        else f"{value:.4g}"
        if isinstance(value, float)
        else show(value)
    )
    return without_secrets(text, os.environ)[:2000]


def _texts(value: object) -> list[str]:
    found = value if isinstance(value, list) else []
    return [each for each in found if isinstance(each, str)]


def details(title: str, *inner: Html) -> Html:
    """Fold sections of one of several runs."""
    return el("details", el("summary", title), join(*inner), class_="fold")
