"""Find weights as they are typed: a path, or a model in the local cache of the hub."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from trainer.core.format import expanded

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""A model or data set on the hub: `gpt2`, `org/name`."""


def weights_path(typed: str) -> Path:
    """Give the path of weights, which need not be there.

    A name on the hub is looked up in the cache of downloads, if no such path is there; nothing is
    fetched. Of a folder of that cache, `models--org--name`, it is the snapshot of the main branch.
    """
    path = expanded(typed)
    if HUB_NAME.fullmatch(typed) and not os.path.exists(path):  # noqa: PTH110 - too long for pathlib
        with suppress(ImportError):
            from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415 - only for a name

            cached = Path(HF_HUB_CACHE, f"models--{typed.replace('/', '--')}")
            path = cached if os.path.isdir(cached) else path  # noqa: PTH112 - as above
    snapshots = path / "snapshots"
    if not os.path.isdir(snapshots):  # noqa: PTH112 - as above
        return path
    main = path / "refs" / "main"
    named = snapshots / main.read_text().strip() if main.is_file() else None
    return named or next(iter(sorted(snapshots.iterdir())), path)
