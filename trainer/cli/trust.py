"""Decide whose classes may run, and which folders may be read.

Classes are the user's own words, folder and signed runs, or what they trust.

A run is signed with a key that lies in the user's configuration folder, and in no run folder.
Without one, as where that folder cannot be written, every run is a stranger's.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import stat
from collections.abc import Collection, Mapping
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from trainer.cli.overrides import TARGET
from trainer.config.components import COMPONENTS, targets_in
from trainer.config.messages import ancestors, clip, line, lookup
from trainer.config.run_config import RunConfig
from trainer.core.errors import NoCheckpointError
from trainer.core.own_code import OWN_CODE

KEY_BYTES = 32
WANDB_LINK = "debug-core.log"
"""W&B leaves a link of this name to its own log, outside; nothing is ever written through it."""

WRITTEN = [".hydra", "checkpoints", "errors", "ranks", "profile", "wandb", "multirun.yaml"]
WRITTEN += ["metrics.jsonl", "samples.jsonl"]
"""What a run or sweep writes in place, or into, in its folder; other files are renamed there.

Other links in a folder that is typed are the user's own matter: more than a run may lie there.
"""


def sign(config: Mapping[str, Any], overrides: object) -> str | None:
    """Give the HMAC-SHA256 of what a run's config.yaml and .hydra hold; None without a key.

    The files of the current folder that its classes come from count too: a name is no code.
    """
    if (key := _user_key()) is None:
        return None
    targets = sorted({t for name, value in config.items() for _, t in targets_in(name, value)})
    try:
        files = [sha256(path.read_bytes()).hexdigest() for path in OWN_CODE.files(targets)]
    except OSError:
        return None
    content = json.dumps([config, overrides, files], sort_keys=True, default=str)
    return hmac.new(key, content.encode(errors="surrogateescape"), "sha256").hexdigest()


def _user_key() -> bytes | None:
    """Read the user's key, made when it is first needed; None where it cannot be written."""
    try:
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        path = Path(base) / "step-trainer" / "key"
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished = path.with_name(f"key-{os.getpid()}")
            unfinished.touch(mode=0o600)
            unfinished.write_bytes(secrets.token_bytes(KEY_BYTES))
            unfinished.rename(path)
        key = path.read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    return key if len(key) == KEY_BYTES else None


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
        typed: what the user typed, by dotted key.
        signed: classes of a run that the user signed, each with its dotted key.
    """
    listed = tree["hooks"] if isinstance(tree.get("hooks"), list) else []
    hooks = [hook if isinstance(hook, Mapping) else {TARGET: hook} for hook in listed]

    def is_typed(place: str, path: str) -> bool:
        around = (key for key in (place, *ancestors(place)) if key.startswith(f"{path}."))
        in_list = any(isinstance(typed.get(key), list) for key in around)
        return f"{place}.{TARGET}" in typed or in_list

    is_mine = any(key.partition(".")[0] == "hooks" for key in typed)
    found = {"hooks"} if is_mine or set(targets_in("hooks", hooks)) <= {*signed} else set()
    for path in COMPONENTS:
        own = {*signed, *targets_in(path, _own_option(full, path))}
        pairs = targets_in(path, lookup(tree, path))
        mine = [pair for pair in pairs if pair[0] == path or pair[0] not in COMPONENTS]
        if mine and all(pair in own or is_typed(pair[0], path) for pair in mine):
            found.add(path)
    return frozenset(found)


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
    """Say in a line each which classes nobody consented to, before a module could be imported."""
    pairs = config.own_classes(typed=False)
    unknown = [pair for pair in pairs if pair[1].partition(".")[0] not in config.trust]
    packages = ",".join(dict.fromkeys(target.partition(".")[0] for _, target in unknown))
    why = f"comes from a recipe or a saved run; to trust it, type 'trust=[{packages}]'"
    return [line(f"{place}.{TARGET}", target, why) for place, target in unknown]


def refuse_odd_files(folder: Path, *names: str, links: bool = True) -> None:
    """Refuse a folder, perhaps a stranger's, that leads elsewhere, or that reading waits for.

    Args:
        folder: a run, or any other files.
        names: of what is looked at in it; all where none are given.
        links: whether to refuse links that lead out of it, as caches of downloads hold them.

    Raises:
        NoCheckpointError: a link in it leads out of it, or a file is a pipe or a device.
    """
    home, tops = folder.resolve(), [folder / name for name in names]
    walked = (each for top in tops or [folder] for each in os.walk(top))
    below = (Path(parent, name) for parent, *inner in walked for name in chain(*inner))
    for path in chain(filter(os.path.lexists, tops), below):
        if path.is_symlink():
            is_foreign = not path.resolve().is_relative_to(home)
            if links and is_foreign and path.name != WANDB_LINK:
                raise NoCheckpointError(clip(f"{path}: a link that leads out of the folder"))
        elif stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise NoCheckpointError(clip(f"{path}: neither a file nor a folder"))
