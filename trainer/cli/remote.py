"""Bring what a URL names to its copy on this machine, and send runs there.

The functions that `conf/storage.yaml` names do it; paths that are no copies of a URL stay as they
are. Imports neither Hydra nor torch.
"""

from __future__ import annotations

import pkgutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

from trainer.config.option_files import data_dir, load_yaml
from trainer.core.urls import url_of

What = Literal["run", "records", "data"]
"""A run; all runs below a folder, of whose checkpoints only the manifests come; files of data."""


def bring(path: Path, what: What = "run") -> bool:
    """Bring to a copy what the store has newer; gives whether it answered, and prints why not."""
    return url_of(path) is None or bool(_function("bring")(path, what))


def sent(folder: Path) -> AbstractContextManager[None]:
    """Give a context in which a run's folder is sent as it grows, if it is the copy of a URL."""
    found: AbstractContextManager[None] = nullcontext()
    return found if url_of(folder) is None else _function("sent")(folder)


def _function(name: str) -> Any:  # noqa: ANN401 - a function of a feature
    return pkgutil.resolve_name(load_yaml(data_dir("conf") / "storage.yaml")[name])
