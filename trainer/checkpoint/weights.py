"""Take weights without the rest: what a run begins with, or goes on with, and `train export`.

An export is a folder with `model.safetensors` and `config.json`: plain names, a tied weight under
each of its names, as `load_state_dict` wants them. Hugging Face models write their own layout.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, final

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from trainer.checkpoint.average import AVERAGE, WeightAverage
from trainer.checkpoint.codec import read_whole
from trainer.checkpoint.manifest import DamagedError, OtherFormatError, is_checkpoint
from trainer.checkpoint.matching import by_own_names, differences_of, state_tensors, with_prefix
from trainer.checkpoint.state import plain_name, state_of
from trainer.checkpoint.stated_model import settings_of_model
from trainer.checkpoint.store import MODEL, CheckpointStore, Loaded, open_checkpoint
from trainer.checkpoint.tensor_files import StoredTensor, open_tensors, write_tensors
from trainer.core import durable
from trainer.core.errors import ConfigError, NoCheckpointError, SaveError
from trainer.core.format import shown_path
from trainer.core.stateful import State, Stateful
from trainer.core.tensors import bits_of, fill, in_main_memory, whole_of
from trainer.core.world import World
from trainer.models.frozen import MakeFrozen, is_beside, without_frozen

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_model.safetensors"  # peft's
FROZEN = "frozen parameters"  # of the model's state: SHA-256 by name; no parameter is named so

WhichStep = Literal["last", "best", "ema"] | int
"""Which checkpoint of a run is read: the newest, the same with averaged weights, or a step's.

