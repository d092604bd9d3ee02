"""Say what a run was asked for: model, data, objective, batch, steps, optimizer, source code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from trainer.config.messages import show
from trainer.core.format import duration, number, plural, short, size
from trainer.core.rows import join_parts
from trainer.features.page.results import TableRows
from trainer.features.page.saved_run import SavedRun, as_list, as_mapping, numbers_of
from trainer.report.journal import is_number

_DIVISORS = {
    "tokens": "sum / all loss terms of the step",
    "samples": "sum / all samples of the step",
    "micro_batches": "mean of the means of micro-batches",
}
"""How `batch.normalizer` divides the loss, in words."""

_IN_HUB_CACHE = re.compile(r".*/models--([^/]+)--([^/]+)/snapshots/[^/]+/?")


def facts(run: SavedRun) -> list[str]:
    """Say what was trained on what, when it began, how long it took, and from where it went on."""
    length = ""
    if run.seconds:
        length = f"{duration(run.seconds)} of steps and evaluations"
    known = (model_name(run), data_name(run), run.started, length, *run.continuation())
    return [*filter(None, known)]


def asked(run: SavedRun) -> TableRows:
    """Give what was asked for in rows; what is not known has none."""
    plan, known = run.plan, numbers_of(run.plan)
    batch, steps = None, None
    if samples := known.get("global_batch"):
        divisor = _DIVISORS.get(str(plan.get("normalizer")))
        batch = f"{number(samples)} {plan.get('unit')} a step"
        batch = join_parts(batch, divisor and f"loss: {divisor}")
    if count := known.get("steps"):
        epochs = known.get("epochs")
        steps = join_parts(number(count), epochs and f"{epochs:.3g} epochs")
    ranks, device = known.get("world_size"), plan.get("device")
    rows = {
        "model": _model(run),
        "weights": plan.get("init"),
        "adapter": _adapter(run),
        "data": _data(run),
        "objective": plan.get("objective"),
        "batch": batch,
        "steps": steps,
        "optimizer": _optimizer(run),
        "learning rate": _learning_rate(run),
        "precision": join_parts(plan.get("precision"), device, ranks and plural(ranks, "rank")),
        "seed": run.config.get("seed"),
        "source code": _revision(run),
    }
    return _known(rows)


def model_name(run: SavedRun) -> str:
    """Name the model as people know it: on a hub, by its folder, by its option or its class."""
    if not run.config.get("model.path"):
        for key in ("model.config.model_type", "model.config"):
            if kind := run.config.get(key):
                return f"{_place_name(str(kind))} with random weights"
    return _name(run, "model")


def data_name(run: SavedRun) -> str:
    """Name the data: on a hub, by their file or folder, by their option or their class."""
    found = [key.split(".")[2] for key in run.config if key.startswith("data.sources.")]
    if found:
        return f"mixture of {', '.join(dict.fromkeys(found))}"
    return _name(run, "data")


def machine(run: SavedRun) -> TableRows:
    """Say what the run ran on: versions and hardware; no host's name."""
    found = as_mapping(run.terms.get("environment"))
    hardware = as_mapping(found.get("hardware"))
    rows = dict[str, Any]()
    if hardware:
        rows["cpu"] = f"{hardware.get('cpu')}, {hardware.get('cores')} cores"
        rows["gpus"] = ", ".join(map(str, as_list(hardware.get("gpus"))))
        rows["memory"] = size(numbers_of(hardware).get("memory_bytes"))
        rows["system"] = hardware.get("system")
    return _known(rows | as_mapping(found.get("versions")))


def settings(run: SavedRun) -> TableRows:
    """Give the whole config."""
    return [(key, show(value)) for key, value in run.config.items()]


def _known(rows: Mapping[str, Any]) -> TableRows:
    return [(name, str(value)) for name, value in rows.items() if value not in (None, "")]


def _name(run: SavedRun, part: str) -> str:
    path = run.config.get(f"{part}.path")
    if isinstance(path, str):
        return _place_name(path)
    # The plan has the option, or of one's own class the path; what failed early has no plan.
    name = run.plan.get(part) or run.config.get(f"choices.{part}")
    return str(name or run.config.get(f"{part}._target_") or "")


def _place_name(path: str) -> str:
    """Name a file or folder; what is no full path is a name on a hub."""
    if found := _IN_HUB_CACHE.fullmatch(path):
        return "/".join(found.groups())
    if path.startswith(("/", "~", ".")):
        return PurePath(path).name or path
    return path


def _model(run: SavedRun) -> str | None:
    known, task = numbers_of(run.plan), run.config.get("model.task")
    count, frozen = known.get("num_parameters"), known.get("num_frozen")
    trained = None
    if count is not None:
        trained = plural(count + (frozen or 0), "parameter")
        if frozen:
            trained += f", {number(count)} of them trained"
    return join_parts(model_name(run), task, trained)


def _adapter(run: SavedRun) -> str | None:
    if not (values := as_mapping(run.plan.get("adapter"))):
        return None
    return _with_settings(run.config.get("choices.adapter"), values)


def _data(run: SavedRun) -> str | None:
    known = numbers_of(run.plan)
    samples, tokens, held_out = None, None, None
    if (count := known.get("num_samples")) is not None:
        samples = plural(count, "sample")
    if run.noun == "token" and known.get("num_tokens"):
        tokens = f"{short(known['num_tokens'])} tokens"
    if count := known.get("num_held_out"):
        held_out = f"{number(count)} held out"
        used = run.config.get("eval.samples")
        if is_number(used) and used < count:
            held_out += f" ({number(used)} of them evaluated)"
    sets = list[str]()
    for name, count in numbers_of(run.plan.get("eval_sets")).items():
        sets.append(f"{number(count)} {name}")
    skips = as_list(run.config.get("data.skip_steps"))
    passed = skips and f"samples of steps {', '.join(map(str, skips))} passed over"
    return join_parts(data_name(run), samples, tokens, held_out, *sets, passed)


def _optimizer(run: SavedRun) -> str | None:
    given = dict[str, Any]()
    for key, value in run.config.items():
        group, _, name = key.partition(".")
        if group == "optimizer" and name not in ("_target_", "lr"):
            given[name] = value
    for name, value in as_mapping(run.plan.get("optimizer_defaults")).items():
        if name != "lr":
            given[name] = value
    return _with_settings(run.plan.get("optimizer"), given)


def _with_settings(option: Any, given: Mapping[str, Any]) -> str | None:  # noqa: ANN401
    """Name an option with its settings, but those that are off."""
    parts = [option]
    for name, value in given.items():
        if value not in (None, {}, [], False):
            parts.append(f"{name.replace('_', ' ')} {show(value)}")
    return join_parts(*parts)


def _learning_rate(run: SavedRun) -> str | None:
    known = numbers_of(run.plan)
    rate, warmup = known.get("lr"), known.get("warmup_steps")
    if rate is None:
        return None
    floor = numbers_of(run.config).get("scheduler.floor")
    return join_parts(
        f"{rate:g}",
        run.plan.get("scheduler"),
        warmup and f"{plural(warmup, 'step')} of warm-up",
        floor and f"floor {floor:g}",
    )


def _revision(run: SavedRun) -> str | None:
    """Say which commit was checked out, and whether files differed from it."""
    found = as_mapping(run.plan.get("git"))
    commit, text = found.get("commit"), None
    if changed := numbers_of(found).get("changed_files"):
        text = f"with changes in {plural(changed, 'file')} that are not committed"
    return commit and join_parts(f"git {commit}", text)
