"""`train evaluate` and `train export` read a checkpoint of a run; `train verify` proves its step.

Verifying needs no run: the planned step of any config is the whole-batch step, or what breaks it is
named.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from trainer.assemble.checks import check_consistency
from trainer.assemble.components import Components, assemble
from trainer.assemble.instantiate import look_up
from trainer.assemble.model import build_model
from trainer.assemble.parallel import ParallelSetup
from trainer.assemble.resumption import SavedCut, check_terms, refuse_changed_data
from trainer.assemble.run_plan import RunPlan, prepare, prepare_on_main
from trainer.assemble.terms import Terms, read_terms
from trainer.checkpoint.state import restore
from trainer.checkpoint.store import CHECKPOINTS, CheckpointStore, Loaded
from trainer.checkpoint.weights import checkpoint_weights, export, first_weights
from trainer.config.messages import show
from trainer.config.run_config import RunConfig, contract, evaluation_file, to_plain
from trainer.core.durable import write_record
from trainer.core.errors import ConfigError, DataError, NotExactError
from trainer.core.format import expanded, plural
from trainer.core.world import World
from trainer.plan.cuts import Fixed
from trainer.report.blocks import verify_block
from trainer.report.console import Screen
from trainer.report.records import VerifyReport
from trainer.training.batches import Feed, PlannedBatch
from trainer.training.evaluation import HeldOut, evaluate
from trainer.verify.comparison import EXACT
from trainer.verify.diagnose import short
from trainer.verify.proof import verify
from trainer.verify.reduced import compare_reduced

VERIFY_FILE = "verify.json"
DOUBLE = 2  # the comparison is in float64: twice the bytes of fp32


def evaluate_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Evaluate a checkpoint on the run's held-out data, or on all of other data.

    Prints, and writes what `evaluation_file` names into the run. The config is the run's own with
    what was typed now on top.

    Raises:
        DataError: nothing is held out, or the run's own data changed.
        SaveError: the figures, which are printed, cannot be written.
    """
    store = CheckpointStore(folder / CHECKPOINTS)
    loaded = store.load(config.checkpoint_step, set_aside=False, world=world)
    terms = read_terms(loaded)
    if config.evaluates_all:
        config = _for_any_data(config, terms)
    components = assemble(config, world, terms, checkpoint_weights(loaded))
    if not config.evaluates_all:
        refuse_changed_data(components, terms)
    check_consistency(world, components.data_views, components.module, components.weights)
    data = prepare_on_main(components).components.held_out
    if data is None:
        raise DataError("data.holdout: nothing is held out to evaluate on")
    metrics = evaluate(components.step_context().model, components.objective, data, world)

    def report() -> None:
        file = folder / evaluation_file(config)
        what, record = _described(config, terms, data)
        figures = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        more = f" (written to {file.name})" if config.evaluates_all else ""
        _show(loaded, f"{what}: {figures}{more}")
        names = {f"eval_{name}": value for name, value in metrics.items()}
        write_record(file, {"step": loaded.step, **names, **record})

    world.on_main(report)
    return 0


def _for_any_data(config: RunConfig, terms: Terms) -> RunConfig:
    """Let data of any size be enough: they are cut and evaluated, and no step is taken."""
    batch = config.batch.model_copy(update={"tail": "keep"})
    steps = terms.total_steps or config.steps
    return config.model_copy(update={"batch": batch, "steps": steps, "epochs": None})


def _described(config: RunConfig, terms: Terms, data: HeldOut) -> tuple[str, dict[str, Any]]:
    """Say which samples are evaluated, for the screen and for the record."""
    section, before = to_plain(config)["data"], terms.contract
    keys = (k for k in contract(config) if k.startswith("data.") and k != "data.holdout")
    is_own = all(before.get(key) == contract(config)[key] for key in keys)
    count, most = data.num_samples, len(data.lengths)
    what = f"held out ({count} samples)"
    if config.evaluates_all:
        place = f"other data, {show(section.get('path') or section['_target_'])}"
        whose = "the run's own data, those it trained on among them" if is_own else place
        what = f"{f'all {most}' if count == most else f'{count} of {most}'} samples of {whose}"
    fingerprint = data.loader.dataset.fingerprint
    return what, {"samples": count, "data": {**section, "fingerprint": fingerprint}}


