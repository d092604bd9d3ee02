"""Decide what of a config needs its user's word, and whether they gave it.

The rule: what acts needs its user. A value acts that names a class from outside of this program and
the model libraries, lets a library load code, sends figures away, or says where to read or write.
Users give their word by typing it, or by an option in a `--config-dir` of their own; for classes
also by `trust=[package]`, and by having started the same run before. Neither a recipe nor a run
folder gives it, for both may be a stranger's.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

from trainer.config import trackers
from trainer.config.components import COMPONENTS, LISTS, SENDS, owner_of, targets_in
from trainer.config.data_sets import eval_sets
from trainer.config.messages import Tree, ancestors, clip, flat, line, lookup, show
from trainer.config.option_files import load_yaml, options_of
from trainer.config.run_config import RunConfig
from trainer.config.validate import from_plain
from trainer.core.errors import ConfigError, NoCheckpointError
from trainer.core.own_code import OWN_CODE
from trainer.core.run_folder import RunFolder

TARGET = "_target_"

ONLY_TYPED: Mapping[str, str] = {
    "hydra": "Hydra's own settings can start programs",
    "trust": "it allows code to run",
    "command": "it selects the command",
    "resume": "it chooses a run",
    "resume_allow": "it chooses what a resumed run may change",
    "run": "it chooses a run",
    "step": "it chooses a checkpoint",
    "init": "it chooses weights to read",
    "init.partial": "",  # of weights that were typed; may be given
    "outputs": "it chooses where a run writes",
    "export": "it chooses where weights are written",
    "prompt": "it is a text for one command",
}
"""Keys that neither a recipe nor a run folder gives, whole sections among them, with the reason."""

WANDB_LINK = "debug-core.log"
"""W&B leaves a link of this name to its own log, outside; nothing is ever written through it."""

_REMOTE_CODE = ("trust_remote_code", "attn_implementation", "experts_implementation")


def reason_to_type(key: str) -> str | None:
    """Say why a dotted key is the command line's alone, or None where it is not."""
    if any(part.lstrip("_") in _REMOTE_CODE for part in key.split(".")):
        return "it allows code from the network"
    for each in (key, *ancestors(key)):
        if each in ONLY_TYPED:
            return ONLY_TYPED[each] or None
    return None


def acting(
    key: str, value: object, own_folder: str | None = None, target: object = None
) -> Iterator[str]:
    """Find the keys whose values act, at any depth; `target` is the class that takes the value.

    The user's own folder has options of trackers, too.
    """
    section, _, name = key.rpartition(".")
    is_tracker = bool(section) and "." not in section and section not in trackers.OURS
    # Of others reading the options would take long.
    if target is None and is_tracker:
        target = trackers.options(own_folder).get(section, {}).get(TARGET)
    # An implementation of the hub's is written owner/name; a word chooses one that is installed.
    is_word = "implementation" in key and isinstance(value, str) and "/" not in value
    if (reason_to_type(key) and not is_word) or trackers.sends(target, name, value):
        yield key
    elif isinstance(value, Mapping):
        for inner_name, inner in value.items():
            yield from acting(f"{key}.{inner_name}", inner, own_folder, value.get(TARGET))
    elif isinstance(value, list):
        for inner in value:
            yield from acting(key, inner, own_folder)


def key_faults(
    tree: Tree, offered: Tree, typed: Collection[str], own_folder: str | None = None
) -> Iterator[str]:
    """Say in a line each which values act that others give, and the user did not type.

    Values pass that are those of `offered`: the same options without a value of a recipe, a run or
    the command line.
    """
    offers = flat(offered)
    for key, value in flat(tree).items():
        if key in typed or (key in offers and offers[key] == value):
            continue
        for found in acting(key, value, own_folder):
            text = f"{found}={show(value)}: comes from a recipe or a run"
            why = reason_to_type(found) or f"it {SENDS}"
            yield clip(f"{text}; type it yourself: {why}")


def consented_components(
    tree: Tree, typed: Mapping[str, Any], own: Collection[str], runtime: Tree
) -> frozenset[str]:
    """Name the components whose classes, of their arguments too, the user consented to.

    `own` are the classes of a run that the user made; `runtime` is what Hydra says of where each
    option was found.
    """
    named_by_user = {*own}
    for key, value in typed.items():
        if key.endswith(f".{TARGET}"):
            named_by_user.add(str(value))
        else:
            named_by_user |= _classes(key, value)
    sections = {path: lookup(tree, path) for path in (*COMPONENTS, *LISTS)} | eval_sets(tree)
    found = set()
    for path, section in sections.items():
        named = _classes(path, section)
        consented = named_by_user | _classes(path, _own_option(owner_of(path) or path, runtime))
        rest = named - consented
        # A class of the user's may be the argument of the chosen option's.
        if rest:
            option = str(runtime["choices"].get(path.replace(".", "/")))
            rest.discard(options_of(path).get(option, {}).get(TARGET))
        if named & consented and not rest:
            found.add(path)
    return frozenset(found)


