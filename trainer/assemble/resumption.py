"""Build a run as it begins, or as it goes on from a checkpoint; refuse steps of another kind."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from trainer.assemble.components import Components, assemble
from trainer.assemble.saved import Saved, Terms
from trainer.checkpoint.weights import load_step
from trainer.config.run_config import RunConfig, config_hash, contract, contract_diff
from trainer.core.errors import ConfigError, DataError, Preempted
from trainer.core.signals import UNBEGUN
from trainer.core.world import World
from trainer.report.records import environment
from trainer.training.consistency import check_consistency


def end_if_stopped(world: World, was_asked: bool) -> None:
    """End before the first step, by `Preempted`, if a signal asked any rank to. Collective."""
    if any(world.collect(was_asked)):
        raise Preempted(UNBEGUN)


def assemble_on_all(config: RunConfig, world: World, saved: Saved) -> Components:
    """Build the same run on all ranks, unless a signal ends the reading of its data. Collective."""
    components: list[Components] = []
    with suppress(Preempted):
        components.append(assemble(config, world, saved))
    end_if_stopped(world, not components)
    found = components[0]
    check_consistency(world, found.data_views, found.module, found.weights)
    return found


def assemble_resumed(
    config: RunConfig, world: World, *, with_values: bool = False
) -> tuple[Components, Saved]:
    """Build a run as it begins, or goes on from the checkpoint that `resume` names.

    Gives what that checkpoint says, too; what a resumption refuses is refused. `with_values` is as
    for `assemble`.
    """
    loaded = None if config.resume is None else load_step(Path(config.resume), config.step)
    # One process stands for all ranks.
    saved = Saved.read(config, loaded, World(device=world.device))
    components = assemble(config, world, saved, with_values=with_values)
    check_terms(components, saved.terms)
    return components, saved


def check_terms(components: Components, before: Terms) -> Terms:
    """Give the terms of a run, unless it goes on from a checkpoint with others.

    `before` are those of the checkpoint. The run's config.yaml was compared before with what is
    typed; it cannot know the data, nor the cut of a model that normalises over it.
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
    """Refuse to evaluate on data that are not those of the run any more."""
    now = components.train_set.fingerprint, _held_out(components)
    is_changed = now != (before.fingerprint, before.held_out)
    if is_changed and "data" not in components.config.resume_allow:
        raise DataError(
            "data: changed since the checkpoint was written, so that samples it trained on may be "
            "held out: restore the data, or evaluate all of other data with data.holdout=all"
        )


def _held_out(components: Components) -> str | None:
    return components.own_part and components.own_part.loader.dataset.fingerprint
