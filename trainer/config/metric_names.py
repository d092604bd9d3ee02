"""Say what `objective.metrics` takes: names that `conf/metrics.yaml` lists, and classes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from trainer.config.option_files import data_dir, load_yaml

METRICS_KEY = "objective.metrics"
KNOWN_METRICS: Mapping[str, Any] = load_yaml(data_dir("conf") / "metrics.yaml")
METRIC_NAMES = (*KNOWN_METRICS["sums"], *KNOWN_METRICS["predictions"])
_METRIC = rf"^({'|'.join(METRIC_NAMES)}|top_[1-9][0-9]*|[A-Za-z_]\w*(\.[A-Za-z_]\w*)+)$"
Metrics = Annotated[
    tuple[Annotated[str, Field(pattern=_METRIC)] | dict[str, Any], ...],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(
        strict=False,
        description=f"a list of {', '.join(METRIC_NAMES)}, top_5 or a class of your own, "
        "e.g. [accuracy,f1]",
    ),
]


def sum_metrics(metrics: Sequence[object]) -> list[str]:
    """Give those that are sums over logits and labels; each of the others scores predictions."""
    of_sums = re.compile(f"{'|'.join(KNOWN_METRICS['sums'])}|top_[0-9]+")
    return [each for each in metrics if isinstance(each, str) and of_sums.fullmatch(each)]
