"""Keep in a checkpoint what the steps of a run depend on; read before the run is built."""

from __future__ import annotations

from typing import Any, final

from pydantic import Field, field_validator

from trainer.checkpoint.state import restore
from trainer.checkpoint.store import Loaded
from trainer.config.keys import as_option
from trainer.config.messages import flat
from trainer.core.stateful import Natural, SavedFields


@final
class Terms(SavedFields):
    """What the steps of a run depend on; empty where a run begins."""

    contract: dict[str, Any] = Field(default_factory=dict)
    config_hash: str = ""  # of the contract, for people who compare runs
    fingerprint: str = ""  # of the data that are trained on
    held_out: str | None = None  # of those that are held out
    # What the model's constructor took from the data
    given: dict[str, Any] = Field(default_factory=dict)
    total_steps: Natural = 0
    # Layout, number of ranks, and what `sync=auto` took there
    sync: tuple[str, Natural, str] | None = None
    # What the run last ran on; nothing depends on it
    environment: dict[str, Any] = Field(default_factory=dict)

    @field_validator("contract")
    @classmethod
    def _with_options(cls, terms: dict[str, Any]) -> dict[str, Any]:
        """Give what a run of an earlier version had by a word the settings that it stands for."""
        words = {key: as_option(key, terms[key]) for key in ("batchnorm",) if key in terms}
        return {**{k: v for k, v in terms.items() if k not in words}, **flat(words)}


def read_terms(loaded: Loaded) -> Terms:
    """Read the terms of a checkpoint.

    Raises:
        NoCheckpointError: it has none of this version.
    """
    terms = Terms()
    restore(loaded, {"terms": terms})
    return terms
