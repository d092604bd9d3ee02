"""Read and write how a model makes one embedding of those of a text's tokens.

The files are those of sentence-transformers: modules.json and 1_Pooling/config.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from trainer.config.components import Pooling, Task
from trainer.core.errors import ConfigError
from trainer.core.hub_cache import model_files
from trainer.models.task import POOLING

_FILE = "1_Pooling/config.json"
_MODES: Mapping[str, Pooling | None] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    **dict.fromkeys(
        f"pooling_mode_{name}_tokens" for name in ("max", "mean_sqrt_len", "weightedmean")
    ),
}
"""What their config calls them; None is not there."""
_MODULES = ("Transformer", "Pooling", "Normalize")
"""Parts of such a model that are computed here; losses normalise in any case."""


def set_pooling(module: Any, made_for: Task, pooling: Pooling | None, path: str | None) -> None:  # noqa: ANN401
    """Tell a model that embeds texts how it pools; its class is named for no task."""
    if made_for == "embedding":
        module.task = made_for
        setattr(module, POOLING, pooling or _stated_pooling(path))
        _refuse_parts(path)
    elif pooling is not None:
        raise ConfigError(f"model.pooling={pooling}: is for model.task=embedding, not {made_for}")


def writer_of_pooling(model: nn.Module | None) -> Callable[[Path], None] | None:
    """Give what writes how a model pools into a folder of its weights; None where it does not."""
    pooling = getattr(model, POOLING, None)
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    return None if pooling is None else partial(_write, pooling=pooling, width=width)


def _write(folder: Path, *, pooling: Pooling, width: int | None) -> None:
    modes = {name: mode == pooling for name, mode in _MODES.items()}
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    for path, _ in parts[1:]:
        (folder / path).mkdir()
    (folder / _FILE).write_text(json.dumps({"word_embedding_dimension": width, **modes}, indent=2))
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(listed, indent=2))


def _stated_pooling(path: str | None) -> Pooling:
    """Read how a model of sentence-transformers pools; any other takes the mean."""
    stated = _read(path, _FILE)
    if stated is None:
        return "mean"
    pairs = stated.items() if isinstance(stated, dict) else ()
    modes = [name for name, value in pairs if name in _MODES and value is True]
    if len(modes) != 1 or (found := _MODES[modes[0]]) is None:
        raise ConfigError(
            f"model.path={path}: {_FILE} says {' and '.join(modes) or 'no way'}; "
            "type model.pooling=mean, cls or last"
        )
    return found


def _refuse_parts(path: str | None) -> None:
    """Refuse a model with a part, such as a dense layer, that would be left out."""
    listed = _read(path, "modules.json")
    kinds = [str(each.get("type")) for each in listed or () if isinstance(each, dict)]
    names = [kind.rpartition(".")[2] for kind in kinds]
    if odd := [name for name in names if name not in _MODULES]:
        raise ConfigError(
            f"model.path={path}: modules.json has a {odd[0]}, which would be left out; take the "
            "model without it, or write a class for it: model._target_=mine.Model"
        )


def _read(path: str | None, name: str) -> Any:  # noqa: ANN401 - any JSON
    """Read a file of a model's folder, or of the hub; None where there is none."""
    files = model_files(path, name) if path else []
    try:
        return json.loads(files[0].read_text(encoding="utf-8")) if files else None
    except ValueError as error:
        raise ConfigError(f"model.path={path}: {name} is not valid JSON: {error}") from error
