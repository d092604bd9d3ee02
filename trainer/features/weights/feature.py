"""Find the weights of classes by the training data, and refuse weights that nothing reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import numpy as np
import torch

from trainer.assemble.features import Feature
from trainer.assemble.run import Run
from trainer.config.messages import did_you_mean_name
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import IGNORED
from trainer.data.collate import LABELS, WEIGHT
from trainer.data.files import progress
from trainer.data.view import DataView
from trainer.objectives.base import Objective, weights_of
from trainer.plan.cut import IntArray

KEY = "class_weights"


@final
class WeightsOfRun(Feature):
    """Gives an objective one weight for each class, where `class_weights` are a word or by name."""

    def decided(
        self, objective: Objective, data: DataView, recorded: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """See the base class."""
        typed = getattr(objective, KEY, None)
        if not isinstance(typed, str | Mapping):
            return {}
        if (known := recorded.get(f"objective.{KEY}")) is not None:
            return {KEY: known}
        counts = class_counts(data)
        if isinstance(typed, str):
            return {KEY: balanced(counts)}
        names = data.facts.label_names or [*map(str, range(len(counts)))]
        by_name = {str(name): weight for name, weight in typed.items()}
        for name, weight in by_name.items():
            if name not in names:
                near, there = did_you_mean_name(name, names), ", ".join(names)
                text = f"no such class.{near} There are {there}"
                raise ConfigError(f"objective.{KEY}={{{name}: {weight:g}}}: {text}")
        return {KEY: [by_name.get(name, 1.0) for name in names]}

    def check(self, run: Run) -> None:
        """Refuse a field `weight` beside an objective that counts each sample once."""
        objective, fields = run.model.objective, run.example
        if (given := fields.get(WEIGHT)) is None:
            return
        found = list[dict[str, float]]()
        for weight in (1.0, 2.0):
            same = {**fields, WEIGHT: torch.full_like(given, weight)}
            found.append(weights_of(objective, same))
        if found[0] == found[1] and any(found[0].values()):
            raise ConfigError(
                f"objective: {type(objective).__name__} does not read the field `weight` of the "
                "data: multiply by `weight_of` in its `weights` and `sums`, as "
                "docs/how-to/weights.md has it, or leave it out (data.columns={weight:null})"
            )


def balanced(counts: IntArray) -> list[float]:
    """Weigh each class so that the labels of all weigh the same; one without labels by 1."""
    is_there = counts > 0
    weights = counts.sum() / (max(1, is_there.sum()) * np.where(is_there, counts, 1))
    return [*map(float, np.where(is_there, weights, 1.0))]


def class_counts(data: DataView) -> IntArray:
    """Count the labels of each class, by reading every sample unless the data know it."""
    if data.facts.class_counts is not None:
        return np.asarray(data.facts.class_counts(), dtype=np.int64)
    counts = np.zeros(data.facts.num_classes or 0, dtype=np.int64)
    with data.isolated_rng(), progress(f"counting classes of {data.kind}", len(data)) as advance:
        for i in range(len(data)):
            labels = data.read(i, seed=0, epoch=0)[LABELS].numpy().ravel()
            more = np.bincount(labels[labels != IGNORED], minlength=len(counts))
            counts = more + np.pad(counts, (0, len(more) - len(counts)))
            advance()
    return counts
