"""What a person and plan.json are told before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from trainer.assemble import Parts, parallel_mode, planned_device
from trainer.commands.prepare import Prepared
from trainer.config import RunConfig
from trainer.plan.cut import Cut, Plan
from trainer.plan.cuts import Auto
from trainer.report.records import Candidate, MicroBatchShape, PlanSummary
from trainer.tune.layout import unused_boundaries

MANY_MICRO_BATCHES = 16
"""Beyond it, sums of bf16 gradients lose about 1 % (64 of them, measured)."""


def summarize(prepared: Prepared) -> PlanSummary:
    """Work the whole arithmetic of a run out."""
    parts, plan = prepared.parts, prepared.plans[0]
    config, order = parts.config, parts.source.order
    lengths, tuning = parts.source.lengths, prepared.tuning
    return PlanSummary(
        global_batch=parts.global_size,
        unit=config.batch.unit,
        world_size=parts.world.size,
        accum_steps=plan.accum_steps,
        micro_batches=plan.num_micro_batches,
        max_tokens=_hard_cap(prepared.cut),
        padding=plan.padding,
        predicted_peak_bytes=prepared.predicted and prepared.predicted.peak_bytes,
        memory_limit_bytes=prepared.limit_bytes,
        sync=parts.spread.sync.name,
        parallel=parts.spread.mode,
        steps=parts.total_steps,
        steps_per_epoch=order.steps_per_epoch,
        normalizer=config.batch.normalizer,
        tail=config.batch.tail,
        tail_size=_tail_size(parts),
        epochs=parts.total_steps / order.steps_per_epoch,
        model=config.model.name or config.model.target,
        num_parameters=sum(p.numel() for p in parts.module.parameters() if p.requires_grad),
        data=config.data.name or config.data.target,
        num_samples=len(lengths),
        num_held_out=0 if parts.held_out is None else len(parts.held_out.lengths),
        num_tokens=int(lengths.sum()),
        optimizer=config.optimizer.name or config.optimizer.target,
        lr=parts.spec.lr,
        scheduler=config.scheduler.name or config.scheduler.target,
        warmup_steps=int(getattr(parts.schedule, "warmup", 0) or 0),
        device=_device(prepared),
        precision=config.precision,
        shapes=_shapes(plan),
        epoch_means=_means(prepared.plans),
        memory_parts=_memory_parts(prepared),
        memory_note=None if prepared.is_here else "an estimate for a machine that is not here",
        candidates=_candidates(prepared),
        cap_source=prepared.how,
        step_seconds=_step_seconds(prepared),
        time_note=None if tuning is None or _step_seconds(prepared) else "time is unknown here",
        cadences={
            "log": config.log.every,
            "evaluate": config.eval.every,
            "checkpoint": config.checkpoint.every,
        },
        warnings=tuple(warnings(prepared)),
    )


def warnings(prepared: Prepared) -> Iterable[str]:
    """Say what a user should know before training.

    Yields:
        One line each.
    """
    parts, config = prepared.parts, prepared.parts.config
    if config.batch.normalizer == "micro_batches":
        yield _mean_of_means(prepared.plans)
    warmup = int(getattr(parts.schedule, "warmup", 0) or 0)
    if warmup * 2 > parts.total_steps:
        yield f"scheduler.warmup={warmup} is more than half of the {parts.total_steps} steps"
    yield from _cadence_warnings(config, parts.total_steps)
    dropouts = [n for n, m in parts.module.named_modules() if _drops(m)]
    if dropouts:
        yield (
            f"{dropouts[0]} draws per micro-batch: splits agree in distribution, not bit for bit"
        )
    unused = unused_boundaries(parts.module, parts.example)
    if unused is not None:
        yield (
            f"the data bring {unused}, which forward of {type(parts.module).__name__} does not "
            "take: documents of one row see each other"
        )
    if config.optimizer.params.get("fused"):
        yield "optimizer.fused=true keeps no temporaries: memory is predicted as a CPU sees it"
    low = {str(p.dtype) for p in parts.module.parameters() if p.dtype.itemsize < 4}  # noqa: PLR2004
    if low and prepared.plans[0].accum_steps > MANY_MICRO_BATCHES:
        yield (
            f"gradients in {', '.join(sorted(low))} are summed over "
            f"{prepared.plans[0].accum_steps} micro-batches and lose about 1 %: keep fp32 weights"
        )
    if prepared.predicted and prepared.predicted.peak_bytes > prepared.limit_bytes:
        yield "the predicted peak exceeds the memory: use accum=auto, or a smaller accum.micro"


def _cadence_warnings(config: RunConfig, steps: int) -> Iterable[str]:
    for name, every in (("eval.every", config.eval.every),):
        if every is not None and every > steps:
            yield f"{name}={every} is beyond the last step, {steps}: once, at the end"


def _mean_of_means(plans: tuple[Plan, ...]) -> str:
    """Measure how far a mean of means is off on the user's own data.

    With N micro-batches of D_i tokens a token of micro-batch i weighs `D / (N D_i)` times what it
    should; the mean over tokens of the absolute difference to 1 is what is misplaced.
    """
    errors, low, high = [], 1.0, 1.0
    for plan in plans:
        held = [float(plan.lengths[plan.ranks[r][s]].sum()) for r, s in plan.slots()]
        held = [tokens for tokens in held if tokens]
        total = sum(held)
        factors = [total / (len(held) * tokens) for tokens in held]
        errors.append(sum(t * abs(f - 1) for t, f in zip(held, factors, strict=True)) / total)
        low, high = min(low, *factors), max(high, *factors)
    return (
        "batch.normalizer=micro_batches is a mean of means: on these data a token weighs "
        f"{low:.2f} to {high:.2f} times what it should, {fmean(errors):.1%} off on average, and "
        "the step changes with the cut; batch.normalizer=tokens is exact"
    )


def _hard_cap(cut: Cut) -> int | None:
    """Give the most padded tokens of any micro-batch, one longer sample's alone included."""
    return cut.hard_cap if isinstance(cut, Auto) else getattr(cut, "max_tokens", None)