def _classes(path: str, section: object) -> set[str]:
    """Find the classes of a component, without those of a component within it."""
    if path in LISTS and isinstance(section, list):
        entries = list[object]()
        for each in section:
            # Names of options are looked at in `validate`.
            if isinstance(each, str) and not trackers.is_name(each):
                entries.append({TARGET: each})
            elif not isinstance(each, str):
                entries.append(each)
        section = entries
    classes = set[str]()
    for place, target in targets_in(path, section):
        if place == path or place not in COMPONENTS:
            classes.add(target)
    return classes


def _own_option(path: str, runtime: Tree) -> Tree | None:
    """Read the option of a component from the user's own folder; None where it is not theirs."""
    group = path.replace(".", "/")
    # Ours first: an option of the user's that is called as one of ours is not what Hydra takes.
    for source in sorted(runtime["config_sources"], key=lambda each: each["provider"] != "main"):
        file = Path(source["path"], group, f"{runtime['choices'].get(group)}.yaml")
        if source["schema"] == "file" and file.is_file():
            return None if source["provider"] == "main" else load_yaml(file)
    return None


def class_faults(config: RunConfig) -> list[str]:
    """Say in a line each which classes nobody consented to, before a module could be imported."""
    unknown, packages = list[tuple[str, str]](), dict[str, None]()
    for place, target in config.own_classes(typed=False):
        package = target.partition(".")[0]
        if package not in config.trust:
            unknown.append((place, target))
            packages[package] = None
    remedy = f"to trust it, type 'trust=[{','.join(packages)}]'"
    why = f"comes from a recipe or a saved run; {remedy}"
    return [line(f"{place}.{TARGET}", target, why) for place, target in unknown]


def note_start(run: Path, records: Path, config: RunConfig) -> None:
    """Note that this user starts a run, whose new config is in `records`.

    The notes are in a file that no run folder can write. Where it cannot be written, each run is a
    stranger's.
    """
    if config.packages:
        # A RuntimeError says that there is no home.
        with suppress(OSError, RuntimeError):
            path = _notes_file()
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(f"{_note(run, records, config)}\n")


def is_noted(run: Path) -> bool:
    """Whether this user started a run in that folder."""
    start = json.dumps({"run": os.path.realpath(run)})[:-1]
    return any(note.startswith(start) for note in _notes())


def own_classes(run: RunFolder) -> frozenset[str]:
    """List the classes of a run that this user started and nobody changed; else nothing.

    It is changed where its folder, its config or the file of one of its packages is another one.
    """
    saved = run.config()
    with suppress(ConfigError):
        if _note(run.path, run.path, from_plain(saved)) in _notes():
            classes = set[str]()
            for key, value in saved.items():
                classes.update(target for _, target in targets_in(key, value))
            return frozenset(classes)
    return frozenset()


def _note(run: Path, records: Path, config: RunConfig) -> str:
    """Write which run it is, a digest of what it begins with, and where its packages are."""
    # Which may be the older ones, while new records wait beside them
    overrides = RunFolder(records).overrides_file
    if not overrides.exists():
        overrides = RunFolder(run).overrides_file
    digest = sha256((records / RunFolder.CONFIG).read_bytes())
    if overrides.is_file():
        digest.update(b"\0" + overrides.read_bytes())
    files = {package: OWN_CODE.file_of(package) for package in config.packages}
    found = {"run": os.path.realpath(run), "config": digest.hexdigest(), "files": files}
    return json.dumps(found)


def _notes() -> list[str]:
    # A ValueError says that it is no text.
    with suppress(OSError, RuntimeError, ValueError):
        return _notes_file().read_text().splitlines()
    return []


def _notes_file() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "step-trainer" / "runs.jsonl"


def refuse_odd_files(folder: Path, *, links: bool = True) -> None:
    """Refuse a folder, perhaps a stranger's, that leads elsewhere, or that reading waits for.

    It has a link that leads out of it, or a pipe or a device. Caches of downloads hold such links:
    they pass without `links`.
    """
    home = folder.resolve()
    for parent, folders, files in os.walk(folder):
        for name in chain(folders, files):
            path = Path(parent, name)
            if path.is_symlink():
                is_foreign = not path.resolve().is_relative_to(home)
                if links and is_foreign and path.name != WANDB_LINK:
                    raise NoCheckpointError(clip(f"{path}: a link that leads out of the folder"))
            elif stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                raise NoCheckpointError(clip(f"{path}: neither a file nor a folder"))
