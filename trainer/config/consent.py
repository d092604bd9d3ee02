"""Name the settings that only the command line may give: anybody may send a recipe or a run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from trainer.config.messages import ancestors, clip, flat, show

ONLY_TYPED: Mapping[str, str] = {
    "hydra": "Hydra's own settings can start programs",
    "trust": "it lets code run",
    "command": "it chooses what to do",
    "resume": "it chooses a run",
    "resume_allow": "it chooses what a resumed run may change",
    "run": "it chooses a run",
    "step": "it chooses a checkpoint",
    "init": "it chooses weights to read",
    "outputs": "it chooses where a run writes",
    "export": "it chooses where weights are written",
    "wandb.mode": "it chooses where metrics go",
    "wandb.entity": "it chooses where metrics go",
}
"""Keys that neither a recipe nor a run folder gives, whole sections among them, with the reason."""

_REMOTE_CODE = ("trust_remote_code", "attn_implementation", "experts_implementation")
_LOCAL = ("disabled", "offline")


def reason_to_type(key: str) -> str | None:
    """Say why a dotted key is the command line's alone, or None where it is not."""
    if any(part.lstrip("_") in _REMOTE_CODE for part in key.split(".")):
        return "it lets in code from the network"
    return next((ONLY_TYPED[k] for k in (key, *ancestors(key)) if k in ONLY_TYPED), None)


def asked(key: str, value: object) -> Iterator[str]:
    """Find what a setting needs consent for, at any depth; what stays on this machine needs none.

    Args:
        key: dotted.
        value: as written; a reference may become anything.

    Yields:
        Dotted keys, what is in a list under the key of the list.
    """
    # An implementation of the hub's is written owner/name.
    is_word = "implementation" in key and isinstance(value, str) and "/" not in value
    if reason_to_type(key) and not is_word and (key != "wandb.mode" or value not in _LOCAL):
        yield key
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from asked(f"{key}.{name}", inner)
    elif isinstance(value, list):
        for inner in value:
            yield from asked(key, inner)


def consent_faults(
    tree: Mapping[str, Any], offered: Mapping[str, Any], typed: Collection[str]
) -> Iterator[str]:
    """Find settings that somebody else gives and only the user may, through a reference too.

    Args:
        tree: a config, resolved.
        offered: the same options without any values.
        typed: dotted keys that the user gave.

    Yields:
        One line per key.
    """
    offers = flat(offered)
    for key, value in flat(tree).items():
        if key not in typed and not (key in offers and offers[key] == value):
            for found in asked(key, value):
                text = f"{found}={show(value)}: comes from a recipe or a run"
                yield clip(f"{text}; type it yourself: {reason_to_type(found)}")
