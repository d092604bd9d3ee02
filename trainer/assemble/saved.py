"""Keep in a checkpoint what a run goes on with, which is read before that run is built.

Steps of another kind are refused.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Self, final

from pydantic import Field

from trainer.assemble.run import Run
from trainer.checkpoint.state import restore
from trainer.checkpoint.store import Loaded
from trainer.checkpoint.weights import StoredWeights, checkpoint_weights, open_weights
from trainer.config.run_config import RunConfig, config_hash, contract, contract_diff
from trainer.core.errors import ConfigError, DataError, NoCheckpointError
from trainer.core.hub_cache import weights_path
from trainer.core.stateful import SavedFields, State, Stateful, StoredCount
from trainer.core.world import World
from trainer.plan.cut import Cost, Cut
from trainer.report.records import environment
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
    # How records are read, for others that are predicted: `name`, and `columns` by role
    record_format: dict[str, Any] | None = None
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
        """Read it; nothing is laid out over the ranks. Collective.

        A plan opens no weights, unless it is to list what is taken of them.
        """
        stored = None
        if config.command != "plan" and loaded is not None:
            stored = checkpoint_weights(loaded)
        elif config.init is not None and (config.command != "plan" or config.init_partial):
            stored = open_weights(weights_path(config.init), world, config.step)
        saved = cls(loaded=loaded, stored=stored)
        if loaded is not None:
            restore(loaded, {"terms": saved.terms, "cut": saved.cut})
        return saved


def check_terms(run: Run, before: Terms) -> Terms:
    """Give the terms of a run, unless it goes on from a checkpoint with others.

    `before` are those of the checkpoint. The run's config.yaml was compared before with what is
    typed; it cannot know the data, nor the cut of a model that normalises over it.
    """
    found = {
        "precision": run.model.precision,
        "objective": run.chosen.component,
        "optimizer": run.chosen_optimizer.component,
    }
    config = run.config.model_copy(update=found)
    now = contract(config, coupling=run.model.coupling, ranks=run.world.size)
    fingerprint, allow = run.data.train.fingerprint, config.resume_allow
    if before.contract and before.fingerprint != fingerprint and "data" not in allow:
        raise DataError(
            "data: changed since the checkpoint was written, so the remaining steps would use "
            "different samples: restore the data, or allow the change with resume_allow=[data]"
        )
    if before.contract and (faults := contract_diff(before.contract, now, allow)):
        raise ConfigError(*faults)
    setup = run.model.setup
    sync = None
    if setup.is_open:
        sync = (setup.mode, run.world.size, setup.sync.name)
    return Terms(
        contract=now,
        config_hash=config_hash(now),
        fingerprint=fingerprint,
        held_out=_held_out(run),
        given=dict(run.given),
        record_format=run.data.train.facts.record_format,
        total_steps=run.data.total_steps,
        sync=sync,
        environment=environment(),
    )


def refuse_changed_data(run: Run, before: Terms) -> None:
    """Refuse to evaluate on data that are not those of the run any more."""
    now = run.data.train.fingerprint, _held_out(run)
    is_changed = now != (before.fingerprint, before.held_out)
    if is_changed and "data" not in run.config.resume_allow:
        raise DataError(
            "data: changed since the checkpoint was written, so that samples it trained on may be "
            "held out: restore the data, or evaluate all of other data with data.holdout=all"
        )


def _held_out(run: Run) -> str | None:
    return run.data.own_part and run.data.own_part.loader.dataset.fingerprint
