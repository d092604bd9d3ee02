"""Build all samples of a data set, those to train on and those to hold out."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence, Sized
from typing import Any, final

import numpy as np

from trainer.build.instantiate import construct, look_up
from trainer.config.run_config import RunConfig
from trainer.core.world import World
from trainer.data.samples import faults_of
from trainer.data.view import DataView, readable

SPLITS = ("train", "held_out")

# What `Samples` lists as optional, and is the same for both parts.
_SHARED = ("collate", "draws_randomness", "vocab_size")


@final
class Joined:
    """The parts of a data set that splits itself, one after the other."""

    def __init__(self, parts: Sequence[DataView]) -> None:
        self._parts, self._ends = parts, np.cumsum([len(part) for part in parts])
        for name in _SHARED:
            setattr(self, name, parts[0].optional(name) if parts else None)
        if parts and all(part.states_lengths for part in parts):
            self.lengths = np.concatenate([part.lengths[:] for part in parts])
        self.fingerprint = "|".join(part.fingerprint for part in parts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._parts else 0

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        """Give a sample as its part does."""
        number = int(np.searchsorted(self._ends, i, side="right"))
        part, start = self._parts[number], int(self._ends[number - 1]) if number else 0
        return part.dataset[int(part.ids(np.array([i - start]))[0])]


def whole_data(config: RunConfig, world: World) -> DataView:
    """Build every sample of the data, for `data.holdout=all`. Collective.

    Of a class that splits its data itself these are those of both parts, in turn.
    """
    taken = inspect.signature(look_up(config.data, "data", config.trust)).parameters
    params = {name: value for name, value in config.data.params.items() if name != "holdout"}
    params |= {"holdout": 0} if "holdout" in taken else {}
    component = config.data.model_copy(update={"params": params})
    given = {"on_bad": config.data.on_bad, "seed": config.seed}
    splits_itself = "split" in taken and params.get("split") is None
    parts: list[DataView] = []
    for split in SPLITS if splits_itself else ("",):
        with faults_of(component.target):
            dataset: Any = construct(
                component, "data", Sized, config.trust, {**given, "split": split}
            )
        view = DataView(dataset, version=config.order)
        # A class may take `split` as a label, and give the same samples under each.
        known = [(len(part), part.fingerprint) for part in parts]
        if len(view) and (len(view), view.fingerprint) not in known:
            parts.append(view)
    if config.data.on_bad == "skip" and "on_bad" not in taken and parts:
        parts = readable(parts, config.seed, world)
    return parts[0] if len(parts) == 1 else DataView(Joined(parts), version=config.order)