The best by a metric of averaged weights has these, too."""


@final
@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """Weights and buffers in files, unread; each rank reads the rows it holds."""

    values: Mapping[str, StoredTensor]  # by plain name, a tied one under one or more of its names
    source: object  # begins an error
    loaded: Loaded | None = None  # the checkpoint they are of, where it is one
    is_resumed: bool = False  # whether they go on
    # Whether they are those of a model as its transforms left it; else it begins with them before
    is_transformed: bool = False
    # Whether they are an adapter's alone: the constructor gives all that is frozen
    is_adapter: bool = False
    # By plain name, what modules keep besides tensors, where they go on
    others: Mapping[str, Any] = field(default_factory=dict)
    # By plain name, the SHA-256 of parameters that are not stored: the constructor gives them again
    frozen: Mapping[str, str] = field(default_factory=dict)
    new: Collection[str] = ()  # by plain name, what of the model they need not have
    make_frozen: MakeFrozen = lambda _: None  # makes what is beside a model that goes on

    @classmethod
    def of(cls, state: State, source: object, loaded: Loaded | None = None) -> StoredWeights:
        """Take those of the state of a model that goes on, whose tensors are unread."""
        values, others = dict[str, StoredTensor](), dict[str, Any]()
        for name, value in state.items():
            if isinstance(value, StoredTensor):
                values[name] = value
            else:
                others[name] = read_whole(value)
        frozen = others.pop(FROZEN, {})
        return cls(
            values=values,
            source=source,
            loaded=loaded,
            is_resumed=True,
            is_transformed=True,
            others=others,
            frozen=frozen,
        )

    def fault(self, model: nn.Module) -> str:
        """Say how they differ from a model in names, shapes and dtypes; empty where they fit it."""
        return self._match(model)[1]

    def _match(self, model: nn.Module) -> tuple[dict[str, StoredTensor], str]:
        """Find the weights and buffers of a model, by plain name."""
        expected, found = self.in_model(model)
        compared, here = dict[str, Tensor](), dict[str, Tensor]()
        for name, tensor in expected.items():
            # As the constructor gave it, and not stored.
            is_frozen = name in self.frozen
            is_given = is_frozen or (self.is_adapter and not tensor.requires_grad)
            if name in found or not (is_given or name in self.new):
                compared[name] = tensor
            # What is drawn on the meta device is drawn by the same class and seed.
            elif is_frozen and not tensor.is_meta:
                here[name] = tensor
        faults = differences_of(found, compared, self.changed(here))
        return found, "; ".join(faults)

    def in_model(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, StoredTensor]]:
        """Give the tensors of a model by plain name, and those in their place, tied ones too."""
        named = state_tensors(model.state_dict(keep_vars=True))
        expected, values = {plain_name(name): each for name, each in named.items()}, self.values
        if not any(map(is_beside, expected)):
            values = without_frozen(values)
        found = with_prefix(values, expected)
        # The first name of each tensor, which may have several.
        first: dict[int, str] = {}
        for alias, tensor in expected.items():
            name = first.setdefault(id(tensor), alias)
            if name != alias and (one := found.get(name) or found.get(alias)):
                found |= {name: found.get(name, one), alias: found.get(alias, one)}
        return expected, found

    def changed(self, here: Mapping[str, Tensor]) -> list[str]:
        """Name the frozen weights that do not have the values that the run had. Collective."""
        return [n for n, digest in digests_of(here).items() if digest != self.frozen[n]]

    @torch.no_grad()
    def fill(self, model: nn.Module) -> dict[str, StoredTensor]:
        """Copy them into a model, one tensor at a time; gives those of the meta device, unread."""
        (found, fault), state = self._match(model), model.state_dict(keep_vars=True)
        if fault:
            remedy = "init= needs weights of this very model"
            if isinstance(self.source, Path) and (typed := settings_of_model(self.source)):
                remedy += f"; theirs is {typed}"
            remedy += "; init.partial=true takes what fits, and leaves the rest new"
            if self.is_resumed:
                remedy = "resume with the model that was trained, or use init= to take over weights"
            raise NoCheckpointError(f"{self.source}: does not fit the model: {fault}: {remedy}")
        unread, here = dict[str, StoredTensor](), dict[str, Any]()
        for name, stored in by_own_names(state, found).items():
            if state[name].is_meta:
                unread[name] = stored
            else:
                fill(state[name], stored)
                here[name] = state[name]
        others = by_own_names(state, self.others)
        # The tensors are in place; this is for the modules' own hooks, and what they keep besides.
        model.load_state_dict(here | others, strict=False)
        return unread


@final
class ModelPart(Stateful):
    """Weights, buffers, and what modules keep besides (`get_extra_state`), by plain name.

    A run that goes on builds its model with them (`checkpoint_weights`).
    """

    loads_unread = True

    def __init__(self, module: nn.Module, frozen: Mapping[str, str] | None = None) -> None:
        self._module, self._frozen = module, frozen or {}

    @classmethod
    def of(cls, module: nn.Module, stored: StoredWeights | None) -> ModelPart:
        """Take a model before its first step, and what its weights were read from. Collective.

        Frozen parameters are not stored where the constructor gives them again: it drew them, or
        loaded them itself. Those that came by `init=` are.
        """
        frozen = dict[str, Tensor]()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                frozen[plain_name(name)] = parameter
        if stored is None:
            return cls(module, digests_of(frozen))
        if stored.is_adapter:
            # What is beside the model may be a copy of it with that adapter.
            return cls(module, digests_of(without_frozen(frozen)))
        return cls(module, {n: stored.frozen[n] for n in frozen if n in stored.frozen})

    def state(self) -> State:
        """See the base class; tied weights are one tensor under several names. Collective."""
        state = self._module.state_dict(keep_vars=True)
        found = {plain_name(name): value for name, value in state.items()}
        # Something else than the optimizer may write to them, as to a teacher's weights.
        now = digests_of({name: found[name] for name in self._frozen})
        frozen = dict[str, str]()
        for name, digest in self._frozen.items():
            if now[name] == digest:
                frozen[name] = digest
                del found[name]
        if frozen:
            found[FROZEN] = frozen
        return found

    def load(self, state: State) -> None:
        """See the base class; all of it is checked before a weight changes."""
        StoredWeights.of(state, "model").fill(self._module)


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Hash the values of tensors, with SHA-256. Collective where one is in shards."""
    found = in_main_memory(map(whole_of, tensors.values()))
    digests = (hashlib.sha256(bits_of(tensor).numpy().data).hexdigest() for tensor in found)
    return dict(zip(tensors, digests, strict=True))


def checkpoint_weights(loaded: Loaded) -> StoredWeights:
    """Give the weights of a run that goes on, or is read."""
    state = state_of(loaded, MODEL, ModelPart.version)
    return StoredWeights.of(state, loaded.path, loaded)


def open_weights(path: Path, world: World | None = None, step: WhichStep = "last") -> StoredWeights:
    """Open weights for a new run; nothing of them is read yet. Collective.

    The path is a run, one of its checkpoints, an exported folder, that of a Hugging Face model, in
    one file or several, or a safetensors file. Names may lack the model's prefix, or have one more.
    """
    world = world or World()
    opened: list[StoredWeights] = []
    if CheckpointStore.of(path).folder.is_dir():
        return _begun_with(load_step(path, step, world))
    if step != "last":
        raise NoCheckpointError(f"step={step}: init={path} is not a run folder; leave step out")
    world.on_all(lambda: opened.append(_open(path, world)))
    return opened[0]


def load_step(run: Path, step: WhichStep, world: World | None = None) -> Loaded:
    """Open a checkpoint of a run to read from, without setting damaged ones aside. Collective."""
    store = CheckpointStore.of(run)
    number = step if isinstance(step, int) else None
    if step == "best" and (number := store.best) is None:
        text = "no checkpoint was chosen; leave it out, or train with checkpoint.best=eval_loss"
        raise ConfigError(f"step=best: in {run} {text}")
    loaded = store.load(number, set_aside=False, world=world or World())
    # What is the best by the average is the average.
    is_average = step == AVERAGE or (step == "best" and store.best_by.startswith(AVERAGE))
    return _with_average(loaded) if is_average else loaded


