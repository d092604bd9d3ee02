"""`train export`: write the weights of a checkpoint as safetensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

from torch import nn

from trainer.assemble.features import ExportedWeights
from trainer.assemble.instantiate import look_up_transforms, run_features
from trainer.assemble.saved import read_terms
from trainer.checkpoint.state import plain_name
from trainer.checkpoint.store import Loaded
from trainer.checkpoint.weights import checkpoint_weights, export, load_step
from trainer.commands import exported
from trainer.config.components import NO_ADAPTER
from trainer.config.run_config import RunConfig, to_plain
from trainer.core.errors import ConfigError
from trainer.core.format import expanded
from trainer.core.run_folder import RunFolder
from trainer.core.world import World
from trainer.models.facts import ModelFacts, facts_of, model_library, noted_facts
from trainer.report.console import Screen, show_read


@final
@dataclass(frozen=True, kw_only=True)
class Written:
    """What is written, and how it is loaded."""

    model: nn.Module | None  # whose weights are written in place of those that are stored
    write: Callable[[Path], object] | None  # writes the folder in place of safetensors
    lines: Callable[[Path], list[str]]  # of Python, that load it from a folder
    library: str | None  # what loads it, by a hub's word


def export_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Write a checkpoint's weights as safetensors; those of a library as it loads them.

    One process does it, whatever the number of ranks that saved; shards become whole tensors. It
    reads config and checkpoint: neither data nor a GPU need be there, but for features that
    estimate.
    """
    if config.export.to is None:
        raise ConfigError("export.to: needs a folder, e.g. export.to=weights")
    loaded = load_step(folder, config.step)
    to, terms = expanded(config.export.to), read_terms(loaded)
    model = exported.built(config, loaded, world)
    facts = ModelFacts()
    if model is not None:
        facts = facts_of(model)
    description = exported.export_config(config, terms.given, loaded.step)
    tokenizer, base = exported.tokenizer_of(config), _base(model, folder, loaded)
    written = Written(
        model=model,
        write=facts.save,
        lines=partial(exported.lines_to_load, config, facts),
        library=facts.library_name,
    )
    if config.adapter.target != NO_ADAPTER:
        written, added = _with_adapter(config, written, base)
        description |= added

    def lines(place: Path) -> list[str]:
        found = written.lines(place)
        return model_library().with_tokenizer(found, tokenizer, place) if found else []

    labels = {"library_name": written.library, "pipeline_tag": facts.pipeline_tag}
    weights = ExportedWeights(
        config=config,
        run=folder,
        loaded=loaded,
        to=to,
        model=type(model).__name__ if facts.library_name else config.model.label,
        labels={name: word for name, word in labels.items() if word is not None},
        base=base,
        lines=lines(Path(to.name)),
    )
    remarks = list[str]()

    def write_more(place: Path) -> None:
        for feature in run_features(config):
            remarks.extend(feature.exported(weights, place))

    beside = exported.writers_beside(config, facts, tokenizer)
    # Features come last, so that their files stand where a library wrote one, too.
    export(loaded, to, description, written.model, written.write, [*beside, write_more])
    show_read(loaded, f"weights written to {to}", *remarks)
    for line in lines(to):
        Screen().line(f"  {line}", is_command=True)
    return 0


def _with_adapter(
    config: RunConfig, written: Written, base: str | None
) -> tuple[Written, dict[str, Any]]:
    """Write the adapter alone, or merged; gives what config.json says where it can be neither."""
    adapter: Any = look_up_transforms(config)[0][-1]
    kind, model = type(adapter).__name__, written.model
    if config.export.merge:
        if not hasattr(adapter, "merge"):
            raise ConfigError(f"export.merge=true: {kind} has no method `merge`; leave it out")
        merged = adapter.merge(model)
        return replace(written, model=merged, write=facts_of(merged).save), {}
    if hasattr(adapter, "save"):
        library = getattr(adapter, "library_name", None)
        written = replace(written, write=partial(adapter.save, model, base), library=library)
        if hasattr(adapter, "how_to_load"):
            return replace(written, lines=partial(adapter.how_to_load, model, base)), {}
        return replace(written, lines=lambda _: []), {}
    Screen().warn(
        f"{kind} has no method `save`: the whole model is written, with the names that it "
        "has under the adapter; only init= with the same adapter reads them"
    )
    # No line of Python loads it: it takes the adapter's class, and its arguments.
    return replace(written, lines=lambda _: []), {"adapter": to_plain(config)["adapter"]}


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