def export_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Write a checkpoint's weights as safetensors; those of transformers as it loads them.

    One process does it, whatever the number of ranks that saved; shards become whole tensors. It
    reads config and checkpoint: neither data nor a GPU need be there.

    Raises:
        ConfigError: nowhere to write to.
    """
    if config.export.to is None:
        raise ConfigError("export.to: needs a folder, e.g. export.to=weights")
    loaded = CheckpointStore(folder / CHECKPOINTS).load(config.checkpoint_step, set_aside=False)
    description = {
        "model": {"_target_": config.model.target, **config.model.params},
        "step": loaded.step,
    }
    if config.transforms:
        description["transforms"] = to_plain(config)["transforms"]
    to = export(loaded, expanded(config.export.to), description, _built(config, loaded, world))
    _show(loaded, f"weights written to {to}")
    return 0


def _built(config: RunConfig, loaded: Loaded, world: World) -> nn.Module | None:
    """Build the model where weights are not stored, or it may be one of transformers; else None."""
    look_up(config.model, "model", config.trust)  # imports what makes it
    given, stored = read_terms(loaded).given, checkpoint_weights(loaded)
    if "transformers" not in sys.modules and not stored.frozen:
        return None
    try:
        return build_model(config, world, given, stored=stored)[0]
    except ConfigError as error:  # what it was loaded from may be gone
        if stored.frozen:
            raise
        Screen().warn(f"{error}: only the weights are written, not the layout of transformers")
        return None


def _show(loaded: Loaded, text: str) -> None:
    """Print what was done with a checkpoint, and which it was."""
    screen = Screen()
    name_read(screen, loaded)
    screen.line(f"step {loaded.step}: {text}")
    screen.close()


def name_read(screen: Screen, loaded: Loaded | None) -> None:
    """Print which checkpoint was read, where one was, and why no newer one."""
    if loaded is not None:
        for message in loaded.messages:
            screen.warn(message)
        screen.line(f"reading {loaded}")


def assemble_resumed(
    config: RunConfig, world: World, *, with_values: bool = False
) -> tuple[Components, Loaded | None, SavedCut]:
    """Build a run as it begins, or goes on from the checkpoint that `resume` names.

    Gives its components, the checkpoint of its weights, where they are of one, and the cut that
    was saved; what a resumption refuses is refused. A plan leaves weights unread. `with_values` is
    as for `assemble`.
    """
    loaded, terms, cut, stored = None, Terms(), SavedCut(), None
    if config.resume is not None:
        store = CheckpointStore(Path(config.resume) / CHECKPOINTS)
        loaded = store.load(config.checkpoint_step, set_aside=False)
        restore(loaded, {"terms": terms, "cut": cut})
    if config.command != "plan":
        # One process stands for all ranks.
        stored = first_weights(config, loaded, World(device=world.device))
    components = assemble(config, world, terms, stored, with_values=with_values)
    check_terms(components, terms)
    return components, loaded or (stored and stored.loaded), cut


def verify_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Compare the gradient of the first step, as planned, with the whole batch's.

    One process computes the micro-batches of every rank. verify.json and the screen have the
    verdict before an error says it with the exit code.

    Raises:
        NotExactError: they differ, or cannot be compared; verify.json names the culprits.
    """
    components, loaded, cut = assemble_resumed(config, world)
    run_plan = prepare(components, cut)
    batch, feed = _of_all_ranks(run_plan)
    report = verify(components.step_context(), batch, feed, whole_fits=_whole_fits(run_plan))
    report = replace(report, notes=(*_asides(components), *report.notes))
    write_record(folder / VERIFY_FILE, report.to_json())
    screen = Screen(folder)
    name_read(screen, loaded)
    screen.show(verify_block(report))
    screen.close()
    culprits = ", ".join(dict.fromkeys(name for name, _ in report.culprits))
    if report.verdict == "not_proven":
        text = "not proven that the planned step is the whole-batch step"
        raise NotExactError(f"{text}: {culprits} cannot be compared; see {folder / VERIFY_FILE}")
    if report.verdict == "not_exact":
        chance = " except by coincidence" if report.max_relative_error <= report.limit else ""
        raise NotExactError(
            f"the planned step is not the whole-batch step{chance}: relative error "
            f"{report.max_relative_error:.2g}, caused by {culprits}; "
            f"see {folder / VERIFY_FILE}"
        )
    return 0


