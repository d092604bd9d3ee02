"""`train`: from a config to a finished run folder; `train plan` stops before the first step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from pathlib import Path

from trainer.assemble.checks import check_consistency
from trainer.assemble.components import Components, assemble
from trainer.assemble.instantiate import construct
from trainer.assemble.resumption import SavedCut, check_terms, own_parts, refuse_unsavable
from trainer.assemble.run_plan import RunPlan, prepare, prepare_on_main, saved_cut
from trainer.assemble.summary import describe
from trainer.assemble.terms import Terms, read_terms
from trainer.checkpoint.state import GeneratorsPart, OptimizerPart, restore
from trainer.checkpoint.store import (
    CHECKPOINTS,
    MODEL,
    OPTIMIZER,
    CheckpointStore,
    CheckpointWriter,
    Loaded,
)
from trainer.checkpoint.weights import ModelPart, StoredWeights, first_weights
from trainer.commands.reading import assemble_resumed, name_read
from trainer.config.rules import parse_time
from trainer.config.run_config import RunConfig, contract_diff, to_plain
from trainer.config.run_config import contract as contract_of
from trainer.core.durable import write_record
from trainer.core.errors import Preempted
from trainer.core.format import shown_path
from trainer.core.out_of_memory import peak_bytes
from trainer.core.rows import Row, record_of
from trainer.core.signals import UNBEGUN
from trainer.core.stateful import Stateful
from trainer.core.world import World
from trainer.report.blocks import plan_block
from trainer.report.console import Screen
from trainer.report.metrics import evaluation_at
from trainer.report.records import Record
from trainer.report.reporter import Hook, Reporter, RunReporter, SilentReporter
from trainer.report.run_status import publish, to_go_on, trusting
from trainer.report.time_table import advice, split, time_table
from trainer.report.wandb import WandbMirror
from trainer.training.batches import Feed
from trainer.training.checkpointing import Checkpointer
from trainer.training.failed_allocation import FailedAllocation
from trainer.training.loop import Progress, Run, train
from trainer.training.tracing import tracing
from trainer.training.window import StepContext
from trainer.tune.predict import CannotRunFake

_log = logging.getLogger(__name__)

PLAN_FILE = "plan.json"
SPLITS_FILE = "splits.json"
RESULT_FILE = "result.json"
MEMORY_FIGURES = ("predicted_peak_bytes", "memory_limit_bytes")  # of plan.json

BUILT_WHOLE = (
    "the model is built whole on every rank before it is sharded: only classes that declare "
    "draws_on_meta are built in shards"
)


def train_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Train, from the start or from the newest intact checkpoint.

    Raises:
        Preempted: a signal asked to stop; the state is saved.
    """
    try:
        _train(config, folder, world, stop)
    except Preempted as error:
        text = f"{error}: go on with: {to_go_on(config, folder)}"
        _log.info("%s", text)
        raise Preempted(text) from None
    return 0


