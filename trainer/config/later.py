"""Fill in what runs of earlier versions lack: keys that came later, at what they did then."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainer.config.keys import KEYS, as_option

_LATER = re.compile(r"(ema|log|checkpoint|stop|sweep)\..*|accum\.buffer|max_time|logger")
"""Keys that runs of earlier versions may lack; what their defaults say was so before."""


def with_later_keys(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Give a run's config with the keys of this version, and without `trust`."""
    whole = {**plain, "log": {"noise_scale": None, **plain.get("log", {})}, "trust": []}
    for key in filter(_LATER.fullmatch, KEYS):
        section, _, name = key.rpartition(".")
        default = {name: KEYS[key].default}
        whole |= {section: default | whole.get(section, {})} if section else default | whole
    # It had one word for this section.
    section = as_option("batchnorm", plain.get("batchnorm"))
    whole["batchnorm"] = {"precise": None, **section} if isinstance(section, dict) else section
    return whole
