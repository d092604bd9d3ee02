"""Build the model whose weights are exported, where the checkpoint's own will not do."""

from __future__ import annotations

import inspect

from torch import nn

from trainer.assemble.features import Features
from trainer.assemble.instantiate import look_up
from trainer.assemble.module import build_model
from trainer.assemble.saved import Saved, read_terms
from trainer.checkpoint.store import Loaded
from trainer.checkpoint.weights import checkpoint_weights
from trainer.commands.evaluate import open_evaluation
from trainer.config.components import NO_ADAPTER
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.world import World
from trainer.report.console import Screen


def built(config: RunConfig, loaded: Loaded, world: World) -> nn.Module | None:
    """Build the model where the weights alone will not do, or it may write itself."""
    if any(feature.estimates for feature in Features.of(config)):
        # Their buffers are set from the run's data, and stay what they are once it is closed.
        with open_evaluation(config, Saved.read(config, loaded, world), world) as (run, _):
            module = run.model.module
            values = {name: value.clone() for name, value in module.named_buffers()}
        module.load_state_dict(values, strict=False)
        return module
    kind = look_up(config.model, "model", config.trust)  # which imports what makes it
    given, stored = read_terms(loaded).given, checkpoint_weights(loaded)
    has_adapter = config.adapter.target != NO_ADAPTER
    may_save_itself = hasattr(kind, "save_pretrained") or not inspect.isclass(kind)
    if not (may_save_itself or stored.frozen or has_adapter):
        return None
    try:
        return build_model(config, world, given, stored=stored)[0]
    except ConfigError as error:  # what it was loaded from may be gone
        if stored.frozen or has_adapter:
            raise
        Screen().warn(f"{error}: only the weights are written, not the layout of its library")
        return None
