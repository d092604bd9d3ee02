"""Say what the settings of other trainers are called here, and what a mistyped one may mean.

The words stand in `other_trainers.yaml`, so that a name of another trainer's needs no code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from trainer.config import components, messages, trackers
from trainer.config.keys import KEYS
from trainer.config.option_files import load_yaml, options_of

_WORDS = load_yaml(Path(__file__).with_name("other_trainers.yaml"))
NONE_HERE: Mapping[str, str] = {
    word: how for how, words in _WORDS["none"].items() for word in words
}
"""Names of other trainers for what there is not, each with how it is here."""
REFUSED: Mapping[str, str] = _WORDS["refused"]
REFUSED_CLASSES: Mapping[str, str] = _WORDS["classes"]
OTHER_WORDS: Mapping[str, str] = {
    word: meant for meant, words in _WORDS["called"].items() for word in words
}
"""Names of other trainers, each with ours."""


def hint_for(key: str, offers: Collection[str]) -> str:
    """Offer what is meant by a key that is none: as other trainers have it, or spelt like it."""
    *sections, name = key.split(".")
    # A setting may lie in a section of theirs: `zero_optimization.stage`.
    return _counterpart(name) or messages.did_you_mean(key, offers) or _first(sections)


def _first(sections: Sequence[str]) -> str:
    """Give what the innermost section is called here that has a counterpart."""
    return next(filter(None, map(_counterpart, reversed(sections))), "")


def _counterpart(name: str) -> str:
    if name in NONE_HERE:
        return f" Here {NONE_HERE[name]}"
    if name in OTHER_WORDS:
        return f" Did you mean {OTHER_WORDS[name]}?"
    return ""


def suits(key: str, text: str) -> bool:
    """Whether a typed value may be one of a setting, by its type or that in an option's file."""
    owner, _, name = key.rpartition(".")
    if key == trackers.TRACKER_GROUP:
        return text in trackers.options()
    if key == "recipe":
        return text.endswith(".yaml")
    if key in {*components.COMPONENTS, "parallel"}:
        return text in options_of(key)
    kinds = list[Any]()
    if key in KEYS:
        kinds.append(KEYS[key].annotation)
    elif owner:
        for option in options_of(owner).values():
            if name in option:
                kinds.append(components.type_like(option[name]))
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return False
    # YAML reads 1e-3, which has no point, as a text.
    with suppress(ValueError):
        if isinstance(value, str):
            value = float(value)
    return bool(kinds) and all(components.fits(str if k is Any else k, value) for k in kinds)
