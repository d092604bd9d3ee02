"""Weights without the rest: a new run's start from another's (`init=`), and `train export`.

An export is a folder with `model.safetensors` and `config.json`: plain names, a tied weight under
each of its names, as `load_state_dict` wants them. Hugging Face models write their own layout.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint import tensor_files
from trainer.checkpoint.integrity import verify
from trainer.checkpoint.manifest import DamagedError, NewerFormatError
from trainer.checkpoint.rank_pieces import find_aliases
from trainer.checkpoint.state import check_tensors, load_model, model_tensors
from trainer.checkpoint.store import CheckpointStore, Loaded
from trainer.checkpoint.tensor_reader import Stored, stored_file, stored_in
from trainer.core import durable
from trainer.core.errors import ConfigError, NoCheckpointError
from trainer.core.world import World

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
CHECKPOINTS = "checkpoints"

_MODEL = "model."


def load_weights(
    model: nn.Module, path: Path, world: World | None = None, step: int | None = None
) -> Path:
    """Fill a model with stored weights and buffers. Collective.

    Args:
        model: of the architecture that was stored.
        path: a run, one of its checkpoints, an exported folder, or a safetensors file.
        world: the ranks that load, each the rows it holds.
        step: which checkpoint of a run; None for the newest that is intact.

    Returns:
        The folder or file that was read.

    Raises:
        NoCheckpointError: nothing usable is there, or it does not fit the model.
    """
    source, found = _find(path, world or World(), step)
    _fill(model, found, source)
    return source


def take_weights(model: nn.Module, loaded: Loaded) -> None:
    """Fill a model with a verified checkpoint's weights and buffers.

    Raises:
        NoCheckpointError: they do not fit the model, or can no longer be read.
    """
    _fill(model, _weights(loaded.stored), loaded.path)


def _fill(model: nn.Module, found: dict[str, Stored], source: Path) -> None:
    expected = model_tensors(model)
    for alias, name in find_aliases(expected).items():
        _tie(found, alias, name)
    check_tensors(found, expected, source, "init= needs weights of this very model")
    try:
        load_model(model, found)
    except (DamagedError, OSError) as error:
        raise NoCheckpointError(f"{source}: changed while it was read: {error}") from error


def export(
    loaded: Loaded,
    to: Path,
    config: Mapping[str, Any],
    model: Any = None,  # noqa: ANN401
) -> Path:
    """Write a checkpoint's weights as a new folder, whole or not at all.

    Args:
        loaded: the checkpoint.
        to: a folder that does not exist, or is empty.
        config: becomes `config.json`.
        model: of Hugging Face, with these weights; it writes itself, for its `from_pretrained`.

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
        for name, tensor in loaded.stored.items()
        if name.startswith(_MODEL)
    }
    unfinished = to.with_name(f"{durable.UNFINISHED}{to.name}-{uuid.uuid4().hex}")
    try:
        durable.make_folders(to.parent)
        durable.make_folder(unfinished)
        if model is None:
            tensor_files.write_shard(unfinished / WEIGHTS, weights)
            durable.write_json(unfinished / CONFIG, config)
        else:
            _save_pretrained(model, unfinished)
        if to.is_dir():
            durable.discard(to)
        durable.publish(unfinished, to)
    except OSError as error:
        durable.discard(unfinished)
        failure = durable.save_error(error, to, sum(each.nbytes for each in weights.values()))
        raise failure from error
    return to


def _save_pretrained(model: Any, folder: Path) -> None:  # noqa: ANN401 - a class of transformers
    """Let a Hugging Face model write itself, in one file.

    Raises:
        OSError: the disk refused.
    """
    try:
        model.save_pretrained(folder, max_shard_size="1000TB")
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error)) from error


def _find(path: Path, world: World, step: int | None) -> tuple[Path, dict[str, Stored]]:
    """Find out what a path is, and the weights in it, by plain name. Collective.

    Raises:
        NoCheckpointError: nothing usable is there.
    """
    if (path / CHECKPOINTS).is_dir():
        loaded = CheckpointStore(path / CHECKPOINTS).load(step, set_aside=False, world=world)
        return loaded.path, _weights(loaded.stored)
    if step is not None:
        raise NoCheckpointError(f"step={step}: init={path} is no run folder; leave step out")
    found: list[dict[str, Stored]] = []

    def find() -> None:
        found.append(_found(path, world))

    world.on_all(find)
    return path, found[0]


def _found(path: Path, world: World) -> dict[str, Stored]:
    """List the weights in a checkpoint, an exported folder or a file, by plain name.

    Raises:
        NoCheckpointError: nothing usable is there.
    """
    try:
        if path.is_file():
            return stored_file(path)
        if (path / manifests.FILE_NAME).is_file():
            manifest = verify(path, rank=world.rank, size=world.size)
            stored, files = stored_in(path, manifest.tensors, manifest.aliases)
            for name in manifest.files:
                files.open(name)
            return _weights(stored)
        if (path / WEIGHTS).is_file():
            return stored_file(path / WEIGHTS)
    except (DamagedError, NewerFormatError) as error:
        raise NoCheckpointError(f"init={path}: cannot be used: {error}") from error
    except OSError as error:
        raise NoCheckpointError(f"init={path}: cannot be read: {error.strerror}") from error
    raise NoCheckpointError(
        f"init={path}: no weights here: name a run folder, a checkpoint, an exported folder, or a "
        "safetensors file"
    )


def _weights(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    return {n.removeprefix(_MODEL): t for n, t in stored.items() if n.startswith(_MODEL)}


def _tie(found: dict[str, Stored], alias: str, name: str) -> None:
    """Give a tied weight its other name, whichever of the two was stored."""
    if alias not in found and name in found:
        found[alias] = found[name]
    elif name not in found and alias in found:
        found[name] = found[alias]
