"""Warn before training: one line for each thing that may surprise a user."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from trainer.build.prepare import Prepared
from trainer.config.durations import warmup_steps
from trainer.models.statistics import batch_statistics
from trainer.plan.cut import Plan
from trainer.tune.layout import unused_boundaries

MANY_MICRO_BATCHES = 16
"""Beyond it, sums of bf16 gradients lose about 1 % (64 of them, measured)."""

WHOLE_BYTES = 4
"""Of a gradient that many micro-batches can be summed into."""

MOST = 0.5
"""Share of the tokens beyond `data.max_length` that a few samples may leave out unmentioned."""

NEARLY_ALL = 0.9
"""Share that any number of samples may leave out unmentioned."""


def advice(prepared: Prepared) -> Iterator[str]:
    """Say what a user should know before training.

    Yields:
        One line each.
    """
    yield from prepared.seen
    for of in (
        _normalizer,
        _clock,
        _sizes,
        _documents,
        _draws,
        _statistics,
        _boundaries,
        _precision,
        _memory,
    ):
        yield from of(prepared)


def _normalizer(prepared: Prepared) -> Iterator[str]:
    if prepared.parts.config.batch.normalizer == "micro_batches":
        yield _mean_of_means(prepared.plans)


def _clock(prepared: Prepared) -> Iterator[str]:
    parts = prepared.parts
    steps, every = parts.total_steps, parts.config.eval.every
    warmup = getattr(parts.schedule, "warmup", 0) or 0
    if warmup_steps(warmup, steps) * 2 > steps:
        yield f"scheduler.warmup={warmup} is more than half of the {steps} steps"
    if every is not None and every > steps and "eval.every" not in parts.config.unset:
        yield f"eval.every={every} is beyond the last step, {steps}: once, at the end"


def _sizes(prepared: Prepared) -> Iterator[str]:
    parts = prepared.parts
    lengths, unit = parts.source.lengths, parts.config.batch.unit
    there = int(lengths.sum()) if unit == "tokens" else len(lengths)
    if parts.global_batch > there:
        of = f"{there} {unit}" if there > 1 else f"one {unit.removesuffix('s')}"
        yield (
            f"batch.global={parts.global_batch} is more than the {of} of an epoch: a step is the "
            f"whole epoch; batch.global={there} says so"
        )


def _documents(prepared: Prepared) -> Iterator[str]:
    """Name what a data set leaves out that a user may think is in it.

    Yields:
        A line for what is left out, and one where nothing is held out.
    """
    parts = prepared.parts
    lengths, cut = parts.source.lengths, int(parts.train_set.optional("num_cut") or 0)
    given = parts.config.data.params
    share = cut / (cut + float(lengths.sum()))
    if share > (MOST if len(lengths) < parts.global_batch else NEARLY_ALL):
        yield (
            f"data.overlong={given.get('overlong')} leaves out {share:.1%} of the tokens, beyond "
            f"data.max_length={given.get('max_length')}: type data.overlong=chunk, or a larger "
            "data.max_length"
        )
    asked = given.get("holdout")
    if parts.held_out is None and asked:
        samples = "one sample" if len(lengths) == 1 else f"{len(lengths)} samples"
        hint = "; a blank line ends a document" if parts.config.data.name == "text" else ""
        yield (
            f"nothing is held out: data.holdout={asked} of {samples} is no whole document, so "
            f"nothing is evaluated; more, or smaller, documents can be divided{hint}"
        )


def _draws(prepared: Prepared) -> Iterator[str]:
    named = prepared.parts.module.named_modules()
    dropout = next((n for n, m in named if isinstance(m, _DropoutNd) and m.p > 0), None)
    if dropout is not None:
        yield f"{dropout} draws per micro-batch: splits agree in distribution, not bit for bit"


def _statistics(prepared: Prepared) -> Iterator[str]:
    """Say whose statistics BatchNorm normalises with.

    Yields:
        One line.
    """
    parts = prepared.parts
    norm = batch_statistics(parts.module)
    if norm is None:
        return
    sizes = {len(plan.ranks[r][s]) for plan in prepared.plans for r, s in plan.slots()}
    whose = f"each micro-batch ({_span(sizes)} samples)"
    if parts.world.size > 1:
        whose += " of each rank, whose running statistics are its own"
    meant = "; to say that you mean it, type batchnorm=micro"
    yield (
        f"{norm} is BatchNorm, normalised over {whose}, so the step changes with these"
        f"{meant * (parts.config.batchnorm != 'micro')}"
    )


def _boundaries(prepared: Prepared) -> Iterator[str]:
    """Say what lets one document of a row see another.

    Yields:
        A line for boundaries that nobody reads, and one for a layer that cannot know them.
    """
    parts, module = prepared.parts, prepared.parts.module
    unused = unused_boundaries(module, parts.example)
    if unused is not None:
        yield (
            f"the data bring {unused}, which forward of {type(module).__name__} does not take: "
            "documents of one row see each other; bring one document per sample, or take it"
        )
    if parts.layout.packed:
        reader = next((n for n, m in module.named_modules() if _reads_along_the_row(m)), None)
        if reader is not None:
            kind = type(module.get_submodule(reader)).__name__
            yield (
                f"{reader} is {kind}, which reads across the documents of a packed row: use "
                "accum.packed=false"
            )


def _reads_along_the_row(module: nn.Module) -> bool:
    """Whether a layer mixes neighbouring positions, and cannot know where a document ends."""
    if isinstance(module, _ConvNd):
        return any(size > 1 for size in module.kernel_size)
    return isinstance(module, nn.RNNBase)


def _precision(prepared: Prepared) -> Iterator[str]:
    parameters = prepared.parts.module.parameters()
    low = {str(p.dtype) for p in parameters if p.requires_grad and p.dtype.itemsize < WHOLE_BYTES}
    count = max(plan.accum_steps for plan in prepared.plans)
    if low and count > MANY_MICRO_BATCHES:
        yield (
            f"gradients in {', '.join(sorted(low))} are summed over {count} micro-batches and lose "
            "about 1 %: build the model with fp32 weights and type precision=bf16"
        )


def _memory(prepared: Prepared) -> Iterator[str]:
    peak, limit = prepared.predicted, prepared.limit_bytes
    if peak is not None and limit is not None and peak.peak_bytes > limit:
        yield (
            "the predicted peak exceeds the memory: use accum=auto, or a smaller accum.micro or "
            "accum.max_tokens"
        )


def _mean_of_means(plans: tuple[Plan, ...]) -> str:
    """Measure how far a mean of means is off on the user's own data.

    With N micro-batches of D_i tokens a token of micro-batch i weighs `D / (N D_i)` times what it
    should; the mean over tokens of the absolute difference to 1 is what is misplaced.
    """
    errors, low, high = [], 1.0, 1.0
    for plan in plans:
        counts = [float(plan.lengths[plan.ranks[r][s]].sum()) for r, s in plan.slots()]
        counts = [tokens for tokens in counts if tokens]
        total = sum(counts)
        factors = [total / (len(counts) * tokens) for tokens in counts]
        errors.append(sum(t * abs(f - 1) for t, f in zip(counts, factors, strict=True)) / total)
        low, high = min(low, *factors), max(high, *factors)
    return (
        "batch.normalizer=micro_batches is a mean of means: on these data a token weighs "
        f"{low:.2f} to {high:.2f} times what it should, {fmean(errors):.1%} off on average, and "
        "the step changes with the cut; batch.normalizer=tokens is exact"
    )


def _span(values: set[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
