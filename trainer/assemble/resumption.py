"""Go on with the same steps, cut as before, and with the user's own parts, or not at all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any, final

from pydantic import Field, PrivateAttr

from trainer.assemble.components import Components
from trainer.assemble.instantiate import construct
from trainer.assemble.terms import Terms
from trainer.checkpoint.average import AVERAGE, WeightAverage
from trainer.checkpoint.state import capture
from trainer.config.run_config import RunConfig, config_hash, contract, contract_diff
from trainer.core.errors import ConfigError, DataError, NoCheckpointError
from trainer.core.stateful import Natural, SavedFields, State, Stateful, as_part
from trainer.plan.cut import Cost, Cut
from trainer.report.records import environment
from trainer.training.batches import Feed
from trainer.training.best_metric import BEST, STOP, BestMetric
from trainer.training.noise import NOISE, NoiseScale
from trainer.tune.tuning import Tuning

SIZES = "batch"  # the part that sizes of steps are, where they depend on what a run decides
_CUT_BY = {"target", "params"}  # what of `accum` a checkpoint's cut belongs to


@final
class SavedCut(SavedFields):
    """What a resumed run needs to cut as the run began; empty where it begins."""

    # The component of the config that it belongs to
    accum: dict[str, Any] = Field(default_factory=dict)
    cost: Cost = Cost()
    settings: dict[str, Any] = Field(default_factory=dict)  # of the cut, as its fields have them
    tuning: Tuning | None = None
    evaluation_tokens: Annotated[Natural, Field(ge=1)] = 1
    _feed: Feed | None = PrivateAttr(None)

    @classmethod
    def of(cls, components: Components, tuning: Tuning | None, feed: Feed | None) -> SavedCut:
        """Note how a run is cut; a feed cuts smaller where memory ran out, and its cut is saved."""
        saved = cls(
            accum=_accum_of(components),
            cost=components.layout.cost,
            settings=asdict(components.cut),
            tuning=tuning,
            evaluation_tokens=max((h.max_tokens for h in components.held_out.values()), default=1),
        )
        saved._feed = feed
        return saved

    def state(self) -> State:
        """See the base class."""
        live = {} if self._feed is None else {"settings": asdict(self._feed.cut)}
        return {**super().state(), **live}

    def belongs_to(self, components: Components) -> bool:
        """Whether the run is to be cut by the same component with the same arguments."""
        return self.accum == _accum_of(components)

    def restored(self, cut: Cut) -> Cut:
        """Give the run's cut with the settings that were saved.

        Raises:
            NoCheckpointError: it has no such settings.
        """
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


def _accum_of(components: Components) -> dict[str, Any]:
    return components.config.accum.model_dump(include=_CUT_BY)


def check_terms(components: Components, before: Terms) -> Terms:
    """Give the terms of a run, unless it goes on from a checkpoint with others.

    `before` are those of the checkpoint. The run's config.yaml was compared before with what is
    typed; it cannot know the data, nor the cut of a model that normalises over it.

    Raises:
        DataError: the run was begun with other data, and may not change them.
        ConfigError: the run was begun with other steps, and may not; one line per key.
    """
    found = {
        "precision": components.precision,
        "objective": components.chosen.component,
        "optimizer": components.chosen_optimizer.component,
    }
    config = components.config.model_copy(update=found)
    now = contract(config, coupling=components.coupling, ranks=components.world.size)
    fingerprint, allow = components.train_set.fingerprint, config.resume_allow
    if before.contract and before.fingerprint != fingerprint and "data" not in allow:
        raise DataError(
            "data: changed since the checkpoint was written, so the remaining steps would use "
            "different samples: restore the data, or allow the change with resume_allow=[data]"
        )
    if before.contract and (faults := contract_diff(before.contract, now, allow)):
        raise ConfigError(*faults)
    setup = components.parallel
    return Terms(
        contract=now,
        config_hash=config_hash(now),
        fingerprint=fingerprint,
        held_out=_held_out(components),
        given=dict(components.given),
        total_steps=components.total_steps,
        sync=(setup.mode, components.world.size, setup.sync.name) if setup.is_open else None,
        environment=environment(),
    )


def refuse_changed_data(components: Components, before: Terms) -> None:
    """Refuse to evaluate on data that are not those of the run any more.

    Raises:
        DataError: what it trained on, or held out, was other data.
    """
    now = components.train_set.fingerprint, _held_out(components)
    is_changed = now != (before.fingerprint, before.held_out)
    if is_changed and "data" not in components.config.resume_allow:
        raise DataError(
            "data: changed since the checkpoint was written, so that samples it trained on may be "
            "held out: restore the data, or evaluate all of other data with data.holdout=all"
        )


def _held_out(components: Components) -> str | None:
    return components.own_part and components.own_part.loader.dataset.fingerprint


def own_parts(config: RunConfig) -> dict[str, Stateful]:
    """Build the parts with state that the config asks for, each with its name in a checkpoint.

    The average of the weights is the last, since others may change them.

    Raises:
        ConfigError: one cannot be built, or has no `state` and `load`.
    """
    parts: dict[str, Stateful] = {}
    for index, component in enumerate(config.parts):
        part = construct(component, f"parts[{index}]", Stateful, config.trust)
        name = f"parts.{component.target}"
        name += f"-{index + 1}" * (name in parts)
        parts[name] = as_part(part)
    if config.log.noise_scale is not None:
        parts[NOISE] = NoiseScale(config.batch.unit)
    for name, key, metric, min_delta in (
        (BEST, "checkpoint.best", config.checkpoint.best, 0.0),
        (STOP, "stop.metric", config.stop.metric, config.stop.min_delta),
    ):
        if metric is not None:
            mode = config.checkpoint.mode if config.checkpoint.best in (None, metric) else "auto"
            parts[name] = BestMetric.of(key, metric, mode, min_delta)
    if config.ema.decay is not None:
        parts[AVERAGE] = WeightAverage(config.ema.decay)
    return parts


def may_begin_anew(config: RunConfig, own: Collection[str]) -> set[str]:
    """Name the parts that a checkpoint need not have; what was allowed to change adds them."""
    allowed = own if "parts" in config.resume_allow else ()
    return {"loss_scale", NOISE, AVERAGE, SIZES, BEST, STOP, *allowed}


def refuse_unsavable(parts: Mapping[str, Stateful]) -> None:
    """Refuse parts whose state no checkpoint can hold, before the first step.

    Raises:
        ConfigError: it names the place.
    """
    try:
        capture(parts)
    except (TypeError, ValueError) as error:
        text = "give tensors, numbers, strings and None in lists, tuples and mappings"
        raise ConfigError(f"{error}: {text}") from error
