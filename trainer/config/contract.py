"""Compare what the steps of two runs depend on: the contract of a run.

Micro-batches, ranks, sync, workers and the device are free, since they compute the same steps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from trainer.config.components import COMPONENTS, extra_keys
from trainer.config.messages import ancestors, did_you_mean, flat, line, show
from trainer.config.run_config import RunConfig, to_plain

# What the optimizer step is made of, beside `steps` and `epochs`; the rest is execution.
_STEP_KEYS: tuple[str, ...] = ("batch", "seed", "data", "model", "objective", "optimizer")
_STEP_KEYS += ("scheduler", "clip_norm", "precision", "batchnorm")


def contract(
    config: RunConfig, *, has_batch_statistics: bool = False, ranks: int | None = None
) -> dict[str, Any]:
    """List what changes the step: flat, JSON-able, equal for every way to execute the run.

    Args:
        config: of the run.
        has_batch_statistics: the model normalises over micro-batches, so that the cut is part of
            the step, as it is of a mean of means.
        ranks: number of ranks that share the cut, where it is known.
    """
    plain = to_plain(config)
    tree = {key: plain[key] for key in _STEP_KEYS}
    tree |= {"steps": config.steps, "epochs": config.total_epochs}
    is_micro = config.batchnorm == "micro" or config.batch.normalizer == "micro_batches"
    if has_batch_statistics or is_micro:
        own = extra_keys("accum")
        tree["accum"] = {key: value for key, value in plain["accum"].items() if key not in own}
        tree |= {} if ranks is None else {"parallel": {"ranks": ranks}}
    return {key: value for key, value in flat(tree).items() if key != "data.on_bad"}


def config_hash(terms: Mapping[str, Any]) -> str:
    """Give the SHA-256 of a contract: equal for runs that take the same steps, however executed."""
    return hashlib.sha256(json.dumps(terms, sort_keys=True).encode()).hexdigest()


def contract_diff(
    old: Mapping[str, Any], new: Mapping[str, Any], allow: Collection[str] = ()
) -> list[str]:
    """Name what a resumed run would change about its step, one line per key.

    Args:
        old: the run's contract.
        new: that of the run as it was typed now.
        allow: keys, or whole sections, that may change. `steps` and `epochs` may grow anyway.
    """
    faults = []
    for key in sorted(old.keys() | new.keys()):
        before, now = old.get(key), new.get(key)
        is_clock = key in ("steps", "epochs") and isinstance(before, int) and isinstance(now, int)
        grows = is_clock and (now or 0) > (before or 0)
        if before != now and not grows and {key, *ancestors(key)}.isdisjoint(allow):
            limit = "may only grow; " if is_clock else ""
            text = f"the run has {show(before)}; {limit}to change it, resume_allow=[{key}]"
            faults.append(line(key, now, text))
    return faults


def step_faults(config: RunConfig, old: Mapping[str, Any]) -> list[str]:
    """Name what a config would change about a run's step, and keys of `resume_allow` that are none.

    Args:
        config: as it was typed now.
        old: the run's contract.
    """
    keys = {*flat(to_plain(config)), *old}
    known = keys.union(*map(ancestors, keys))
    unknown = [
        line("resume_allow", [key], f"{key}: unknown setting.{did_you_mean(key, known)}")
        for key in config.resume_allow
        if key not in known and set(COMPONENTS).isdisjoint(ancestors(key))
    ]
    return [*unknown, *contract_diff(old, contract(config), config.resume_allow)]
