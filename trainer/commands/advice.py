"""What a user should know before training: one line for each thing that may surprise them."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from trainer.commands.prepare import Prepared
from trainer.plan.cut import Plan
from trainer.tune.layout import unused_boundaries

MANY_MICRO_BATCHES = 16
"""Beyond it, sums of bf16 gradients lose about 1 % (64 of them, measured)."""

WHOLE_BYTES = 4
"""Of a gradient that many micro-batches can be summed into."""


def advice(prepared: Prepared) -> Iterator[str]:
    """Say what a user should know before training.

    Yields:
        One line each.
    """
    for of in (_normalizer, _clock, _sizes, _modules, _boundaries, _precision, _memory):
        yield from of(prepared)


def _normalizer(prepared: Prepared) -> Iterator[str]:
    if prepared.parts.config.batch.normalizer == "micro_batches":
        yield _mean_of_means(prepared.plans)


def _clock(prepared: Prepared) -> Iterator[str]:
    parts = prepared.parts
    steps, every = parts.total_steps, parts.config.eval.every
    warmup = int(getattr(parts.schedule, "warmup", 0) or 0)
    if warmup * 2 > steps:
        yield f"scheduler.warmup={warmup} is more than half of the {steps} steps"
    if every is not None and every > steps:
        yield f"eval.every={every} is beyond the last step, {steps}: once, at the end"


def _sizes(prepared: Prepared) -> Iterator[str]:
    parts = prepared.parts
    held = parts.source.lengths
    there = int(held.sum()) if parts.config.batch.unit == "tokens" else len(held)
    if parts.global_size > there:
        yield (
            f"batch.global={parts.global_size} is more than the {there} "
            f"{parts.config.batch.unit} of an epoch: a step is the whole epoch"
        )


def _modules(prepared: Prepared) -> Iterator[str]:
    """Name what draws, or normalises, per micro-batch.

    Yields:
        One line for each of the two.
    """
    named = [*prepared.parts.module.named_modules()]
    dropout = next((n for n, m in named if isinstance(m, _DropoutNd) and m.p > 0), None)
    if dropout is not None:
        yield f"{dropout} draws per micro-batch: splits agree in distribution, not bit for bit"
    norm = next((name for name, module in named if isinstance(module, _BatchNorm)), None)
    if norm is not None and prepared.parts.layout.group_size == 1:
        yield (
            f"{norm} is BatchNorm, which normalises within each micro-batch: the step changes with "
            "accum.micro, accum.steps and the number of ranks"
        )


def _boundaries(prepared: Prepared) -> Iterator[str]:
    module = prepared.parts.module
    unused = unused_boundaries(module, prepared.parts.example)
    if unused is not None:
        yield (
            f"the data bring {unused}, which forward of {type(module).__name__} does not take: "
            "documents of one row see each other"
        )


def _precision(prepared: Prepared) -> Iterator[str]:
    parameters = prepared.parts.module.parameters()
    low = {str(p.dtype) for p in parameters if p.dtype.itemsize < WHOLE_BYTES}
    count = prepared.plans[0].accum_steps
    if low and count > MANY_MICRO_BATCHES:
        yield (
            f"gradients in {', '.join(sorted(low))} are summed over {count} micro-batches and lose "
            "about 1 %: keep fp32 weights"
        )


def _memory(prepared: Prepared) -> Iterator[str]:
    if prepared.parts.config.optimizer.params.get("fused"):
        yield "optimizer.fused=true keeps no temporaries: memory is predicted as a CPU sees it"
    if prepared.predicted and prepared.predicted.peak_bytes > prepared.limit_bytes:
        yield "the predicted peak exceeds the memory: use accum=auto, or a smaller accum.micro"


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
