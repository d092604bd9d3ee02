"""What only the command line may say: not a recipe and not a run folder, which anybody may send."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from trainer.config.messages import ancestors, clip, flat, show

_METRICS = "where metrics go is the command line's to say"
_MACHINES = "it says which machines meet"

ONLY_TYPED: Mapping[str, str] = {
    "hydra": "Hydra's own settings start programs",
    "trust": "only the command line gives trust",
    "command": "what to do is the command line's to say",
    "resume": "which run goes on is the command line's to say",
    "resume_allow": "what a resumed run may change is the command line's to say",
    "run": "which run is read is the command line's to say",
    "step": "which checkpoint is read is the command line's to say",
    "init": "whose weights are read is the command line's to say",
    "outputs": "where a run writes is the command line's to say",
    "export": "where weights are written is the command line's to say",
    "wandb.mode": _METRICS,
    "wandb.entity": _METRICS,
    "parallel.rendezvous": _MACHINES,
    "parallel.nodes": _MACHINES,
    "parallel.node": _MACHINES,
}
"""Keys, whole sections among them, with the reason."""

_REMOTE_CODE = ("trust_remote_code", "attn_implementation", "experts_implementation")
_LOCAL = ("disabled", "offline")


def reason_to_type(key: str) -> str | None:
    """Say why a dotted key is the command line's alone, or None where it is not."""
    if any(part.lstrip("_") in _REMOTE_CODE for part in key.split(".")):
        return "it lets in code from the network"
    return next((ONLY_TYPED[k] for k in (key, *ancestors(key)) if k in ONLY_TYPED), None)


def asked(key: str, value: object) -> Iterator[str]:
    """Find what a setting asks consent for, at any depth; what stays here asks for none.

    Args:
        key: dotted.
        value: as written; a reference may become anything.

    Yields:
        Dotted keys, what is in a list under the key of the list.
    """
    if reason_to_type(key) and not _stays_here(key, value):
        yield key
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from asked(f"{key}.{name}", inner)
    elif isinstance(value, list):
        for inner in value:
            yield from asked(key, inner)


def _stays_here(key: str, value: object) -> bool:
    """Whether W&B sends nothing, or an implementation is none of the hub's: `owner/name`."""
    is_word = isinstance(value, str) and "implementation" in key and "/" not in value
    return is_word or (key == "wandb.mode" and value in _LOCAL)


def consent_faults(
    tree: Mapping[str, Any], offered: Mapping[str, Any], typed: Collection[str]
) -> Iterator[str]:
    """Find what was said by somebody else, by way of a reference too.

    Args:
        tree: a config, resolved.
        offered: the same options without any values.
        typed: dotted keys that the user gave.

    Yields:
        One line per key.
    """
    offers = flat(offered)
    for key, value in flat(tree).items():
        if key in typed or (key in offers and offers[key] == value):
            continue
        for found in asked(key, value):
            line = f"{found}={show(value)}: said by a recipe or a run; type it yourself"
            yield clip(f"{line}: {reason_to_type(found)}")
