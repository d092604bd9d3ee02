"""Build the parts with state that a run asks for, and refuse those that no checkpoint can hold."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.assemble.instantiate import construct
from trainer.checkpoint.average import AVERAGE, WeightAverage
from trainer.checkpoint.state import capture
from trainer.config.metric_mode import stop_mode
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.stateful import Stateful, as_part
from trainer.training.best_metric import BEST, STOP, BestMetric

SIZES = "batch"  # the part that sizes of steps are, where they depend on what a run decides
MAY_BEGIN_ANEW = {"loss_scale", AVERAGE, SIZES, BEST, STOP}  # what a checkpoint need not have


def own_parts(config: RunConfig) -> dict[str, Stateful]:
    """Build the parts with state that the config asks for, each with its name in a checkpoint.

    The average of the weights is the last, since others may change them.
    """
    parts: dict[str, Stateful] = {}
    for index, component in enumerate(config.parts):
        part = construct(component, f"parts[{index}]", Stateful, config.trust)
        name = f"parts.{component.target}"
        name += f"-{index + 1}" * (name in parts)
        parts[name] = as_part(part)
    for name, key, metric, min_delta in (
        (BEST, "checkpoint.best", config.checkpoint.best, 0.0),
        (STOP, "stop.metric", config.stop.metric, config.stop.min_delta),
    ):
        if metric is not None:
            mode = stop_mode(config.checkpoint.best, metric, config.checkpoint.mode)
            parts[name] = BestMetric.of(key, metric, mode, min_delta, config.stop.patience)
    if config.ema.decay is not None:
        parts[AVERAGE] = WeightAverage(config.ema.decay)
    return parts


def followed_metrics(config: RunConfig, own: Mapping[str, Stateful]) -> dict[str, BestMetric]:
    """Give every metric that evaluations have to give: for the best checkpoint, and for stopping.

    A sweep ranks its jobs by one, too. Its default is in every config, in no sweep too.
    """
    found = {name: part for name, part in own.items() if isinstance(part, BestMetric)}
    metric = config.sweep.metric
    if metric.startswith("eval_") and metric != "eval_loss":
        found["sweep"] = BestMetric(key="sweep.metric", metric=metric, mode="min")
    return found


def refuse_unsavable(parts: Mapping[str, Stateful]) -> None:
    """Refuse parts whose state no checkpoint can hold, before the first step."""
    try:
        capture(parts)
    except (TypeError, ValueError) as error:
        text = "give tensors, numbers, strings and None in lists, tuples and mappings"
        raise ConfigError(f"{error}: {text}") from error
