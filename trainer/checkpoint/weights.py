"""Weights without the rest: a new run's start from another's (`init=`), and `train export`.

An export is a folder with `model.safetensors` and `config.json`: plain names, each tied weight
once, readable by everything that reads safetensors. Hugging Face models find their own layout in
it when `config.json` is theirs.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainer import durable
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint import shards
from trainer.checkpoint.manifest import DamagedError, NewerFormatError
from trainer.checkpoint.state import check_tensors, load_model, model_tensors
from trainer.checkpoint.store import CheckpointStore, Loaded, verify
from trainer.errors import ConfigError, NoCheckpointError

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
CHECKPOINTS = "checkpoints"

_MODEL = "model."


def load_weights(model: nn.Module, path: Path) -> Path:
    """Fill a model with stored weights and buffers. Collective where parameters are sharded.

    Args:
        model: of the architecture that was stored.
        path: a run, one of its checkpoints, an exported folder, or a safetensors file.

    Returns:
        The folder or file that was read.

    Raises:
        NoCheckpointError: nothing usable is there, or it does not fit the model.
    """
    source, found = _read(path)
    expected = model_tensors(model)
    for alias, name in shards.find_aliases(expected).items():
        _tie(found, alias, name)
    check_tensors(found, expected, source, "init= needs weights of this very model")
    load_model(model, found)
    return source


def export(loaded: Loaded, to: Path, config: Mapping[str, Any]) -> Path:
    """Write a checkpoint's weights as a new folder, whole or not at all.

    Args:
        loaded: the checkpoint.
        to: a folder that does not exist, or is empty.
        config: becomes `config.json`.

    Returns:
        `to`.

    Raises:
        ConfigError: `to` is taken.
        SaveError: it could not be written; nothing is left of it.
    """
    if os.path.lexists(to) and not (to.is_dir() and not any(to.iterdir())):
        raise ConfigError(f"export.to: {to} is not empty: name a new folder")
    weights = {
        name.removeprefix(_MODEL): tensor
        for name, tensor in loaded.tensors.items()
        if name.startswith(_MODEL) and name not in loaded.aliases
    }
    unfinished = to.with_name(f"{durable.UNFINISHED}{to.name}-{uuid.uuid4().hex}")
    try:
        durable.make_folders(to.parent)
        durable.make_folder(unfinished)
        shards.write_shard(unfinished / WEIGHTS, weights)
        durable.write_json(unfinished / CONFIG, config)
        if to.is_dir():
            durable.discard(to)
        durable.publish(unfinished, to)
    except OSError as error:
        durable.discard(unfinished)
        failure = durable.save_error(error, to, shards.num_bytes(weights))
        raise failure from error
    return to


def _read(path: Path) -> tuple[Path, dict[str, Tensor]]:
    """Find out what a path is, and read the weights in it, by plain name.

    Raises:
        NoCheckpointError: nothing usable is there.
    """
    try:
        if path.is_file():
            return path, shards.read_file(path)
        if (path / CHECKPOINTS).is_dir():
            loaded = CheckpointStore(path / CHECKPOINTS).load(set_aside=False)
            return loaded.path, _weights(loaded.tensors)
        if (path / manifests.FILE_NAME).is_file():
            return path, _read_checkpoint(path)
        if (path / WEIGHTS).is_file():
            return path, shards.read_file(path / WEIGHTS)
    except (DamagedError, NewerFormatError) as error:
        raise NoCheckpointError(f"{path}: cannot be used: {error}") from error
    except OSError as error:
        raise NoCheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    raise NoCheckpointError(
        f"{path}: no weights here: name a run folder, a checkpoint, an exported folder, or a "
        "safetensors file"
    )


def _read_checkpoint(path: Path) -> dict[str, Tensor]:
    manifest = verify(path)
    model_files = {shape.file for n, shape in manifest.tensors.items() if n.startswith(_MODEL)}
    tensors = shards.read(path, sorted(model_files), manifest.tensors)
    aliases = {a: tensors[n] for a, n in manifest.aliases.items() if n in tensors}
    return _weights(tensors | aliases)


def _weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(_MODEL): t for n, t in tensors.items() if n.startswith(_MODEL)}


def _tie(found: dict[str, Tensor], alias: str, name: str) -> None:
    """Give a tied weight its other name, whichever of the two was stored."""
    if alias not in found and name in found:
        found[alias] = found[name]
    elif name not in found and alias in found:
        found[name] = found[alias]
