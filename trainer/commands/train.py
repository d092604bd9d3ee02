"""`train`: from a config to a finished run folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer import durable
from trainer.assemble import Parts, assemble
from trainer.build import construct
from trainer.checkpoint.codec import decode
from trainer.checkpoint.saver import AsyncSaver, DirectSaver
from trainer.checkpoint.state import restore
from trainer.checkpoint.store import CheckpointStore, Loaded
from trainer.checkpoint.weights import CHECKPOINTS, load_weights
from trainer.commands.ending import summarize_end
from trainer.commands.prepare import (
    Prepared,
    describe_cut,
    held_out,
    interruptible,
    prepare_alike,
)
from trainer.commands.summary import summarize
from trainer.config import RunConfig, contract, to_plain
from trainer.data.samples import Samples
from trainer.data.split import fingerprint_of
from trainer.errors import DataError, NoCheckpointError, Preempted, SaveError
from trainer.feed import Feed
from trainer.loop import Run, Trained, train
from trainer.out_of_memory import Thrash, allocator_retries
from trainer.parallel import Parallel
from trainer.plan.order import Cursor
from trainer.report.blocks import trusting
from trainer.report.console import Screen
from trainer.report.environment import environment
from trainer.report.metrics import evaluation_at
from trainer.report.records import PlanSummary, StartSummary
from trainer.report.reporter import Reporter, RunReporter, SilentReporter
from trainer.report.wandb import WandbSettings
from trainer.saves import Saves
from trainer.step import Kit
from trainer.world import World

PLAN_FILE = "plan.json"
RESULT_FILE = "result.json"


def train_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Train, from the start or from the newest intact checkpoint.

    Args:
        config: composed and settled.
        folder: the run folder, held by this process.
        world: all ranks.
        stop: whether a signal asked to stop.

    Raises:
        Preempted: a signal asked to stop; the state is saved.
    """
    started = time.perf_counter()
    store = CheckpointStore(folder / CHECKPOINTS, keep=config.checkpoint.keep)
    loaded = None if config.resume is None else _newest(store, world)
    extra = {} if loaded is None else _kept(loaded)
    parts = assemble(config, world)
    _check_data(parts, extra)
    prepared = prepare_alike(parts, extra.get("cut"), interruptible(stop))
    kit = _kit(parts, loaded, extra)
    plan = summarize(prepared)
    world.on_main(lambda: write_record(folder / PLAN_FILE, plan.to_json()))
    reporter = _reporter(config, folder, loaded) if world.is_main else SilentReporter()
    with closing(reporter), ExitStack() as left:
        run = _run(prepared, kit, store, reporter, stop, extra)
        left.callback(run.saves.release)
        left.callback(run.feed.close)
        run.saves.newest = None if loaded is None else loaded.path
        if loaded is None:
            _tell_bad_records(parts.train_set, reporter)
        try:
            reporter.start(_start(config, folder, plan, loaded))
            if parts.spread.why is not None:
                reporter.line(parts.spread.why)
            _say_how_it_grew(run, extra)
            trained = train(run)
            _finish(parts, kit.model, trained, folder, reporter, started)
        except Preempted:
            words = " ".join([f"resume={folder}", *trusting(config.packages)])
            reporter.line(f"stopped: go on with: train {words}")
            raise
    return 0


def _kept(loaded: Loaded) -> dict[str, Any]:
    """Read what a checkpoint keeps beside weights and moments.

    Raises:
        NoCheckpointError: it is not what a run of this version keeps.
    """
    try:
        extra: dict[str, Any] = decode(loaded.meta["extra"], loaded.tensors)
        extra["cursor"] = asdict(Cursor(**extra["cursor"]))
        missing = sorted({"contract", "fingerprint", "tokens", "cut"} - extra.keys())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NoCheckpointError(
            f"{loaded.path}: not a training state of this version ({error!r:.80}): use init="
        ) from error
    if missing:
        raise NoCheckpointError(f"{loaded.path}: lacks {', '.join(missing)}: use init=")
    return extra


def _tell_bad_records(data: Samples, reporter: Reporter) -> None:
    """Tell which records `data.on_bad=skip` passed over, where the data count them."""
    count = int(getattr(data, "num_skipped", 0))
    if count:
        reporter.passed_over(count, getattr(data, "skipped", ()))


