"""`train export`: write the weights of a checkpoint as safetensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from trainer.assemble.module import look_up_transforms
from trainer.assemble.saved import read_terms
from trainer.checkpoint.state import plain_name
from trainer.checkpoint.store import Loaded
from trainer.checkpoint.weights import checkpoint_weights, export, load_step
from trainer.commands import exported
from trainer.config.components import NO_ADAPTER
from trainer.config.run_config import RunConfig, to_plain
from trainer.core.errors import ConfigError
from trainer.core.format import expanded, shown_path
from trainer.core.run_folder import RunFolder
from trainer.core.world import World
from trainer.models.facts import ModelFacts, facts_of, model_library, noted_facts
from trainer.report.console import Screen, show_read


def export_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Write a checkpoint's weights as safetensors; those of a library as it loads them.

    One process does it, whatever the number of ranks that saved; shards become whole tensors. It
    reads config and checkpoint: neither data nor a GPU need be there, but for features that
    estimate.
    """
    if config.export.to is None:
        raise ConfigError("export.to: needs a folder, e.g. export.to=weights")
    loaded = load_step(folder, config.step)
    to, given = expanded(config.export.to), read_terms(loaded).given
    model = exported.built(config, loaded, world)
    facts = ModelFacts()
    if model is not None:
        facts = facts_of(model)
    description = exported.export_config(config, given, loaded.step)
    tokenizer = exported.tokenizer_of(config)
    write: Callable[[Path], object] | None = facts.save
    lines: list[str] | None = exported.lines_to_load(config, facts, shown_path(to))
    if config.adapter.target != NO_ADAPTER:
        adapter: Any = look_up_transforms(config)[0][-1]
        if config.export.merge:
            if not hasattr(adapter, "merge"):
                kind = type(adapter).__name__
                raise ConfigError(f"export.merge=true: {kind} has no method `merge`; leave it out")
            model = adapter.merge(model)
            write = facts_of(model).save
        elif hasattr(adapter, "save"):
            base = _base(model, folder, loaded)
            write = partial(adapter.save, model, base)
            lines = []
            if hasattr(adapter, "how_to_load"):
                lines = adapter.how_to_load(model, base, to)
        else:
            # No line of Python loads it: it takes the adapter's class, and its arguments.
            description["adapter"], lines = to_plain(config)["adapter"], None
            kind = type(adapter).__name__
            Screen().warn(
                f"{kind} has no method `save`: the whole model is written, with the names that it "
                "has under the adapter; only init= with the same adapter reads them"
            )
    if lines is not None:
        lines = model_library().with_tokenizer(lines, tokenizer, shown_path(to))
    export(loaded, to, description, model, write, exported.writers_beside(config, facts, tokenizer))
    show_read(loaded, f"weights written to {to}")
    for line in lines or ():
        Screen().line(f"  {line}", is_command=True)
    return 0


def _base(model: nn.Module | None, folder: Path, loaded: Loaded) -> str | None:
    """Name what the frozen weights of a run came from; None where the seed drew them."""
    if model is None:
        return None
    found = noted_facts(model).source
    given = checkpoint_weights(loaded).frozen
    for name, parameter in model.named_parameters():
        # A checkpoint names the frozen weights that the constructor gives: others came by `init=`.
        if not parameter.requires_grad and plain_name(name) not in given:
            found = RunFolder(folder).config().get("init")
            break
    # A folder is named in full, as the export may be loaded from anywhere; a name of the hub stays.
    if found and Path(found).exists():
        return str(expanded(found).absolute())
    return found
