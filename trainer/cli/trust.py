"""Decide whose classes may run: the user's own words, folder and signed runs, or what they trust.

A run is signed with a key that lies in the user's configuration folder, and in no run folder.
Without one, as where that folder cannot be written, every run is a stranger's.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from trainer.cli.overrides import TARGET, dotted
from trainer.config.components import COMPONENTS, targets_in
from trainer.config.messages import ancestors, clip, flat, lookup
from trainer.config.run_config import RunConfig

KEY_BYTES = 32


def sign(config: object, overrides: object) -> str | None:
    """Give the HMAC-SHA256 of what a run is composed from; None without a key.

    Args:
        config: as its config.yaml holds it.
        overrides: as its .hydra holds them.
    """
    key = _user_key()
    if key is None:
        return None
    text = json.dumps([config, overrides], sort_keys=True, default=str)
    return hmac.new(key, text.encode(errors="surrogateescape"), "sha256").hexdigest()


def is_signed(signature: object, config: object, overrides: object) -> bool:
    """Whether a signature, perhaps a stranger's, is this user's for these records."""
    own = sign(config, overrides)
    if own is None or not isinstance(signature, str):
        return False
    return hmac.compare_digest(signature.encode(errors="replace"), own.encode())


def _user_key() -> bytes | None:
    """Read the user's key, made when it is first needed; None where it cannot be written."""
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
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    return key if len(key) == KEY_BYTES else None


def typed_values(overrides: Iterable[Override], replayed: Collection[Override]) -> dict[str, Any]:
    """Give what the user typed, by dotted key, what is inside a mapping one by one.

    Args:
        overrides: of the run.
        replayed: those of them that come from a run folder.
    """
    foreign = {dotted(override) for override in replayed}
    typed = [o for o in overrides if not o.is_delete() and dotted(o) not in foreign]
    return {k: value for o in typed for k, value in flat({dotted(o): o.value()}).items()}


def consented_components(
    full: DictConfig,
    tree: Mapping[str, Any],
    typed: Mapping[str, Any],
    signed: Collection[tuple[str, str]],
) -> frozenset[str]:
    """Name the components whose classes, of their arguments too, the user consented to.

    Args:
        full: the composed config, with Hydra's own node.
        tree: the same, resolved.
        typed: the user's words; see `typed_values`.
        signed: classes of a run that the user signed, each with its dotted key.
    """
    listed = tree.get("hooks")
    hooks = listed if isinstance(listed, list) else []
    sections = [hook if isinstance(hook, Mapping) else {TARGET: hook} for hook in hooks]
    is_typed = any(key.partition(".")[0] == "hooks" for key in typed)
    found = {"hooks"} if is_typed or set(targets_in("hooks", sections)) <= set(signed) else set()
    for path in COMPONENTS:
        own = {*signed, *targets_in(path, _own_option(full, path))}
        pairs = targets_in(path, lookup(tree, path))
        mine = [pair for pair in pairs if pair[0] == path or pair[0] not in COMPONENTS]
        if mine and all(pair in own or _is_typed(pair[0], path, typed) for pair in mine):
            found.add(path)
    return frozenset(found)


def _is_typed(place: str, path: str, typed: Mapping[str, Any]) -> bool:
    """Whether the user typed the class at a place in a component, or the list that it is in."""
    lists = (key for key in (place, *ancestors(place)) if key.startswith(f"{path}."))
    return f"{place}.{TARGET}" in typed or any(isinstance(typed.get(key), list) for key in lists)


def _own_option(full: DictConfig, path: str) -> object:
    """Read the option of a component from the user's own folder; None where it is not theirs."""
    sources = [s for s in full.hydra.runtime.config_sources if s.schema == "file"]
    group = path.replace(".", "/")
    name = f"{group}/{full.hydra.runtime.choices.get(group)}.yaml"
    folders = sorted(sources, key=lambda source: source.provider != "main")
    found = next((s for s in folders if (Path(s.path) / name).is_file()), None)
    if found is None or found.provider == "main":
        return None
    return yaml.safe_load((Path(found.path) / name).read_text())


def trust_faults(config: RunConfig) -> list[str]:
    """Say in one line which classes nobody consented to, before a module could be imported."""
    unknown = {
        place: target
        for place, target in config.own_classes(typed=False)
        if target.partition(".")[0] not in config.trust
    }
    if not unknown:
        return []
    (path, target), *others = unknown.items()
    more = f" ({', '.join(other for other, _ in others)} too)" if others else ""
    packages = dict.fromkeys(each.partition(".")[0] for each in unknown.values())
    named = f"{path}.{TARGET}={target}{more}: named by a recipe or a run, not by you"
    return [clip(f"{named}; type 'trust=[{','.join(packages)}]'")]