def _device(prepared: Prepared) -> str:
    parts = prepared.parts
    planned = planned_device(parts.config, parts.world)
    is_away = planned.type != parts.world.device.type
    return f"{planned.type}, not here" if is_away else str(parts.world.device)


def _drops(module: nn.Module) -> bool:
    return isinstance(module, _DropoutNd) and module.p > 0


def _tail_size(parts: Parts) -> int:
    if parts.config.batch.unit == "tokens":
        return 0
    return len(parts.source.lengths) % parts.global_size


def _shapes(plan: Plan) -> tuple[MicroBatchShape, ...]:
    return tuple(
        MicroBatchShape(
            rank=rank,
            num_samples=len(plan.ranks[rank][slot]),
            length=plan.padded_lengths[rank][slot],
        )
        for rank, slot in plan.slots()
    )


def _means(plans: tuple[Plan, ...]) -> dict[str, float]:
    return {
        "micro_batches": fmean(plan.num_micro_batches for plan in plans),
        "accum_steps": fmean(plan.accum_steps for plan in plans),
        "padding": fmean(plan.padding for plan in plans),
        "tokens": fmean(int(plan.lengths.sum()) for plan in plans),
        "steps": float(len(plans)),
    }


def _memory_parts(prepared: Prepared) -> dict[str, int]:
    estimate = prepared.predicted
    if estimate is None:
        return {}
    return {
        "parameters": estimate.parameters,
        "gradients": estimate.gradients,
        "optimizer state": estimate.optimizer_state,
        "activations": estimate.activations,
        "buffers": estimate.buffers,
    }


def _candidates(prepared: Prepared) -> tuple[Candidate, ...]:
    if prepared.tuning is None:
        return ()
    return tuple(
        Candidate(
            max_tokens=row.max_tokens,
            micro_batches=round(row.micro_batches),
            padding=row.padding,
            predicted_bytes=row.predicted_bytes,
            predicted_seconds=row.seconds_per_step,
            fits=row.predicted_bytes <= prepared.limit_bytes,
            is_chosen=row.chosen,
        )
        for row in prepared.tuning.candidates
    )


def _step_seconds(prepared: Prepared) -> float | None:
    rows = () if prepared.tuning is None else prepared.tuning.candidates
    return next((row.seconds_per_step for row in rows if row.chosen), None)
