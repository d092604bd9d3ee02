"""Say how a run ended: the held-out loss beside baselines, where the time went, a sample."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.build.parts import Parts
from trainer.build.prepare import Prepared
from trainer.config.secrets import without_secrets
from trainer.core.durable import write_record
from trainer.core.format import shown_path
from trainer.data.samples import described
from trainer.models.sample import generate
from trainer.objectives.base import logits_of
from trainer.report.records import Record, RunEnd, is_noise
from trainer.report.reporter import Reporter
from trainer.report.run_status import to_go_on, trusting
from trainer.report.time_table import advice, split, time_table
from trainer.training.loop import Trained
from trainer.training.window import Kit
from trainer.tune.memory_limit import peak_bytes

_log = logging.getLogger(__name__)

RESULT_FILE = "result.json"
SAMPLE_TOKENS = 160


def end_run(
    prepared: Prepared,
    kit: Kit,
    trained: Trained,
    plan: Record,
    folder: Path,
    reporter: Reporter,
    started: float,
) -> None:
    """Write result.json, and show what a person wants to know at the end. Collective.

    `plan` is of plan.json, `started` when the command began.
    """
    world = prepared.parts.world
    world.note("end")
    spendings = world.collect(world.times.spending())
    kit.model.gather()  # the sample is written on one rank, without a collective
    if world.is_main:
        seconds = time.perf_counter() - started
        end = _end_of(prepared, trained, plan, folder, seconds, spendings)
        write_record(folder / RESULT_FILE, end.result)
        reporter.finish(end)
    kit.model.release()


def _end_of(
    prepared: Prepared,
    trained: Trained,
    plan: Record,
    folder: Path,
    seconds: float,
    spendings: Sequence[Mapping[str, Any]],
) -> RunEnd:
    """Gather the figures of result.json; `spendings` are those of the steps' phases, by rank."""
    parts, lengths = prepared.parts, prepared.parts.source.lengths
    config, device = parts.config, parts.world.device
    overlap = "collectives travel on streams of their own"  # what of the traffic can be hidden
    if plan["sync"] == "deferred":
        overlap = "sync=deferred reduces when all micro-batches are done"
    elif device.type == "cpu":
        overlap = "gloo makes the host wait for every collective"
    table = time_table(spendings, overlap) if trained.taken else None
    metrics = trained.evaluation
    eval_loss = metrics.get("loss", metrics.get("eval_loss"))
    # Held-out losses of simple models, in nats per token, which the data may know.
    entropies = parts.train_set.optional("byte_entropies")
    simple: dict[str, float] = {}
    if entropies is not None and parts.held_out is not None:
        simple = {f"byte {name}": value for name, value in asdict(entropies()).items()}
    result = {
        "step": trained.step,
        "loss": None if trained.loss is None else float(trained.loss),
        "eval_loss": eval_loss,
        "tokens_per_second": trained.tokens / trained.seconds if trained.seconds else None,
        "seconds": round(seconds, 3),
        "metrics": dict(metrics),
        "baselines": simple,
        "peak_bytes": peak_bytes(device),
        "skipped_steps": trained.skipped_steps,
        "replays": trained.replays,
        "time": table,
        "advice": (table and advice(split(spendings), table, plan, config.accum.name or "")) or [],
    }
    shown, trust = shown_path(folder), " ".join(["", *trusting(config, folder)])
    clock, steps = "steps", parts.total_steps
    if config.total_epochs is not None:
        clock, steps = "epochs", config.total_epochs
    return RunEnd(
        result=result,
        taken=trained.taken,
        noun="sample" if int(lengths.sum()) == len(lengths) else "token",
        peak_of="tensors" if device.type == "cuda" else "the whole process",
        unit="nats" if config.objective.target.startswith("trainer.") else None,
        sample=None if is_noise(eval_loss, simple) else sample_text(parts),
        commands=(
            f"train evaluate run={shown}{trust}",
            f"train export run={shown} export.to=exported{trust}",
            f"{to_go_on(config, folder)} {clock}={2 * steps}",
        ),
    )


def sample_text(parts: Parts) -> str | None:
    """Let the model write a little, where the data can read it back; None where it fails.

    Its weights may give no probabilities, the data's `decode` is the user's, memory may be short.
    """
    decode = parts.train_set.optional("decode")
    start = parts.train_set.optional("start_id")
    if decode is None or start is None:
        return None

    def call(ids: Tensor) -> Tensor:
        return logits_of(parts.call({"input_ids": ids}))

    was_training = parts.module.training
    parts.module.eval()
    try:
        ids = generate(
            call,
            [start],
            SAMPLE_TOKENS,
            context=int(parts.source.lengths.max()),
            seed=parts.config.seed,
            stop_id=parts.train_set.optional("stop_id"),
            device=parts.world.device,
        )
        return str(decode(ids))
    except Exception as error:
        _log.warning("no sample: %s", without_secrets(described(error), os.environ))
        return None
    finally:
        parts.module.train(was_training)
