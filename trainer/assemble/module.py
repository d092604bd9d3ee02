"""Build the model: with its weights, or on the meta device, where it takes no memory.

A plan for a machine that is not here needs shapes alone; so does a rank that holds a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from trainer.accumulate.base import seed_draws
from trainer.assemble.hardware import planned_device
from trainer.assemble.instantiate import construct, draws_on_meta, look_up, look_up_transforms
from trainer.assemble.model_size import refuse_too_large
from trainer.checkpoint.partial_weights import fitting
from trainer.checkpoint.weights import StoredWeights
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.tensors import LazyTensor
from trainer.core.world import World, rng_key
from trainer.data.samples import preserve_generators
from trainer.models.first_weights import (
    FIRST_WEIGHTS,
    Filled,
    FirstWeights,
    build_on_meta,
    counted,
    refuse_lazy_or_sparse,
)
from trainer.models.frozen import add_frozen
from trainer.models.recompute import checkpoint_blocks
from trainer.optim.optimizers import OptimizerSpec


def build_model(
    config: RunConfig,
    world: World,
    given: Mapping[str, Any],
    spec: OptimizerSpec | None = None,
    *,
    stored: StoredWeights | None = None,
    in_shards: bool = False,
    with_values: bool = False,
    adjust: Callable[[nn.Module], None] | None = None,
) -> tuple[nn.Module, FirstWeights | None]:
    """Build the model with its first weights, and freeze what its optimizer does not train.

    `given` are arguments that the constructor may take and the config leaves out; `spec` is None
    where the model is not trained. `stored` is what it begins with in place of what the seed draws.
    With `in_shards` a class that declares `draws_on_meta` is built on the meta device, its weights
    beside it, as is what a function that declares `loads_on_meta` gives. `with_values` is whether a
    plan needs more than shapes. `adjust` changes how layers compute, and none of the weights.
    """
    unread: dict[str, LazyTensor] = {}
    transforms, on_meta = look_up_transforms(config)
    build = partial(_construct, config, world, given, transforms, stored, unread)

    def begin(module: nn.Module) -> None:
        if spec is not None:
            spec.prepare_parameters(module, widens=config.accum.buffer == "fp32")

    def check(module: nn.Module) -> None:
        begin(module)
        refuse_too_large(config, world, module, spec)

    def count() -> nn.Module | None:
        with preserve_generators():  # which the constructor goes on drawing from
            return counted(build, check)

    kind = look_up(config.model, "model", config.trust)
    # A plan for a machine that is not here asks for shapes alone.
    needs_values = with_values or planned_device(config, world).type == world.device.type
    module: nn.Module | None = None
    weights: FirstWeights | None = None
    with preserve_generators():
        # In shards no rank has it whole: its rows are computed, or read, when it is laid out.
        loads = getattr(kind, "loads_on_meta", False)
        on_meta &= loads or getattr(kind, "draws_on_meta", False)
        if in_shards and on_meta and needs_values:
            with suppress(_NeedsValues):
                module, drawn = build_on_meta(partial(build, has_first=loads), unread)
                weights = {**drawn, **unread}
        if not needs_values:
            module = count()
        if module is None:
            # One that turns out to be large is counted on the way.
            with Filled(count):
                module = build()
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(world.device))  # type: ignore[no-untyped-call] # untyped in torch
    begin(module)
    module.train()
    if adjust is not None:
        adjust(module)
    if config.activation_checkpointing is True and not checkpoint_blocks(module):
        text = "this model has no list of blocks (nn.ModuleList) to recompute; use false"
        raise ConfigError(f"activation_checkpointing=true: {text}")
    return module, weights


def _construct(
    config: RunConfig,
    world: World,
    given: Mapping[str, Any],
    transforms: Sequence[Callable[[nn.Module], Any]],
    stored: StoredWeights | None,
    unread: dict[str, LazyTensor],
    *,
    has_first: bool = False,
) -> nn.Module:
    """Build the model with its first weights; those of the meta device are noted as `unread`.

    Stored ones are those of the model before its transforms, if they fit that, or after them.
    `has_first` is whether the maker is to say itself where weights are.
    """
    seed_draws(rng_key(config.seed, "weights"), world.device)
    module = construct(config.model, "model", nn.Module, config.trust, given)
    refuse_lazy_or_sparse(module)
    found: dict[str, LazyTensor] | None = vars(module).pop(FIRST_WEIGHTS, None)
    if has_first and found is None:
        raise _NeedsValues
    is_before = stored is not None and _is_before(module, stored, config)
    found = found or {}
    if stored is not None and is_before:
        found = {**found, **_filled(module, stored, config)}
    # A parameter keeps its value as an object, whatever its name; they stay alive, as do their ids.
    state = module.state_dict(keep_vars=True)
    values = {id(state[name]): (name, value, state[name]._version) for name, value in found.items()}
    for (key, entry), transform in zip(config.model_transforms.items(), transforms, strict=True):
        module = transform(module)
        if not isinstance(module, nn.Module):
            raise ConfigError(f"{key}={entry.target}: gives {type(module).__name__}, no model")
        refuse_lazy_or_sparse(module)
    # A model may have what a transform cannot do there, such as a head that is copied.
    if has_first and not all(map(draws_on_meta, transforms)):
        raise _NeedsValues
    named = module.named_parameters(remove_duplicate=False)
    for name, parameter in ((n, p) for n, p in named if id(p) in values):
        before, unread[name], version = values[id(parameter)]
        if parameter._version != version:
            raise ConfigError(
                f"transforms: one writes to {before} on the meta device, over weights that are "
                "read later: declare no draws_on_meta, or give it a new parameter"
            )
    if stored is not None and not is_before:
        if stored.is_adapter:
            stored = _adopted(stored, module, transforms[-1])
        unread |= add_frozen(module, stored.make_frozen, unread, world.device)
        unread |= _filled(module, stored, config)
    return module


def _is_before(module: nn.Module, stored: StoredWeights, config: RunConfig) -> bool:
    """Whether stored weights are those of a model before its transforms, as it is now."""
    in_part = config.init_partial and not stored.is_resumed
    return not stored.is_transformed and (in_part or not stored.fault(module))


def _filled(module: nn.Module, stored: StoredWeights, config: RunConfig) -> FirstWeights:
    """Copy stored weights into a model, or what of them fits; gives those that stay unread."""
    if config.init_partial and not stored.is_resumed:
        stored = fitting(stored, module)
    return stored.fill(module)


def _adopted(stored: StoredWeights, module: nn.Module, adapter: object) -> StoredWeights:
    """Give the weights of an exported adapter under the names that they have in a model."""
    names_of: Callable[..., Mapping[str, str]] | None = getattr(adapter, "names_in", None)
    if names_of is None:
        text = "holds an adapter, without its base; type adapter=lora, as it was trained"
        raise ConfigError(f"init={stored.source}: {text}")
    names = names_of(Path(str(stored.source)), module)
    return replace(stored, values={names.get(n, n): value for n, value in stored.values.items()})


class _NeedsValues(Exception):  # noqa: N818 - no error
    """Where the weights of a model are cannot be said, so that it is built with them."""
