"""Read from a checkpoint what a run goes on with, before the run is built; keep it in the next."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self, final

from pydantic import Field

from trainer.checkpoint.state import restore
from trainer.checkpoint.store import CheckpointStore, Loaded
from trainer.checkpoint.weights import StoredWeights, checkpoint_weights, open_weights
from trainer.config.run_config import RunConfig, contract_diff
from trainer.core.errors import NoCheckpointError
from trainer.core.hub_cache import weights_path
from trainer.core.stateful import SavedFields, State, Stateful, StoredCount
from trainer.core.world import World
from trainer.plan.cut import Cost, Cut
from trainer.training.batches import Feed
from trainer.tune.request import Tuning


@final
class Terms(SavedFields):
    """What the steps of a run depend on; empty where a run begins."""

    contract: dict[str, Any] = Field(default_factory=dict)
    config_hash: str = ""  # of the contract, for people who compare runs
    fingerprint: str = ""  # of the data that are trained on
    held_out: str | None = None  # of those that are held out
    # What the model's constructor took from the data
    given: dict[str, Any] = Field(default_factory=dict)
    total_steps: StoredCount = 0
    # Layout, number of ranks, and what `sync=auto` took there
    sync: tuple[str, StoredCount, str] | None = None
    # What the run last ran on; nothing depends on it
    environment: dict[str, Any] = Field(default_factory=dict)


@final
class SavedCut(SavedFields):
    """What a resumed run needs to cut as the run began; empty where it begins."""

    # The component of the config that it belongs to, as `accum_of` has it
    accum: dict[str, Any] = Field(default_factory=dict)
    cost: Cost = Cost()
    settings: dict[str, Any] = Field(default_factory=dict)  # of the cut, as its fields have them
    tuning: Tuning | None = None
    evaluation_tokens: Annotated[StoredCount, Field(ge=1)] = 1

    def restored(self, cut: Cut) -> Cut:
        """Give the run's cut with the settings that were saved."""
        settings = dict(self.settings)
        try:
            if settings.get("cost") is not None:
                settings["cost"] = Cost(**settings["cost"])
            return replace(cut, **settings)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise NoCheckpointError(
                f"checkpoint has an invalid micro-batch plan ({error!r:.80}): start a new run with "
                "init="
            ) from error


@final
@dataclass(frozen=True)
class LiveCut(Stateful):
    """Saves the cut of a run that goes on: it cuts smaller where memory ran out."""

    begun: SavedCut
    feed: Feed

    def state(self) -> State:
        """See the base class."""
        return {**self.begun.state(), "settings": asdict(self.feed.cut)}

    def load(self, state: State) -> None:
        """Nothing: a run is built with the cut of its checkpoint."""


def read_terms(loaded: Loaded) -> Terms:
    """Read the terms of a checkpoint alone."""
    terms = Terms()
    restore(loaded, {"terms": terms})
    return terms


def accum_of(config: RunConfig) -> dict[str, Any]:
    """Give what of `accum` the cut of a checkpoint belongs to."""
    return config.accum.model_dump(include={"target", "params"})


@final
@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint says before the run is built; all empty where there is none."""

    loaded: Loaded | None = None
    # What the model begins with, of the checkpoint or of `init`; None where the seed draws it
    stored: StoredWeights | None = None
    terms: Terms = field(default_factory=Terms)
    cut: SavedCut = field(default_factory=SavedCut)

    @classmethod
    def read(cls, config: RunConfig, loaded: Loaded | None, world: World) -> Self:
        """Read it; nothing is laid out over the ranks, and a plan reads no weights. Collective."""
        stored = None
        if config.command != "plan" and loaded is not None:
            stored = checkpoint_weights(loaded)
        elif config.command != "plan" and config.init is not None:
            stored = open_weights(weights_path(config.init), world, config.step)
        saved = cls(loaded=loaded, stored=stored)
        if loaded is not None:
            restore(loaded, {"terms": saved.terms, "cut": saved.cut})
        return saved

    def has_settings_of(self, terms: Terms) -> bool:
        """Whether the optimizer of a run with these terms is set as in the checkpoint.

        More steps change no setting of the optimizer, and its groups may hold state.
        """
        before, may_change = self.terms.contract, ("steps", "epochs")
        return self.loaded is not None and not contract_diff(before, terms.contract, may_change)


def open_store(config: RunConfig, folder: Path, world: World) -> tuple[CheckpointStore, Saved]:
    """Open the checkpoints of a run, and read the newest intact one if it goes on. Collective."""
    store = CheckpointStore.of(folder, keep=config.checkpoint.keep)
    loaded = None if config.resume is None else store.load(world=world)
    return store, Saved.read(config, loaded, world)
