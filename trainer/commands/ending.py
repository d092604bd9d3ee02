"""How a run ended: the held-out loss beside baselines, and a sample of what the model writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from trainer.assemble import Parts
from trainer.loop import Trained
from trainer.models.sample import generate
from trainer.objectives.base import logits_of
from trainer.report.records import RunSummary
from trainer.tune.limit import peak_bytes

SAMPLE_TOKENS = 160


def summarize_end(parts: Parts, trained: Trained, folder: Path, seconds: float) -> RunSummary:
    """Gather what a person wants to know at the end.

    Args:
        parts: what the run is made of.
        trained: where the loop ended.
        folder: the run folder.
        seconds: wall time of the command so far.
    """
    return RunSummary(
        step=trained.step,
        steps=parts.total_steps,
        loss=None if trained.loss is None else float(trained.loss),
        metrics=trained.evaluation,
        seconds=seconds,
        tokens_per_second=trained.tokens / trained.seconds if trained.seconds else None,
        folder=folder,
        baselines=baselines(parts),
        sample=sample_text(parts),
        peak_bytes=peak_bytes(parts.world.device),
        skipped_steps=trained.skipped_steps,
        replays=trained.replays,
        packages=parts.config.packages,
    )


def baselines(parts: Parts) -> Mapping[str, float]:
    """Ask the data for held-out losses of simple models, in nats per token."""
    entropies = getattr(parts.train_set, "byte_entropies", None)
    if entropies is None or parts.held_out is None:
        return {}
    return {f"byte {name}": value for name, value in asdict(entropies()).items()}


def sample_text(parts: Parts) -> str | None:
    """Let the model write a little, where the data can read it back."""
    decode = getattr(parts.train_set, "decode", None)
    start = getattr(parts.train_set, "start_id", None)
    if decode is None or start is None:
        return None

    def call(ids: Tensor) -> Tensor:
        return logits_of(parts.call({"input_ids": ids}))

    was_training = parts.module.training
    parts.module.eval()
    ids = generate(
        call,
        [start],
        SAMPLE_TOKENS,
        context=int(parts.source.lengths.max()),
        seed=parts.config.seed,
        stop_id=getattr(parts.train_set, "stop_id", None),
        device=parts.world.device,
    )
    parts.module.train(was_training)
    text: str = decode(ids)
    return text
