"""Define the third stage of a run: its data and model, as its config has them, and how it cuts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from trainer.assemble.features import Features
from trainer.assemble.hardware import planned_device
from trainer.assemble.objective import Chosen
from trainer.assemble.typed import ChosenOptimizer
from trainer.config.run_config import RunConfig
from trainer.core.micro_batch import Fields
from trainer.core.world import World
from trainer.data.split import Split
from trainer.parallel.setup import SHARDED
from trainer.plan.cut import Cut, Layout
from trainer.training.batches import Feed
from trainer.training.data import Data
from trainer.training.model import Model

MOST_STAGES = 16  # stages of a batch that are planned and shown one by one


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run is made of; below this room, data and model are known alone."""

    config: RunConfig
    world: World
    data: Data
    model: Model
    features: Features
    cut: Cut  # as typed; `prepare` tunes it, or takes it from the checkpoint
    layout: Layout  # what hardware, model and data ask of every cut
    # One collated micro-batch of a single sample, the longest; packed under packing
    example: Fields

    # What is shown and recorded, and no step needs:
    split: Split  # how the samples and the held-out ones were parted
    chosen: Chosen  # the objective, as it was typed or as the model is made for
    chosen_optimizer: ChosenOptimizer  # as it was typed or as the model asks for
    # What the model's constructor may take from the data, such as their vocabulary
    given: Mapping[str, Any]
    tokenizer: Any  # None where no part takes one

    @property
    def is_sharded(self) -> bool:
        """Whether the model is laid out in shards; other commands compute in one process."""
        return self.model.setup.mode in SHARDED and self.config.command in {"train", "plan"}

    @property
    def planned_device(self) -> torch.device:
        """Where the run is to compute; `train plan` may be for a GPU that is not here."""
        return planned_device(self.config, self.world)

    def feed(self, world: World) -> Feed:
        """Begin to give the micro-batches of a rank."""
        start, objective = self.data.order.start, self.model.objective
        how = (self.cut, self.layout, world, self.config.seed, start, self.features.recut)
        return Feed(self.data, objective, *how)
