"""Tell by a metric's name whether less or more of it is better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from trainer.config.components import AUTO_OBJECTIVE, EVAL_SETS, fits
from trainer.config.declared import metrics_of
from trainer.config.messages import line, near_names, refusals
from trainer.config.metric_names import METRIC_NAMES, Metrics
from trainer.core.errors import ConfigError
from trainer.core.format import AVERAGED, is_held_out
from trainer.core.run_folder import RunFolder

Mode = Literal["auto", "min", "max"]
_LARGER = {"accuracy", "f1", "recall", "auroc", "mcc", "r2", "pearson", "spearman", "match", "top"}
_LARGER |= {"precision", "rouge", "chrf", "bleu"}
_SMALLER = {"loss", "perplexity", "mse", "mae", "error"}
_NAMES = ("loss", *METRIC_NAMES, "top_5", "recall_at_1", "spearman")


def mode_of(key: str, metric: str, mode: Mode, mode_key: str) -> Literal["min", "max"]:
    """Give the direction of a metric, by its name where no `mode` is typed under its key."""
    if mode != "auto":
        return mode
    words = set(metric.split("_"))
    if not words & (_SMALLER | _LARGER):
        begin, _, name = metric.rpartition("eval_")
        near = near_names(name, _NAMES)
        meant = f" There are {', '.join(_NAMES)}."
        if near:
            meant = f" Did you mean {begin}eval_{near[0]}?"
        own = f"For one of your own, type {mode_key}=min or {mode_key}=max"
        if key == "stop.metric":
            own += " (where checkpoint.best is the same metric, or null)"
        raise ConfigError(f"{key}={metric}: no such metric is known.{meant} {own}")
    return "min" if words & _SMALLER else "max"


def stop_mode(best: str | None, metric: str | None, mode: Mode) -> Mode:
    """Give the mode of `stop.metric`: that of `checkpoint.best`, where both are one metric."""
    return mode if best in (None, metric) else "auto"


def metric_faults(view: Mapping[str, Any]) -> Iterator[str]:
    """Name metrics of no known direction, and settings of one that is followed, where none is."""
    for key in ("checkpoint.best", "stop.metric", "sweep.metric"):
        mode_key = "sweep.mode" if key == "sweep.metric" else "checkpoint.mode"
        mode = view[mode_key]
        if key == "stop.metric":
            mode = stop_mode(view["checkpoint.best"], view[key], mode)
        if isinstance(view[key], str):
            yield from refusals(mode_of, key, view[key], mode, mode_key)
            yield from _not_given(key, view[key], view)
            if view[key].startswith(AVERAGED) and not view["ema.evaluate"]:
                text = "type ema.decay=0.999 ema.evaluate=true, which give it"
                yield line(key, view[key], text)
    # Settings of the run that is named stay as they are.
    if view["stop.metric"] or view["resume"] or view["run"]:
        return
    for key, default in (("stop.patience", 3), ("stop.min_delta", 0)):
        if view[key] not in (default, None):
            yield line(key, view[key], "needs a metric: type stop.metric=eval_loss")
    if view["checkpoint.best"] is None and view["checkpoint.mode"] in ("min", "max"):
        text = "needs a metric: type checkpoint.best=eval_loss, or stop.metric=eval_loss"
        yield line("checkpoint.mode", view["checkpoint.mode"], text)


def _not_given(key: str, metric: str, view: Mapping[str, Any]) -> Iterator[str]:
    """Name a metric that no evaluation gives, unless `objective.metrics` asks for it."""
    name = metric.removeprefix(f"{AVERAGED}_").removeprefix("eval_")
    asked = view["objective.metrics"] or ()
    # A class of one's own may give any.
    if isinstance(asked, list) and any(isinstance(e, dict) or "." in str(e) for e in asked):
        return
    target = str(view["objective._target_"])
    given = metrics_of(target)
    # A model's own objective may be of classes, pairs with scores, or answers in a text; the first
    # evaluation tells which.
    if target == AUTO_OBJECTIVE:
        given = ("accuracy", "pearson", "exact_match")
    for each in view:
        section, is_set, rest = each.partition(f"{EVAL_SETS}.")
        if is_set and not section:
            name = name.removeprefix(f"{rest.partition('.')[0]}_")
    is_asked_for = "." not in name and fits(Metrics, [name])
    # The config of a run that is named is its own.
    is_new = not (view["resume"] or view["run"])
    if is_new and is_asked_for and given is not None and name not in {*given, *asked}:
        text = f"evaluations give it with objective.metrics=[{','.join([*asked, name])}]"
        yield line(key, metric, text)


def title_of(metric: str) -> str:
    """Write a metric for people: `held-out loss`."""
    of = " of the average" * metric.startswith(AVERAGED)
    return metric.removeprefix("ema_").replace("eval_", "held-out ", 1).replace("_", " ") + of


def rank(value: object, state: str, *, is_max: bool) -> tuple[int, float]:
    """Order runs by a metric: 0 for those that completed, the best first; 2 for those without."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return 2, 0.0
    if is_max:
        value = -value
    return int(state != "completed"), value


def is_comparable(metric: str, runs: Iterable[RunFolder]) -> bool:
    """Whether a metric of runs is of the same held-out tokens, as far as their checkpoints know."""
    # Fingerprints of the samples
    held_out = {str(run.terms().get("held_out")) for run in runs}
    return not is_held_out(metric) or len(held_out - {"None"}) <= 1
