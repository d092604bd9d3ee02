"""Take weights without the rest: a new run's start from another's (`init=`), and `train export`.

An export is a folder with `model.safetensors` and `config.json`: plain names, a tied weight under
each of its names, as `load_state_dict` wants them. Hugging Face models write their own layout.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from trainer.checkpoint.manifest import FILE_NAME, DamagedError, OtherFormatError
from trainer.checkpoint.state import load_model
from trainer.checkpoint.store import CHECKPOINTS, CheckpointStore, Loaded, open_checkpoint
from trainer.checkpoint.tensor_files import StoredTensor, open_tensors, write_tensors
from trainer.core import durable
from trainer.core.errors import ConfigError, NoCheckpointError, SaveError
from trainer.core.format import shown_path
from trainer.core.world import World

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"


def load_weights(
    model: nn.Module, path: Path, world: World | None = None, step: int | None = None
) -> Loaded | None:
    """Fill a model with stored weights and buffers; give the checkpoint they are of. Collective.

    Args:
        model: of the architecture that was stored.
        path: a run, one of its checkpoints, an exported folder, or a safetensors file.
        world: the ranks that load, each the rows it holds.
        step: which checkpoint of a run; None for the newest that is intact.

    Raises:
        NoCheckpointError: nothing usable is there, or it does not fit the model.
    """
    world = world or World()
    opened: list[tuple[Loaded | None, dict[str, StoredTensor]]] = []
    if (path / CHECKPOINTS).is_dir():
        newest = CheckpointStore(path / CHECKPOINTS).load(step, set_aside=False, world=world)
        opened = [(newest, newest.weights)]
    elif step is not None:
        raise NoCheckpointError(f"step={step}: init={path} is not a run folder; leave step out")
    else:
        world.on_all(lambda: opened.append(_open_weights(path, world)))
    ((loaded, found),) = opened
    load_model(model, found, loaded.path if loaded else path)
    return loaded


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
        NoCheckpointError: its ties are none.
        SaveError: it could not be written; nothing is left of it.
    """
    if os.path.lexists(to) and not (to.is_dir() and not any(to.iterdir())):
        raise ConfigError(f"export.to: {to} is not empty: name a new folder")
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


def _open_weights(path: Path, world: World) -> tuple[Loaded | None, dict[str, StoredTensor]]:
    """List the weights in a checkpoint, an exported folder or a file, by plain name."""
    shown = f"init={shown_path(path)}"
    try:
        if (path / FILE_NAME).is_file():
            loaded = open_checkpoint(path, world=world)
            return loaded, loaded.weights
        for file in (path, path / WEIGHTS_FILE):
            if file.is_file():
                return None, open_tensors([file])
    except (DamagedError, OtherFormatError) as error:
        raise NoCheckpointError(f"{shown}: cannot be used: {error}") from error
    except OSError as error:
        raise NoCheckpointError(f"{shown}: cannot be read: {error.strerror}") from error
    raise NoCheckpointError(
        f"{shown}: no weights here: name a run, a checkpoint, an export or a safetensors file"
    )
