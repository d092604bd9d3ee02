"""Find the trackers that `logger` lists; the settings of each stand in a section of its name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from omegaconf import OmegaConf

from trainer.config.components import SENDS, fits
from trainer.config.declared import declared
from trainer.config.keys import KEYS
from trainer.config.messages import did_you_mean, line, lookup, show
from trainer.config.option_files import options_of

TRACKER_GROUP = "logger"
# A folder of the key's name would make Hydra choose among the options.
OPTIONS_FOLDER = "trackers"

OURS = {key.partition(".")[0] for key in KEYS}
"""Sections that no tracker may have."""


def options(own: str | None = None) -> dict[str, dict[str, Any]]:
    """Read the options by name; what they take from the environment is put in."""
    found = OmegaConf.create(dict(options_of(OPTIONS_FOLDER, own)))
    plain: dict[str, dict[str, Any]] = OmegaConf.to_container(found, resolve=True)  # type: ignore[assignment]
    for name in OURS & plain.keys():
        del plain[name]
    return plain


def is_name(entry: object) -> bool:
    """Whether an entry of `logger` is the name of an option, and no class."""
    return isinstance(entry, str) and "." not in entry


def names_in(tree: Mapping[str, Any]) -> list[str]:
    """List the options that a config lists."""
    entries = tree.get(TRACKER_GROUP)
    if not isinstance(entries, list | tuple):
        return []
    return [*filter(is_name, entries)]


def complete(
    tree: dict[str, Any], known: Mapping[str, Mapping[str, Any]], typed: Collection[str] = ()
) -> Iterator[str]:
    """Put defaults of `known` options into sections of those listed; drop the rest, in place."""
    if isinstance(tree.get(TRACKER_GROUP), str):
        tree[TRACKER_GROUP] = [tree[TRACKER_GROUP]]
    listed = names_in(tree)
    for name in dict.fromkeys(listed):
        option, section = known.get(name), tree.get(name, {})
        if listed.count(name) > 1:
            yield line(TRACKER_GROUP, tree[TRACKER_GROUP], f"lists {name} twice; leave one out")
        if option is None:
            near = did_you_mean(name, known) or f" Choices: {', '.join(known)}, or package.Tracker"
            yield line(TRACKER_GROUP, tree[TRACKER_GROUP], f"{name} is no option.{near}")
        elif not isinstance(section, Mapping):
            keys = ", ".join(key for key in option if key != "_target_")
            yield line(name, section, f"is a section, not a value; it has {keys}")
            tree[name] = dict(option)
        else:
            tree[name] = {**option, **section}
            if (target := tree[name]["_target_"]) != option["_target_"]:
                yield line(
                    f"{name}._target_", target, f"is not {name}; type {TRACKER_GROUP}=[{target}]"
                )
    # A recipe may set up a tracker that the command line then leaves out of the list; what is
    # typed for one that is not there does nothing, which nobody means.
    others = known.keys() - listed
    chosen = show(tree.get(TRACKER_GROUP))
    for key in typed:
        if (name := key.partition(".")[0]) in others:
            text = f"{name} is not among {TRACKER_GROUP}={chosen}; leave it out, or type"
            names = ",".join([*listed, name])
            yield line(key, lookup(tree, key), f"{text} {TRACKER_GROUP}=[{names}]")
    for name in others:
        tree.pop(name, None)


def sends(target: object, name: str, value: object) -> bool:
    """Whether the value of an argument says where a run's figures go, by the argument's type."""
    kind = declared(str(target)).types.get(name)
    arms: tuple[Any, ...] = (kind,)
    if get_origin(kind) in (Union, UnionType):
        arms = get_args(kind)
    local = list[Any]()
    for arm in arms:
        if SENDS not in get_args(arm):
            local.append(arm)
    # A value that fits an arm which sends nothing does not send.
    return len(local) < len(arms) and not any(fits(arm, value) for arm in local)
