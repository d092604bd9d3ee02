"""Sign the records of a run, so that whoever made it consents to its classes once.

The key is the user's: it lies in their configuration folder, and no run folder holds it. Without
one, as where that folder cannot be written, every run is a stranger's.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from pathlib import Path
from typing import Any

KEY_BYTES = 32


def signature(config: object, overrides: object) -> str | None:
    """Give the HMAC-SHA256 of what a run is composed from; None without a key.

    Args:
        config: as its config.yaml holds it.
        overrides: as its .hydra holds them.
    """
    key = _key()
    if key is None:
        return None
    text = json.dumps([config, overrides], sort_keys=True, default=str)
    return hmac.new(key, text.encode(errors="surrogateescape"), "sha256").hexdigest()


def is_signed(signed: Any, config: object, overrides: object) -> bool:  # noqa: ANN401 - any JSON
    """Whether a signature, perhaps a stranger's, is this user's for these records."""
    own = signature(config, overrides)
    return (
        own is not None
        and isinstance(signed, str)
        and hmac.compare_digest(signed.encode(errors="replace"), own.encode())
    )


def _key() -> bytes | None:
    """Read the user's key, which is made at first; None where that is not to be had."""
    try:
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        path = Path(base) / "step-trainer" / "key"
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished = path.with_name(f"key-{os.getpid()}")
            file = os.open(unfinished, os.O_WRONLY | os.O_CREAT, 0o600)
            with os.fdopen(file, "wb") as stream:
                stream.write(secrets.token_bytes(KEY_BYTES))
            unfinished.rename(path)
        key = path.read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: nobody's home
        return None
    return key if len(key) == KEY_BYTES else None
