"""Build what a run is made of, in three stages: its data, its model, and how the two go together.

Config is turned into objects here, and nothing below this room sees it.
"""

from __future__ import annotations

from dataclasses import replace

from trainer.assemble.data_sets import arguments_from_data, open_data, with_fine_tuning_batch
from trainer.assemble.layout import find_layout
from trainer.assemble.loaders import held_out_loader, open_loader
from trainer.assemble.model import make_model
from trainer.assemble.run import Run
from trainer.assemble.saved import Saved, Terms
from trainer.assemble.typed import TypedParts, batch_sizes
from trainer.config.run_config import RunConfig
from trainer.core.coupling import Coupling
from trainer.core.world import World
from trainer.data.source import DataSource
from trainer.plan.cut import Cut
from trainer.plan.order import Order
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
    config, source, data = _read_data(config, world, typed, saved.terms)
    given = arguments_from_data(config, data.train, saved.terms.given)
    model, chosen, chosen_optimizer = make_model(
        config, world, typed, data, given, saved, with_values=with_values
    )
    typed.tokenizer.refuse_unused()

    # What data and model together ask of every cut, those of evaluations too.
    with model.trial_values(world):
        layout, example = find_layout(config, world, data.loader, model)
    in_lockstep = world.size > 1 and (model.setup.sync.lockstep or model.coupling.joins_ranks)
    layout = replace(layout, lockstep=in_lockstep, group_size=model.coupling.size)
    held_out = {
        name: held_out_loader(config, name, view, data.loader, layout, model.module)
        for name, view in source.held_out.items()
    }
    return Run(
        config=config,
        world=world,
        data=replace(data, held_out=held_out),
        model=model,
        features=typed.features,
        cut=_whole(typed.cut, data.order, config, world, model.coupling),
        layout=layout,
        example=example,
        split=source.split,
        chosen=chosen,
        chosen_optimizer=chosen_optimizer,
        given=given,
        tokenizer=typed.tokenizer.built,
    )


def _read_data(
    config: RunConfig, world: World, typed: TypedParts, terms: Terms
) -> tuple[RunConfig, DataSource, Data]:
    """Open what is trained on, in its order, and what is held out. Collective.

    The config has the size of the steps where nobody typed it; the data have no held-out part yet.
    """
    sizes = batch_sizes(config)
    source = open_data(config, world, typed.tokenizer, terms.given.get("label_names"))
    lengths = source.train.lengths
    if sizes.is_constant:
        chosen = typed.objective
        compares = chosen is not None and chosen.objective.coupling.kind == "batch"
        config = with_fine_tuning_batch(config, len(lengths), terms.contract, compares=compares)
        sizes = batch_sizes(config)
    batch = config.batch
    order = Order(len(lengths), config.seed, sizes, batch.unit, batch.tail, lengths)
    data = Data(
        order=order,
        lengths=lengths,
        loader=open_loader(config, world, source.train),
        total_steps=config.steps or order.num_steps(config.total_epochs or 1),
    )
    return config, source, data


def _whole(cut: Cut, order: Order, config: RunConfig, world: World, coupling: Coupling) -> Cut:
    """Take a bound of the size of the step for the cut that leaves it whole, where it counts."""
    is_whole = config.batch.unit == "samples" and world.size == 1
    is_whole &= (config.accum.params.get("micro") or 0) >= order.sizes.largest
    return (cut.in_order if is_whole and coupling.fixes_cut else None) or cut
