"""Whether a run that goes on takes the steps it began with, and what it was allowed to change.

A checkpoint keeps the contract that its steps obeyed and the fingerprint of their data. What
`resume_allow` let a run change after a checkpoint is written into the run folder, so that a run
that is killed before its next checkpoint goes on by the same command; checkpoints then keep the
new terms, and list every change that was allowed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from trainer.build.checkpoint_fields import Terms
from trainer.build.parts import Parts
from trainer.config.contract import contract, contract_diff
from trainer.core.durable import read_json
from trainer.core.errors import ConfigError, DataError, NoCheckpointError
from trainer.data.split import fingerprint_of
from trainer.models.statistics import batch_statistics

ALLOWED_FILE = "allowed.json"
"""By step of a checkpoint: the terms of the steps after it, where they are not the checkpoint's."""


def terms_of(parts: Parts) -> dict[str, Any]:
    """Give what the steps of a run depend on: its contract, and the fingerprint of its data."""
    return {
        "contract": contract(
            parts.config,
            has_batch_statistics=batch_statistics(parts.module) is not None,
            ranks=parts.world.size,
        ),
        "fingerprint": fingerprint_of(parts.train_set),
    }


def settled(
    now: Mapping[str, Any], begun: Mapping[str, Any], allow: Collection[str], step: int
) -> dict[str, Any]:
    """Refuse to go on with another step than the one that was begun, unless it is allowed.

    The run's config.yaml was compared before; it cannot know the data, nor the cut of a model that
    normalises over it, and it may be newer than the checkpoint.

    Args:
        now: `terms_of` the run as it would go on.
        begun: those it goes on from, with the changes allowed so far.
        allow: keys that may change.
        step: the step it goes on from.

    Returns:
        The terms now, and under `allowed` every change so far: `{"step", "keys"}`.

    Raises:
        DataError: the data are not the same.
        ConfigError: the step is not the same; one line per key.
    """
    if begun["fingerprint"] != now["fingerprint"] and "data" not in allow:
        raise DataError(
            "data: changed since the checkpoint was written, so its steps would not be the ones "
            "that were begun: restore the data, or allow it with resume_allow=[data]"
        )
    if faults := contract_diff(begun["contract"], now["contract"], allow):
        raise ConfigError(*faults)
    made = [{"step": step, "keys": list(allow)}] if differ(begun, now) else []
    return {**now, "allowed": [*begun.get("allowed", ()), *made]}


def differ(begun: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether terms differ by more than there being more steps."""
    return begun["fingerprint"] != now["fingerprint"] or bool(
        contract_diff(begun["contract"], now["contract"])
    )


def agreed(folder: Path, step: int) -> dict[str, Any]:
    """Read the terms of the steps after a checkpoint; empty where they are the checkpoint's.

    Args:
        folder: the run's, perhaps a stranger's.
        step: the checkpoint's.

    Raises:
        NoCheckpointError: what is written there are no terms.
    """
    path = folder / ALLOWED_FILE
    terms = read_json(path).get(str(step))
    if terms is None:
        return {}
    try:
        Terms.model_validate(terms, strict=True)
    except ValueError as error:
        raise NoCheckpointError(f"{path}: holds no terms of step {step}: delete it") from error
    return dict(terms)


def remembered(folder: Path, terms: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Give the content of `ALLOWED_FILE` with new terms for the steps after a checkpoint."""
    return {**read_json(folder / ALLOWED_FILE), str(step): dict(terms)}