def _newest(store: CheckpointStore, world: World) -> Loaded:
    """Read the newest intact checkpoint, the same on every rank. Collective.

    Raises:
        NoCheckpointError: there is none.
    """
    found: list[Loaded] = []

    def find() -> int:
        found.append(store.load())
        return found[0].step

    step = world.on_main(find)
    return found[0] if found else store.load(step, set_aside=False)


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file of the run folder.

    Raises:
        SaveError: the disk refused.
    """
    try:
        durable.write_json(path, content)
    except OSError as error:
        failure: SaveError = durable.save_error(error, path)
        raise failure from error


def _check_data(parts: Parts, extra: Mapping[str, Any]) -> None:
    """Refuse to go on with other data than the run began with.

    Raises:
        DataError: they are not the same.
    """
    if not extra or "data" in parts.config.resume_allow:
        return
    if extra["fingerprint"] != fingerprint_of(parts.train_set):
        raise DataError(
            "data: changed since the checkpoint was written, so its steps would not be the ones "
            "that were begun: restore the data, or allow it with resume_allow=[data]"
        )


def _kit(parts: Parts, loaded: Loaded | None, extra: Mapping[str, Any]) -> Kit:
    """Compose the step, with the weights and the state it begins with."""
    config = parts.config
    if config.init is not None and loaded is None:
        load_weights(parts.module, Path(config.init))
    kit = parts.kit()
    if loaded is not None:
        # More steps change no setting of the optimizer, and its groups may hold state.
        is_same = _without_length(contract(config)) == _without_length(extra["contract"])
        restore(
            loaded,
            parts.module,
            kit.optimizer,
            hyperparameters="saved" if is_same else "live",
        )
    return kit


def _without_length(contract_: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in contract_.items() if key not in {"steps", "epochs"}}


def _reporter(config: RunConfig, folder: Path, loaded: Loaded | None) -> RunReporter:
    hooks = {
        f"hooks[{index}] {hook.target}": construct(hook, f"hooks[{index}]", object, config.trust)
        for index, hook in enumerate(config.hooks)
    }
    wandb = WandbSettings(
        mode=config.wandb.mode,
        project=config.wandb.project,
        entity=config.wandb.entity,
        group=config.wandb.group,
        tags=config.wandb.tags,
        name=config.name,
    )
    with ExitStack() as opened:
        screen = Screen(folder)
        opened.callback(screen.close)
        for message in () if loaded is None else loaded.messages:
            screen.warn(message)
        reporter = RunReporter(
            folder,
            screen,
            log_every=config.log.every,
            resumed_step=None if loaded is None else loaded.step,
            keep_samples=config.log.samples,
            hooks=hooks,
            wandb=wandb,
            config=to_plain(config),
        )
        opened.pop_all()
    return reporter


def _run(
    prepared: Prepared,
    kit: Kit,
    store: CheckpointStore,
    reporter: Reporter,
    stop: Callable[[], bool],
    extra: Mapping[str, Any],
) -> Run:
    parts, config = prepared.parts, prepared.parts.config
    order = parts.source.order
    feed = Feed(
        parts.source,
        cut=prepared.cut,
        layout=parts.layout,
        world=parts.world,
        seed=config.seed,
        cursor=Cursor(**extra["cursor"]) if extra else order.start,
    )
    saves = Saves(
        kit=kit,
        feed=feed,
        saver=AsyncSaver(store) if config.checkpoint.asynchronous else DirectSaver(store),
        reporter=reporter,
        constants={
            "contract": contract(config),
            "fingerprint": fingerprint_of(parts.train_set),
            "environment": environment(),
            "total_steps": kit.total_steps,
        },
        describe_cut=partial(describe_cut, prepared),
        on_full=config.checkpoint.on_full,
    )
    return Run(
        kit=kit,
        order=order,
        feed=feed,
        held_out=held_out(prepared),
        reporter=reporter,
        saves=saves,
        must_stop=lambda: parts.world.any(stop()),
        is_thrashing=_is_thrashing(parts.world),
        was_asked=stop,
        eval_every=config.eval.every,
        checkpoint_every=config.checkpoint.every,
        nonfinite_limit=config.nonfinite.limit,
        tokens=extra.get("tokens", 0),
        evaluation=parts.world.on_main(
            lambda: evaluation_at(store.folder.parent, feed.cursor.step)
        ),
    )


def _start(
    config: RunConfig, folder: Path, plan: PlanSummary, loaded: Loaded | None
) -> StartSummary:
    return StartSummary(
        plan=plan,
        folder=folder,
        name=config.name,
        threads=torch.get_num_threads() if plan.device == "cpu" else None,
        resumed_step=None if loaded is None else loaded.step,
    )


def _is_thrashing(world: World) -> Callable[[], bool]:
    """Ask the allocators of all ranks, where there are any that count; else nothing is sent."""
    if world.device.type != "cuda":
        return lambda: False
    thrash = Thrash(allocator_retries(world.device))
    return lambda: world.any(thrash())


def _say_how_it_grew(run: Run, extra: Mapping[str, Any]) -> None:
    """Tell of a schedule that was made for fewer steps than the run now has."""
    kit, step = run.kit, run.feed.cursor.step
    before = extra.get("total_steps", kit.total_steps)
    if before == kit.total_steps or step >= kit.total_steps:
        return
    rate = kit.lr
    planned, now = (rate * kit.schedule.factor(step, total) for total in (before, kit.total_steps))
    run.reporter.line(
        f"steps {before} -> {kit.total_steps}: the schedule is re-anchored: lr {now:.2e} at step "
        f"{step + 1}, where the shorter run had {planned:.2e}"
    )


def _finish(
    parts: Parts,
    model: Parallel,
    trained: Trained,
    folder: Path,
    reporter: Reporter,
    started: float,
) -> None:
    parts.world.note("end")
    model.gather()  # the sample is written on one rank, without a collective
    if parts.world.is_main:
        summary = summarize_end(parts, trained, folder, time.perf_counter() - started)
        write_record(folder / RESULT_FILE, summary.to_json())
        reporter.finish(summary)
    model.release()