def _asides(components: Components) -> Iterator[str]:
    """Say what of the run's own step is not computed here."""
    config, world = components.config, components.world
    if world.size > 1:
        together = f"the micro-batches of all {world.size} ranks were computed one after another"
        sync = f"sync={components.parallel.sync.name}"
        yield f"{together}; {sync} was compared on two ranks, with a few samples"
    if config.compile:
        yield "compile=true compiles the run's own step, which is not checked here"
    if components.precision != "fp32":
        rounding = f"precision={components.precision} adds rounding to the run's own step"
        yield f"{rounding}, which is not checked here"


def verify_sync(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Compare what real ranks reduce of a few samples with one process's gradient. Collective.

    Raises:
        NotExactError: they differ; verify.json says so.
    """
    here = World(device=world.device)
    components = assemble(config, world, stored=first_weights(config, None, here))
    setup, layout = components.parallel, replace(components.layout, world_size=1, lockstep=False)
    none = ParallelSetup(mode="none", replicas=1, sync=setup.sync)
    alone = replace(components, world=here, parallel=none, layout=layout)
    cut = Fixed(micro=2 * layout.group_size)
    with closing(alone.feed(cut, here, alone.source.order.start)) as feed:
        found = compare_reduced(
            *(alone.step_context(), feed.next(), feed),
            lambda module, call: replace(setup, dtype=None).lay_out(module, call, world),
            world,
        )
    if found is None or found.is_exact:
        return 0
    text = (
        f"sync={setup.sync.name} over {plural(world.size, 'rank')} of parallel={setup.mode} leaves "
        "another gradient than that of the same samples on one process"
    )
    report = VerifyReport(
        verdict="not_exact",
        max_relative_error=found.error,
        reference=f"{plural(found.num_samples, 'sample')} on one process",
        dtype=short(found.dtype),
        num_parameters=len([*components.module.parameters()]),
        micro_batches=found.num_micro_batches,
        global_batch=found.num_samples,
        limit=EXACT[found.dtype],
        culprits=(("sync", text),),
    )
    if world.is_main:
        write_record(folder / VERIFY_FILE, report.to_json())
        screen = Screen(folder)
        screen.show(verify_block(report))
        screen.close()
    raise NotExactError(f"the planned step is not the whole-batch step: {text}")


def _of_all_ranks(run_plan: RunPlan) -> tuple[PlannedBatch, Feed]:
    """Take the first step with the micro-batches of every rank, for one process to compute."""
    components, batches = run_plan.components, []
    for rank in range(components.world.size):
        world = replace(components.world, rank=rank)
        with closing(components.feed(run_plan.cut, world, components.source.order.start)) as feed:
            batches.append(feed.next())
    micro_batches = tuple(m for batch in batches for m in batch.micro_batches)
    return replace(batches[0], micro_batches=micro_batches), feed


def _whole_fits(run_plan: RunPlan) -> bool:
    """Scale the predicted activations up to the whole batch in float64; no prediction is a no."""
    estimate, plan = run_plan.predicted, run_plan.plans[0]
    if estimate is None or run_plan.limit_bytes is None:
        return False
    whole = len(plan.lengths) * int(plan.lengths.max())
    growth = DOUBLE * whole / max(1, plan.max_positions)
    resting = DOUBLE * (estimate.parameters + estimate.gradients) + estimate.buffers
    return resting + estimate.activations * growth <= run_plan.limit_bytes / DOUBLE
