"""Take weights without the rest: a new run's start from another's (`init=`), and `train export`.

An export is a folder with `model.safetensors` and `config.json`: plain names, a tied weight under
each of its names, as `load_state_dict` wants them. Hugging Face models write their own layout.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from safetensors import SafetensorError
from torch import nn

from trainer.checkpoint.manifest import FILE_NAME, DamagedError, NewerFormatError
from trainer.checkpoint.state import load_model
from trainer.checkpoint.store import CHECKPOINTS, CheckpointStore, Loaded, open_checkpoint
from trainer.checkpoint.tensor_files import StoredTensor, open_tensors, write_tensors
from trainer.core import durable
from trainer.core.errors import ConfigError, NoCheckpointError, SaveError
from trainer.core.format import shown_path
from trainer.core.world import World

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"


@final
@dataclass(frozen=True, kw_only=True)
class Source:
    """Where weights were read.

    Attributes:
        path: a checkpoint, an exported folder, or a file.
        step: of the checkpoint; None where the weights are of none.
        messages: a line for each newer checkpoint that could not be used.
        state: what the checkpoint keeps of its run, unvalidated; empty where there is none.
    """

    path: Path
    step: int | None = None
    messages: tuple[str, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, loaded: Loaded) -> Source:
        """Name a checkpoint."""
        state = loaded.meta.get("extra")
        kept = state if isinstance(state, dict) else {}
        return cls(path=loaded.path, step=loaded.step, messages=loaded.messages, state=kept)

    def __str__(self) -> str:
        return str(self.path) if self.step is None else f"step {self.step}, {self.path}"


def load_weights(
    model: nn.Module, path: Path, world: World | None = None, step: int | None = None
) -> Source:
    """Fill a model with stored weights and buffers, and say which they were. Collective.

    Args:
        model: of the architecture that was stored.
        path: a run, one of its checkpoints, an exported folder, or a safetensors file.
        world: the ranks that load, each the rows it holds.
        step: which checkpoint of a run; None for the newest that is intact.

    Raises:
        NoCheckpointError: nothing usable is there, or it does not fit the model.
    """
    world = world or World()
    if (path / CHECKPOINTS).is_dir():
        loaded = CheckpointStore(path / CHECKPOINTS).load(step, set_aside=False, world=world)
        source, found = Source.of(loaded), loaded.weights
    elif step is not None:
        raise NoCheckpointError(f"step={step}: init={path} is not a run folder; leave step out")
    else:
        opened: list[tuple[Source, dict[str, StoredTensor]]] = []
        world.on_all(lambda: opened.append(_open_weights(path, world)))
        ((source, found),) = opened
    load_model(model, found, source.path)
    return source


def export(
    loaded: Loaded,
    to: Path,
    config: Mapping[str, Any],
    model: Any = None,  # noqa: ANN401
) -> Path:
    """Write a checkpoint's weights as a new folder, whole or not at all.

    Args:
        loaded: the checkpoint.
        to: a folder that does not exist, or is empty; returned.
        config: becomes `config.json`.
        model: of Hugging Face, with these weights; it writes itself, for its `from_pretrained`.

    Raises:
        ConfigError: `to` is taken.
        NoCheckpointError: the checkpoint is of an earlier format, or its ties are none.
        SaveError: it could not be written; nothing is left of it.
    """
    if os.path.lexists(to) and not (to.is_dir() and not any(to.iterdir())):
        raise ConfigError(f"export.to: {to} is not empty: name a new folder")
    loaded.check_format()
    weights = loaded.weights
    try:
        weights |= {alias: weights[name] for alias, name in loaded.meta["model"]["ties"].items()}
    except (LookupError, TypeError, AttributeError) as error:
        raise NoCheckpointError(f"{loaded.path}: damaged: a tied weight is missing") from error
    unfinished = to.with_name(f"{durable.UNFINISHED}{to.name}-{uuid.uuid4().hex}")
    try:
        with durable.as_save_error(to, sum(each.nbytes for each in weights.values())):
            durable.make_folders(to.parent)
            durable.make_folder(unfinished)
            if model is None:
                write_tensors(unfinished / WEIGHTS_FILE, weights)
                durable.write_json(unfinished / CONFIG_FILE, config)
            else:
                model.save_pretrained(unfinished, max_shard_size="1000TB")  # in one file
            if to.is_dir():
                durable.discard(to)
            durable.publish(unfinished, to)
    except SafetensorError as error:  # how a Hugging Face model says that the disk refused
        raise SaveError(f"{to}: could not be written: {error}") from error
    finally:
        durable.discard(unfinished)  # of which nothing is left where it was published
    return to


def _open_weights(path: Path, world: World) -> tuple[Source, dict[str, StoredTensor]]:
    """List the weights in a checkpoint, an exported folder or a file, by plain name."""
    try:
        if (path / FILE_NAME).is_file():
            loaded = open_checkpoint(path, world=world)
            return Source.of(loaded), loaded.weights
        for file in (path, path / WEIGHTS_FILE):
            if file.is_file():
                return Source(path=path), open_tensors([file])
    except (DamagedError, NewerFormatError) as error:
        raise NoCheckpointError(f"init={path}: cannot be used: {error}") from error
    except OSError as error:
        raise NoCheckpointError(f"init={path}: cannot be read: {error.strerror}") from error
    raise NoCheckpointError(
        f"init={shown_path(path)}: no weights here: name a run, a checkpoint, an export or a "
        "safetensors file"
    )
