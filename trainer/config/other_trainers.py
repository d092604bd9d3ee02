"""Read what the settings of other trainers are called here, from the YAML file beside this one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainer.config.option_files import load_yaml

_WORDS = load_yaml(Path(__file__).with_suffix(".yaml"))

OTHER_WORDS: Mapping[str, str] = {
    word: meant for meant, words in _WORDS["called"].items() for word in words
}
"""What to type here, by what others call it."""

NONE_HERE: Mapping[str, str] = _WORDS["none"]
"""Settings that have no counterpart, and what to do instead."""

REFUSED: Mapping[str, str] = _WORDS["refused"]
"""Settings that are refused as arguments of a class of this program, too."""

REFUSED_CLASSES: Mapping[str, str] = _WORDS["classes"]
"""Classes of PyTorch that take no step here, in small letters, and what to type instead."""
