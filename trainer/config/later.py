"""Fill in what runs of earlier versions lack: keys that came later, at what they did then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.keys import KEYS, as_option

# Off in runs of earlier versions
_LATER_SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "ema": {"decay": None},
    "accum": {"buffer": "native"},
    "log": {"parameters": None, "noise_scale": None, "generate": [], "generate_tokens": 64},
    "checkpoint": {"best": None, "mode": "auto"},
    "stop": {"metric": None, "patience": 3, "min_delta": 0.0},
    "sweep": {"metric": "eval_loss", "mode": "auto"},
}


def with_later_keys(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Give a run's config with the keys of this version, and without `trust`."""
    later = {name: {**keys, **plain.get(name, {})} for name, keys in _LATER_SECTIONS.items()}
    # It had one word for this section.
    section = as_option("batchnorm", plain.get("batchnorm"))
    later["batchnorm"] = {"precise": None, **section} if isinstance(section, dict) else section
    return {"max_time": None, "logger": KEYS["logger"].default, **plain, **later, "trust": []}
