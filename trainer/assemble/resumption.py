"""Build a run as it begins, or as it goes on from a checkpoint; refuse steps of another kind."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from trainer.assemble.build import assemble
from trainer.assemble.run import Run
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


def assemble_on_all(config: RunConfig, world: World, saved: Saved) -> Run:
    """Build the same run on all ranks, unless a signal ends the reading of its data. Collective."""
    built: list[Run] = []
    with suppress(Preempted):
        built.append(assemble(config, world, saved))
    end_if_stopped(world, not built)
    (run,) = built
    check_consistency(world, run.data, run.model)
    return run


def assemble_resumed(
    config: RunConfig, world: World, *, with_values: bool = False
) -> tuple[Run, Saved]:
    """Build a run as it begins, or goes on from the checkpoint that `resume` names.

    Gives what that checkpoint says, too; what a resumption refuses is refused. `with_values` is as
    for `assemble`.
    """
    loaded = None if config.resume is None else load_step(Path(config.resume), config.step)
    # One process stands for all ranks.
    saved = Saved.read(config, loaded, World(device=world.device))
    run = assemble(config, world, saved, with_values=with_values)
    check_terms(run, saved.terms)
    return run, saved


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
    return Terms(
        contract=now,
        config_hash=config_hash(now),
        fingerprint=fingerprint,
        held_out=_held_out(run),
        given=dict(run.given),
        total_steps=run.data.total_steps,
        sync=(setup.mode, run.world.size, setup.sync.name) if setup.is_open else None,
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
