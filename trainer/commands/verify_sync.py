"""Prove for `train verify`, on two ranks, that the sync policy reduces to the same gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from trainer.assemble.build import assemble
from trainer.assemble.saved import Saved
from trainer.assemble.step import step_context
from trainer.commands.verify import write_verdict
from trainer.config.run_config import RunConfig
from trainer.core.durable import write_record
from trainer.core.errors import NotExactError
from trainer.core.format import plural
from trainer.core.run_folder import RunFolder
from trainer.core.tensors import dtype_name
from trainer.core.world import World
from trainer.plan.cuts import Fixed
from trainer.verify.comparison import EXACT
from trainer.verify.reduced import compare_reduced
from trainer.verify.report import VerifyReport


def verify_sync(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Compare what real ranks reduce of a few samples with one process's gradient. Collective."""
    here = World(device=world.device)
    run = assemble(config, world, Saved.read(config, None, here))
    setup, layout = run.model.setup, replace(run.layout, world_size=1, lockstep=False)
    none = replace(setup, mode="none", replicas=1, mesh=None, sizes=None, is_ordered=False)
    cut = Fixed(micro=2 * layout.group_size)
    single = replace(run, world=here, model=replace(run.model, setup=none), layout=layout, cut=cut)
    with closing(single.feed(here)) as feed:
        found = compare_reduced(
            *(step_context(single), feed.next(), feed),
            lambda module, call: replace(setup, dtype=None).lay_out(module, call, world),
            world,
            in_one_piece=config.matrix,
        )
    if found is None or (found.is_exact and not config.matrix):
        return 0
    text = (
        f"sync={setup.sync.name} over {plural(world.size, 'rank')} of parallel={setup.mode} leaves "
        "another gradient than that of the same samples on one process"
    )
    culprits = tuple((name, reason.text) for name, reason in found.culprits) or (("sync", text),)
    report = VerifyReport(
        verdict="exact" if found.is_exact else "not_exact",
        max_relative_error=found.error,
        reference=f"{plural(found.num_samples, 'sample')} on one process",
        dtype=dtype_name(found.dtype),
        num_parameters=len([*run.model.module.parameters()]),
        micro_batches=found.num_micro_batches,
        global_batch=found.num_samples,
        limit=EXACT[found.dtype],
        culprits=() if found.is_exact else culprits,
    )
    if config.matrix:
        # The process that verifies the rest reads it, and goes on.
        world.on_main(lambda: write_record(folder / RunFolder.VERIFY, report.to_json()))
        return 0
    if world.is_main:
        write_verdict(report, folder)
    raise NotExactError(f"the planned step is not the whole-batch step: {text}")