def _with_average(loaded: Loaded) -> Loaded:
    """Put the average in the place of the weights it is of, in their dtypes; nothing is read."""
    if AVERAGE not in loaded.parts:
        text = "has no average of its weights; leave it out, or train with ema.decay=0.999"
        raise ConfigError(f"step=ema: {loaded.path} {text}")
    state, tensors = state_of(loaded, AVERAGE, WeightAverage.version), dict(loaded.tensors)
    try:
        for name, average in state["weights"].items():
            weight = tensors[f"{MODEL}.{name}"]
            tensors[f"{MODEL}.{name}"] = replace(average, dtype=weight.dtype)
    except (AttributeError, LookupError, TypeError) as error:  # a stranger may have written it
        text = f"step=ema: cannot be used ({error!r:.80}); leave it out"
        raise NoCheckpointError(f"{loaded.path}: {text}") from error
    return replace(loaded, tensors=tensors, is_average=True)


def _begun_with(loaded: Loaded) -> StoredWeights:
    """Give the weights of a checkpoint for a new run."""
    contract: Any = None
    if "terms" in loaded.parts:
        terms = state_of(loaded, "terms", 1)
        # A stranger may have written the file.
        if isinstance(terms, dict):
            contract = terms.get("contract")
    had = any(str(key).startswith(("transforms", "adapter")) for key in contract or ())
    weights = checkpoint_weights(loaded)
    return replace(weights, is_resumed=False, is_transformed=had, others={})


def _open(path: Path, world: World) -> StoredWeights:
    """List the weights in a checkpoint, an exported folder or a file, by plain name."""
    shown = f"init={shown_path(path)}"
    try:
        if is_checkpoint(path):
            return _begun_with(open_checkpoint(path, world=world))
        files = [*filter(Path.is_file, (path, path / WEIGHTS_FILE))][:1]
        if (path / INDEX_FILE).is_file() and not files:
            index = json.loads((path / INDEX_FILE).read_bytes())["weight_map"]
            files = [path / Path(name).name for name in sorted({*index.values()})]
        if files:
            return StoredWeights(values=open_tensors(files), source=path)
        if (path / ADAPTER_FILE).is_file():
            values = open_tensors([path / ADAPTER_FILE])
            return StoredWeights(values=values, source=path, is_transformed=True, is_adapter=True)
    except (DamagedError, OtherFormatError, LookupError, TypeError, ValueError) as error:
        raise NoCheckpointError(f"{shown}: cannot be used: {error}") from error
    except OSError as error:
        raise NoCheckpointError(f"{shown}: cannot be read: {error.strerror}") from error
    raise NoCheckpointError(
        f"{shown}: no weights here: name a run, a checkpoint, an export or a safetensors file"
    )


def export(
    loaded: Loaded,
    to: Path,
    config: Mapping[str, Any],
    model: nn.Module | None = None,
    write: Callable[[Path], object] | None = None,
    beside: Sequence[Callable[[Path], object]] = (),
) -> Path:
    """Write a checkpoint's weights as a new folder, whole or not at all.

    `to` does not exist, or is empty, and `config` becomes its `config.json`. `model` has the
    weights that are written in place of those that are stored. `write` writes the folder in place
    of either, as an adapter does, or a model that knows how; `beside` writes more into it, as a
    tokenizer does.
    """
    if os.path.lexists(to) and not (to.is_dir() and not any(to.iterdir())):
        raise ConfigError(f"export.to: {to} is not empty: name a new folder")
    weights: Mapping[str, Any] = checkpoint_weights(loaded).values
    if model is not None:
        tensors = state_tensors(model.state_dict())
        weights = dict(zip(map(plain_name, tensors), tensors.values(), strict=True))
    weights = without_frozen(weights)
    with durable.as_save_error(to, sum(each.nbytes for each in weights.values())):
        unfinished = durable.begin_folder(to)
        try:
            if write is None:
                write_tensors(unfinished / WEIGHTS_FILE, weights)
                durable.write_json(unfinished / CONFIG_FILE, config)
            else:
                write(unfinished)
            for each in beside:
                each(unfinished)
            if to.is_dir():
                durable.discard(to)
            durable.publish_folder(unfinished, to)
        except SafetensorError as error:  # how a Hugging Face model says that the disk refused
            raise SaveError(f"{to}: could not be written: {error}") from error
        finally:
            # Where it was published nothing is left of it.
            durable.discard(unfinished)
    return to