def plan_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Print the whole arithmetic of a run, and write it into plan.json; start nothing.

    Of ranks that are not there this process works out what the first would do.
    """
    try:
        components, loaded, cut = assemble_resumed(config, world)
        run_plan = prepare(components, cut)
    except CannotRunFake:  # shapes do not do
        components, loaded, cut = assemble_resumed(config, world, with_values=True)
        run_plan = prepare(components, cut)
    plan = record_of(rows := describe(run_plan))
    write_record(folder / PLAN_FILE, plan)
    screen = Screen(folder)
    name_read(screen, loaded)
    screen.show(plan_block(rows, plan, folder / PLAN_FILE))
    screen.close()
    return 0


def _train(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> None:
    """Build the run, go through its steps, and say how it ended. Collective."""
    started = time.perf_counter()
    store = CheckpointStore(folder / CHECKPOINTS, keep=config.checkpoint.keep)
    _end_if_stopped(world, stop())
    loaded = None if config.resume is None else store.load(world=world)
    before, cut = _read_saved(loaded)
    own, stored = own_parts(config), first_weights(config, loaded, world)
    components = _assemble(config, world, before, stored)
    terms, run_plan = check_terms(components, before), prepare_on_main(components, cut)
    components, plan = run_plan.components, record_of(rows := describe(run_plan))
    failed = FailedAllocation(folder, world, *(plan[name] for name in MEMORY_FIGURES))
    context = components.step_context(on_out_of_memory=failed, parts=[*own.values()])
    feed = components.feed(run_plan.cut, world, components.source.order.start)
    progress = Progress()
    # More steps change no setting of the optimizer, and its groups may hold state.
    is_same = not contract_diff(before.contract, terms.contract, allow=("steps", "epochs"))
    live: dict[str, Stateful] = {
        OPTIMIZER: OptimizerPart(components.module, context.optimizer, keeps_settings=not is_same),
        "rng": GeneratorsPart(),
        "data": feed,
        "progress": progress,
        **({} if context.loss_scale is None else {"loss_scale": context.loss_scale}),
        **own,
    }
    _begin(components, loaded, live, own)
    world.on_main(lambda: _record_begin(folder, plan, components))
    reporter: Reporter = _reporter(config, folder, loaded) if world.is_main else SilentReporter()
    with closing(reporter), ExitStack() as opened:
        parts: dict[str, Stateful] = {MODEL: ModelPart.of(components.module, stored), **live}
        parts |= {"terms": terms, "cut": saved_cut(run_plan, feed)}
        run = _run(run_plan, context, feed, store, reporter, stop, parts)
        opened.callback(run.checkpointer.release)
        opened.callback(run.feed.close)
        _recall(run, progress, folder, is_saved=loaded is not None)
        _announce(reporter, components, rows, plan, stored, _growth(run, before))
        with tracing(world, config.profile, progress.step, folder, reporter.warn):
            train(run, progress)
        _end(components, run, progress, plan, folder, started)


def _read_saved(loaded: Loaded | None) -> tuple[Terms, SavedCut]:
    """Read what a checkpoint says before the run is built; all empty where there is none."""
    terms, cut = Terms(), SavedCut()
    if loaded is not None:
        restore(loaded, {"terms": terms, "cut": cut})
    return terms, cut


def _announce(
    reporter: Reporter,
    components: Components,
    rows: Sequence[Row],
    plan: Record,
    stored: StoredWeights | None,
    growth: str | None,
) -> None:
    """Show what is about to happen, and why the run is laid out as it is."""
    data, config = components.train_set, components.config
    if config.resume is None and data.num_skipped:
        reporter.passed_over(data.num_skipped, data.skipped)
    reporter.start(rows, plan, name=config.name)
    _name_weights(reporter, components, stored)
    whole = BUILT_WHOLE * (components.is_sharded and components.weights is None)
    for line in filter(None, (*components.parallel.reasons, whole, growth)):
        reporter.line(line)


def _end_if_stopped(world: World, was_asked: bool) -> None:
    """End before the first step, by `Preempted`, if a signal asked any rank to. Collective."""
    if any(world.collect(was_asked)):
        raise Preempted(UNBEGUN)


def _assemble(
    config: RunConfig, world: World, terms: Terms, stored: StoredWeights | None
) -> Components:
    """Build the same run on all ranks, unless a signal ends the reading of its data. Collective."""
    components: list[Components] = []
    with suppress(Preempted):
        components.append(assemble(config, world, terms, stored))
    _end_if_stopped(world, not components)
    found = components[0]
    check_consistency(world, found.data_views, found.module, found.weights)
    return found


def _record_begin(folder: Path, plan: Record, components: Components) -> None:
    """Record how the run goes on, now that nothing refuses it."""
    held_out = None if components.held_out is None else components.held_out.loader.dataset
    publish(folder)
    write_record(folder / PLAN_FILE, plan)
    write_record(folder / SPLITS_FILE, components.split.to_json(components.train_set, held_out))


def _begin(
    components: Components,
    loaded: Loaded | None,
    live: Mapping[str, Stateful],
    own: Mapping[str, Stateful],
) -> None:
    """Give every part but the model, which has it, the state it begins, or goes on, with."""
    for part in own.values():
        part.begin(components.module)
    refuse_unsavable(own)
    if loaded is not None:
        added = own if "parts" in components.config.resume_allow else {}
        restore(loaded, live, may_lack={"loss_scale", *added})


def _name_weights(reporter: Reporter, components: Components, stored: StoredWeights | None) -> None:
    """Show which weights `init=` took, and warn where they may know what is held out here."""
    if stored is None or stored.is_resumed:
        return
    config, taken = components.config, stored.loaded
    if taken is not None:
        for message in taken.messages:
            reporter.warn(message)
        before, now = read_terms(taken), contract_of(config)
        keys = ("data._target_", "data.path")
        is_same_data = all(before.contract.get(key) == now.get(key) for key in keys)
        if is_same_data and before.fingerprint != components.train_set.fingerprint:
            reporter.warn(
                "init: those weights were trained on another part of these data, so that samples "
                "held out here may be ones they were trained on"
            )
    reporter.line(f"init: weights of {taken or config.init}")


def _reporter(config: RunConfig, folder: Path, loaded: Loaded | None) -> RunReporter:
    """Open the records of a run."""
    hooks = {
        f"hooks[{index}] {hook.target}": construct(hook, f"hooks[{index}]", Hook, config.trust)
        for index, hook in enumerate(config.hooks)
    }
    screen, labels = Screen(folder), config.wandb.model_dump(exclude={"mode"})
    for message in () if loaded is None else loaded.messages:
        screen.warn(message)
    wandb = WandbMirror(
        config.wandb.mode,
        folder,
        to_plain(config),
        screen.warn,
        labels={**labels, "name": config.name},
    )
    return RunReporter(
        folder,
        screen,
        log_every=config.log.every,
        resumed_step=None if loaded is None else loaded.step,
        keep_samples=config.log.samples,
        hooks=hooks,
        wandb=wandb,
    )


def _run(
    run_plan: RunPlan,
    context: StepContext,
    feed: Feed,
    store: CheckpointStore,
    reporter: Reporter,
    stop: Callable[[], bool],
    parts: Mapping[str, Stateful],
) -> Run:
    components, config = run_plan.components, run_plan.components.config
    every, world = config.checkpoint.every, components.world
    checkpointer = Checkpointer(
        world=world,
        module=components.module,
        parts=parts,
        writer=CheckpointWriter(store, world, asynchronous=config.checkpoint.asynchronous),
        reporter=reporter,
        on_full=config.checkpoint.on_full,
        every_s=parse_time(every) if isinstance(every, str) else None,
    )
    return Run(
        context=context,
        feed=feed,
        held_out=components.held_out,
        reporter=reporter,
        checkpointer=checkpointer,
        was_asked=stop,
        eval_every=components.every(config.eval.every),
        eval_at_start=config.eval.at_start,
        checkpoint_every=None if isinstance(every, str) else components.every(every),
        flops=run_plan.flops,
        nonfinite_limit=config.nonfinite.limit,
    )


def _recall(run: Run, progress: Progress, folder: Path, *, is_saved: bool) -> None:
    """Note how far the run came before this process, and what it evaluated there. Collective."""
    step = run.feed.cursor.step
    evaluation = run.context.world.on_main(lambda: evaluation_at(folder, step))
    progress.step, progress.has_terms = step, step > 0
    progress.saved_at = step if is_saved else None
    if evaluation is not None:
        progress.evaluation, progress.evaluated_at = evaluation, step


def _growth(run: Run, before: Terms) -> str | None:
    """Describe a schedule that was made for fewer steps than the run now has."""
    context, step = run.context, run.feed.cursor.step
    total = before.total_steps or context.total_steps
    if total == context.total_steps or step >= context.total_steps:
        return None
    lr = context.lr * context.lr_scale(step) * context.schedule.factor(step, context.total_steps)
    what = f"steps {total} -> {context.total_steps}: the schedule now spans them all"
    return f"{what}: lr {lr:.2e} at step {step + 1}"


def _end(
    components: Components, run: Run, trained: Progress, plan: Record, folder: Path, at: float
) -> None:
    """Write result.json, and show what a person wants to know at the end. Collective."""
    components.world.note("end")
    spendings = components.world.collect(
        components.world.times.spending()
    )  # of the steps' phases, by rank
    peaks = components.world.collect(peak_bytes(components.world.device))
    if not components.world.is_main:
        return
    config, device = components.config, components.world.device
    overlap = "collectives run on their own streams"  # what of the traffic can be hidden
    if plan["sync"] == "deferred":
        overlap = "sync=deferred reduces when all micro-batches are done"
    elif device.type == "cpu":
        overlap = "gloo makes the host wait for every collective"
    table = time_table(spendings, overlap) if trained.taken else None
    metrics = trained.evaluation
    eval_loss = metrics.get("loss", metrics.get("eval_loss"))
    # Held-out losses of simple models, in nats per token, which the data may know.
    entropies = components.train_set.facts.byte_entropies
    simple: dict[str, float] = {}
    if entropies is not None and components.held_out is not None:
        simple = {f"byte {name}": value for name, value in asdict(entropies()).items()}
    result = {
        "step": trained.step,
        "loss": None if trained.loss is None else float(trained.loss),
        "eval_loss": eval_loss,
        "tokens_per_second": trained.tokens / trained.seconds if trained.seconds else None,
        "seconds": round(time.perf_counter() - at, 3),
        "metrics": dict(metrics),
        "baselines": simple,
        "peak_bytes": max(peaks),
        "skipped_steps": trained.skipped_steps,
        "replays": trained.replays,
        "time": table,
        "advice": (table and advice(split(spendings), table, plan, config.accum.name or "")) or [],
    }
    write_record(folder / RESULT_FILE, result)
    shown, trust = shown_path(folder), " ".join(["", *trusting(config, folder)])
    clock, steps = "steps", components.total_steps
    if config.total_epochs is not None:
        clock, steps = "epochs", config.total_epochs
    commands = (
        f"train evaluate run={shown}{trust}",
        f"train export run={shown} export.to=exported{trust}",
        f"{to_go_on(config, folder)} {clock}={2 * steps}",
    )
    run.reporter.finish(result, commands)
