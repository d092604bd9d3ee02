"""Build what a run is made of, in three stages: its data, its model, and how the two go together.

Config is turned into objects here, and nothing below this room sees it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer.assemble.data_sets import arguments_from_data, open_data, with_fine_tuning_batch
from trainer.assemble.layout import find_layout
from trainer.assemble.loaders import held_out_loader, open_loader
from trainer.assemble.model import make_model
from trainer.assemble.run import Run
from trainer.assemble.saved import Saved, check_terms
from trainer.assemble.typed import TypedParts, batch_sizes
from trainer.checkpoint.weights import load_step
from trainer.config.amounts import step_ranges
from trainer.config.run_config import RunConfig
from trainer.core.world import World
from trainer.plan.order import Order
from trainer.training.consistency import check_consistency
from trainer.training.data import Data


def assemble(
    config: RunConfig, world: World, saved: Saved | None = None, *, with_values: bool = False
) -> Run:
    """Build everything a run is made of. Collective.

    `saved` is what the checkpoint says that is read, where there is one. A plan for a machine that
    is not here builds the model without weights, unless `with_values`.
    """
    saved = saved or Saved()
    typed = TypedParts.of(config)

    # The data. The config gets the size of the steps by their number, where nobody typed it.
    known, names = saved.terms.record_format, saved.terms.given.get("label_names")
    if not config.reads_all and "data" not in config.resume_allow:
        known = None  # of the same data it is found again
    source = open_data(config, world, typed.tokenizer, names, known)
    lengths, sizes = source.train.lengths, batch_sizes(config)
    if sizes.is_constant:
        recorded, chosen = saved.terms.contract, typed.objective
        compares = chosen is not None and chosen.objective.coupling.kind == "batch"
        config = with_fine_tuning_batch(config, len(lengths), recorded, compares=compares)
        sizes = batch_sizes(config)
    batch = config.batch
    skips = step_ranges(config.data.skip_steps)
    order = Order(len(lengths), config.seed, sizes, batch.unit, batch.tail, lengths, skips)
    if (drawn := source.train.facts.drawn) is not None:
        order.drawn = partial(drawn, config.seed)
    total_steps = config.steps or order.num_steps(config.total_epochs or 1)
    loader = open_loader(config, world, source.train)
    data = Data(order=order, lengths=lengths, loader=loader, total_steps=total_steps)

    # The model, which may take its vocabulary from the data.
    given = arguments_from_data(config, data.train, typed.tokenizer, saved.terms.given)
    model, objective, optimizer = make_model(
        config, world, typed, data, given, saved, with_values=with_values
    )
    typed.tokenizer.refuse_unused()

    # What both together ask of every cut, those of evaluations too.
    with model.trial_values(world):
        layout, example = find_layout(config, world, loader, model)
    in_lockstep = world.size > 1 and (model.setup.sync.lockstep or model.coupling.joins_ranks)
    layout = replace(layout, lockstep=in_lockstep, group_size=model.coupling.size)
    held_out = {
        name: held_out_loader(config, name, view, loader, layout, model.module)
        for name, view in source.held_out.items()
    }
    cut = typed.cut
    is_whole = batch.unit == "samples" and world.size == 1
    is_whole &= (config.accum.params.get("micro") or 0) >= sizes.largest
    if is_whole and model.coupling.fixes_cut:
        # A bound of the size of the step leaves that whole.
        cut = cut.in_order or cut
    return Run(
        config=config,
        world=world,
        data=replace(data, held_out=held_out),
        model=model,
        features=typed.features,
        cut=cut,
        layout=layout,
        example=example,
        split=source.split,
        chosen=objective,
        chosen_optimizer=optimizer,
        given=given,
        tokenizer=typed.tokenizer.built,
    )


def assemble_on_all(config: RunConfig, world: World, saved: Saved) -> Run:
    """Build the same run on all ranks, unless a signal ends the reading of its data. Collective."""
    run = world.unless_stopped(lambda: assemble(config, world, saved))
    # Files that differ between machines would train another model on each, without a fault.
    loaders = [run.data.loader, *(part.loader for part in run.data.held_out.values())]
    check_consistency(world, loaders, run.model.module, run.model.weights)
    return run


def assemble_resumed(
    config: RunConfig, world: World, *, with_values: bool = False
) -> tuple[Run, Saved]:
    """Build a run as it begins, or goes on from the checkpoint that `resume` names.

    Gives what that checkpoint says, too; what a resumption refuses is refused. `with_values` is as
    for `assemble`.
    """
    loaded = None
    if config.resume is not None:
        loaded = load_step(Path(config.resume), config.step)
    # One process stands for all ranks.
    saved = Saved.read(config, loaded, World(device=world.device))
    run = assemble(config, world, saved, with_values=with_values)
    check_terms(run, saved.terms)
    return run, saved
