"""`train evaluate` and `train export` read a checkpoint of a run; `train verify` proves its step.

Verifying needs no run: the planned step of any config is the whole-batch step, or what breaks it is
named.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.build.checks import check_consistency, read_run_state
from trainer.build.instantiate import look_up
from trainer.build.parts import Parts, assemble
from trainer.build.prepare import Prepared, prepare, prepare_on_main
from trainer.checkpoint.state import load_model
from trainer.checkpoint.store import CHECKPOINTS, CheckpointStore, Loaded
from trainer.checkpoint.weights import export, load_weights
from trainer.config.run_config import RunConfig
from trainer.core.durable import write_record
from trainer.core.errors import ConfigError, DataError, NotExactError
from trainer.core.format import expanded
from trainer.core.world import World
from trainer.report.blocks import verify_block
from trainer.report.console import Screen
from trainer.training.batches import Feed, PlannedBatch
from trainer.training.evaluation import evaluate
from trainer.training.window import Kit
from trainer.verify.proof import verify

EVALUATE_FILE = "evaluate.json"
VERIFY_FILE = "verify.json"
DOUBLE = 2  # the comparison is in float64: twice the bytes of fp32


def evaluate_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Evaluate a checkpoint on the held-out data, print, and write evaluate.json into the run.

    The config is the run's own with what was typed now on top, so other data may be given.

    Raises:
        DataError: the data hold nothing out.
        SaveError: the figures, which are printed, cannot be written.
    """
    store = CheckpointStore(folder / CHECKPOINTS)
    loaded = store.load(config.checkpoint_step, set_aside=False, world=world)
    parts = assemble(config, world, read_run_state(loaded)["contract"])
    check_consistency(world, parts.data_views, parts.module, parts.weights, begins=False)
    load_model(parts.module, loaded.weights, loaded.path)
    data = prepare_on_main(parts).parts.held_out
    if data is None:
        raise DataError("data.holdout: nothing is held out to evaluate on")
    metrics = evaluate(parts.kit().model, parts.objective, data, world)

    def report() -> None:
        figures = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        _show(loaded, f"held out ({data.num_samples} samples): {figures}")
        names = {f"eval_{name}": value for name, value in metrics.items()}
        write_record(folder / EVALUATE_FILE, {"step": loaded.step, **names})

    world.on_main(report)
    return 0


def export_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Write a checkpoint's weights as safetensors; those of transformers as it loads them.

    One process does it, whatever the number of ranks that saved; shards become whole tensors.

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
    to = export(
        loaded, expanded(config.export.to), description, _hugging_face(config, loaded, world)
    )
    _show(loaded, f"weights written to {to}")
    return 0


def _hugging_face(config: RunConfig, loaded: Loaded, world: World) -> Any:  # noqa: ANN401
    """Build the model with its weights where it is one of transformers; else give None."""
    look_up(config.model, "model", config.trust)  # imports what makes it
    if "transformers" not in sys.modules:
        return None
    # What the run computed in may need a GPU; weights do not.
    module = assemble(config.model_copy(update={"precision": "fp32"}), world).module
    if not hasattr(module, "save_pretrained"):
        return None
    load_model(module, loaded.weights, loaded.path)
    return module


def _show(loaded: Loaded, text: str) -> None:
    """Print what was done with a checkpoint, after what reading it warned of."""
    screen = Screen()
    for message in loaded.messages:
        screen.warn(message)
    screen.line(f"reading {loaded.path}")
    screen.line(f"step {loaded.step}: {text}")
    screen.close()


def open_resumed(config: RunConfig) -> tuple[Loaded | None, dict[str, Any]]:
    """Open the checkpoint that `resume` names, as it is, and read the state of its run."""
    if config.resume is None:
        return None, {}
    store = CheckpointStore(Path(config.resume) / CHECKPOINTS)
    loaded = store.load(config.checkpoint_step, set_aside=False)
    return loaded, read_run_state(loaded)


def verify_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Compare the gradient of the first step, as planned, with the whole batch's.

    One process computes the micro-batches of every rank. verify.json and the screen have the
    verdict before an error says it with the exit code.

    Raises:
        NotExactError: they differ, or cannot be compared; verify.json names the culprits.
    """
    loaded, extra = open_resumed(config)
    parts = assemble(config, world, extra.get("contract"))
    prepared = prepare(parts, extra.get("cut"))
    batch, feed = _of_all_ranks(prepared)
    with feed.naming_samples(batch):
        report = verify(_kit(parts, loaded), batch, feed, whole_fits=_whole_fits(prepared))
    asides = []
    if world.size > 1:
        together = f"the micro-batches of all {world.size} ranks were computed one after another"
        asides.append(f"{together}: how gradients are sent between ranks is not checked here")
    if config.compile:
        asides.append("compile=true compiles the run's own step, which is not checked here")
    if parts.precision != "fp32":
        rounding = f"precision={parts.precision} adds rounding to the run's own step"
        asides.append(f"{rounding}, which is not checked here")
    report = replace(report, notes=(*asides, *report.notes))
    write_record(folder / VERIFY_FILE, report.to_json())
    screen = Screen(folder)
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
            f"{report.max_relative_error:.2g}, caused by {culprits}; see {folder / VERIFY_FILE}"
        )
    return 0


def _kit(parts: Parts, loaded: Loaded | None) -> Kit:
    """Compose the step with the weights that the run begins, or goes on, with."""
    config, here = parts.config, World(device=parts.world.device)  # one process holds all ranks
    kit = parts.kit(is_fresh=config.init is None and loaded is None)
    if loaded is not None:
        load_model(parts.module, loaded.weights, loaded.path)
    elif config.init is not None:
        load_weights(parts.module, expanded(config.init), here, config.checkpoint_step)
    return kit


def _of_all_ranks(prepared: Prepared) -> tuple[PlannedBatch, Feed]:
    """Take the first step with the micro-batches of every rank, for one process to compute."""
    parts, batches = prepared.parts, []
    for rank in range(parts.world.size):
        world = replace(parts.world, rank=rank)
        with closing(parts.feed(prepared.cut, world, parts.source.order.start)) as feed:
            batches.append(feed.next())
    micro_batches = tuple(m for batch in batches for m in batch.micro_batches)
    return replace(batches[0], micro_batches=micro_batches), feed


def _whole_fits(prepared: Prepared) -> bool:
    """Scale the predicted activations up to the whole batch in float64; no prediction is a no."""
    estimate, plan = prepared.predicted, prepared.plans[0]
    if estimate is None or prepared.limit_bytes is None:
        return False
    whole = len(plan.lengths) * int(plan.lengths.max())
    growth = DOUBLE * whole / max(1, plan.max_positions)
    resting = DOUBLE * (estimate.parameters + estimate.gradients) + estimate.buffers
    return resting + estimate.activations * growth <= prepared.limit_bytes / DOUBLE
