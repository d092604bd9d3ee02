"""Find what is typed as a path or as a name on the hub, which may be in its local cache."""

from __future__ import annotations

import os
import re
import socket
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from trainer.core.format import expanded

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # on the hub: `gpt2`, `org/name`

_no_address = set[str]()  # hosts of the hub that were looked for in vain


def hub_name(source: str) -> str | None:
    """Give the name on the hub of what was loaded; None of a folder that has none.

    A folder of the hub's cache is models--org--name/snapshots/COMMIT.
    """
    parts = Path(source).parts
    if "snapshots" in parts[1:]:
        source = parts[parts.index("snapshots") - 1].removeprefix("models--").replace("--", "/", 1)
    elif os.path.exists(source):  # noqa: PTH110 - too long for pathlib
        return None
    return source if HUB_NAME.fullmatch(source) else None


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
    if main.is_file():
        return snapshots / main.read_text().strip()
    return min(snapshots.iterdir(), default=path)


def read_cache_without_network(typed: str) -> None:
    """Have the hub's library read its cache alone, where the hub's host has no address.

    It would try for a minute, and print each attempt. Nothing is asked for a path that is there.
    """
    is_there = os.path.exists(expanded(typed))  # noqa: PTH110 - too long for pathlib
    if is_there or getproxies() or os.environ.get("HF_HUB_OFFLINE") == "1":
        return
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        _no_address.add(str(host))
        os.environ["HF_HUB_OFFLINE"] = "1"
        if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
            # The library read the variable as it was imported.
            vars(constants)["HF_HUB_OFFLINE"] = True


def why_absent(what: str) -> str:
    """Say that a path, or name on the hub, is nowhere, and whether the hub was asked."""
    text = f"no such file or folder, and no {what} of this name"
    if _no_address:
        return f"{text} in the cache of the hub, which cannot be reached from here"
    if os.environ.get("HF_HUB_OFFLINE") in {"1", "true", "TRUE", "yes", "on"}:
        return f"{text} in the cache of the hub, which is not asked: HF_HUB_OFFLINE=1 is set"
    return f"{text} that the hub gives"


def model_folder(source: str) -> str:
    """Give the folder of a model that a file of it may stand for, or its name on the hub."""
    return str(Path(source).parent) if Path(source).is_file() else source


def model_files(source: str, *names: str) -> list[Path]:
    """Find files of a model, in its folder or on the hub; those that it lacks are left out."""
    folder = model_folder(source)
    if os.path.exists(folder):  # noqa: PTH110 - as above
        return [file for name in names if (file := Path(folder, name)).is_file()]
    read_cache_without_network(source)
    found = list[Path]()
    for name in names:
        # Whoever loads the model says why.
        with suppress(ImportError, OSError, ValueError):
            from huggingface_hub import hf_hub_download  # noqa: PLC0415 - for such a name

            found.append(Path(hf_hub_download(source, name)))
    return found
