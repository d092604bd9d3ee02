"""Describe the model of a run and its tokenizer in rows."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from trainer.assemble.run import Run
from trainer.assemble.run_plan import RunPlan
from trainer.checkpoint.partial_weights import taken_rows
from trainer.config.components import NO_ADAPTER
from trainer.config.messages import show
from trainer.core.format import number, plural, short
from trainer.core.rows import Row, join_parts, row
from trainer.core.tensors import dtype_word, gradient_dtype
from trainer.models.facts import ModelFacts, facts_of
from trainer.models.first_weights import is_on_meta
from trainer.models.frozen import frozen_of
from trainer.verify.diagnose import low_precision

_LARGE = 10_000_000  # parameters that are written in short from here on
_LONG = 32  # characters of a path beyond which a line has no room for it
_SHOWN = 2  # names of weights, which tell what the others are


def model_rows(run_plan: RunPlan) -> list[Row]:
    """Count parameters, and say where their first values come from, and in which dtypes."""
    run = run_plan.run
    config, dtypes = run.config, dtypes_of(run)
    facts = facts_of(run.model.module, config.model.params)
    whole = trained = 0
    for parameter in run.model.module.parameters():
        whole += parameter.numel()
        if parameter.requires_grad:
            trained += parameter.numel()
    beside, others = 0, None
    if (compared := frozen_of(run.model.module)) is not None:
        beside = sum(parameter.numel() for parameter in compared.parameters())
        whole -= beside
        others = f"{_magnitude(beside)} more, frozen, that the loss compares it with"
    init, frozen = _init(run, facts), whole - trained
    stored = dtypes["disk"] and f"{dtypes['disk']} on disk"
    begins = join_parts(init, stored, f"{dtypes['memory']} in memory")
    name, text = config.model.name or config.model.target, _in_short(run, facts, whole, trained)
    adapter, settings = None, None
    if config.adapter.target != NO_ADAPTER:
        settings = config.adapter.params
        typed = [f"{key}={show(value)}" for key, value in settings.items() if value]
        adapter = join_parts(config.adapter.name or config.adapter.target, *typed)
    return [
        row("model", text, group="asked", model=name, num_parameters=trained, num_frozen=frozen),
        row("adapter", adapter, adapter=settings),
        row("weights", begins, init=init, dtypes=dtypes),
        *taken_rows(run.model.module),
        row("beside it", others, num_beside=beside),
        _gradients(run),
    ]


def _in_short(run: Run, facts: ModelFacts, whole: int, trained: int) -> str | None:
    """Name a model, by its source where it has one, with its parameters and those trained."""
    config, some, begins = run.config, "", "new weights"
    name = config.model.name or config.model.target
    if facts.source is not None:
        name = _brief(facts.source)
    count = f"{_magnitude(whole)} parameters"
    if trained < whole:
        some = f"{_magnitude(trained)} trained"
        if config.adapter.target != NO_ADAPTER:
            some += f" ({config.adapter.name or config.adapter.target})"
    if config.init is not None:
        begins = f"weights of {_brief(config.init)}"
    elif facts.source is not None:
        # An adapter says by itself that what it adapts is loaded.
        begins = "pretrained" * (not some)
        if facts.new:
            begins = f"pretrained but for {plural(len(facts.new), 'tensor')}"
    return join_parts(name, count, some, begins)


def _brief(source: str) -> str:
    """Write where weights are from, the last part of a long path alone."""
    if len(source) > _LONG:
        source = Path(source).name
    return show(source)


def _magnitude(count: int) -> str:
    """Write a count in full while it can be read at a glance: `271,200`, `1.24B`."""
    return number(count) if count < _LARGE else short(count)


def _gradients(run: Run) -> Row:
    """Say in which dtype gradients are added up, and which weights the optimizer steps."""
    gradients, low = set[str](), set[str]()
    for parameter in run.model.module.parameters():
        if parameter.requires_grad:
            dtype = gradient_dtype(parameter)
            gradients.add(dtype_word(dtype))
            # Gradients of another dtype than the weight's are those of its master copy.
            if dtype != parameter.dtype:
                low.add(dtype_word(parameter.dtype))
    names = ", ".join(sorted(gradients))
    text = f"added up{' and reduced' * (run.world.size > 1)} in {names}"
    words = " and ".join(sorted(low))
    copies = f"the optimizer steps fp32 master copies of the {words} weights, rounded"
    shown = join_parts(text, low and f"{copies} back to the nearest")
    # What everybody expects is not shown.
    if run.config.accum.buffer != "fp32" and gradients == {"fp32"}:
        shown = None
    return row("gradients", shown, gradient_dtypes=names, has_master_weights=bool(low))


def tokenizer_rows(run: Run) -> list[Row]:
    """Name the tokenizer, where a part takes one, and count its ids."""
    if (tokenizer := run.tokenizer) is None:
        return []
    name = getattr(tokenizer, "name_or_path", None) or type(tokenizer).__name__
    new = len(getattr(tokenizer, "new_token_ids", ()))
    text = join_parts(name, plural(len(tokenizer), "id"), new and f"{new} of them added")
    return [row("tokenizer", text, tokenizer=name, num_ids=len(tokenizer))]


def _init(run: Run, facts: ModelFacts) -> str:
    """Say where the first weights come from."""
    config, module = run.config, run.model.module
    if config.init is not None:
        text = f"weights of {show(config.init)}"
        if config.step != "last":
            text += f", step {config.step}"
        return text
    source = f"as the model is built, seed {config.seed}"
    if facts.source:
        source = f"weights of {show(facts.source)}"
    is_whole = run.model.weights is None and not is_on_meta(module)
    how = run.is_sharded and is_whole and "built whole on every rank"
    return join_parts(source, *_differences(facts), how) or ""


def _differences(facts: ModelFacts) -> list[str]:
    """Say which weights of a model are new, and which of its source were not used."""
    texts = []
    for what, names in (("new", facts.new), ("unused", facts.unused)):
        if names:
            first = [*names[:_SHOWN], *["..."] * (len(names) > _SHOWN)]
            texts.append(f"{len(names)} {what} ({', '.join(first)})")
    return texts


def dtypes_of(run: Run) -> dict[str, str | None]:
    """Name the dtypes of weights in their files and in memory, and of matrix products."""
    params = run.config.model.params
    words = set[str]()
    for parameter in run.model.module.parameters():
        # Weights that are quantised to integers are computed with in another dtype.
        if parameter.is_floating_point():
            words.add(dtype_word(parameter.dtype))
    memory = ", ".join(sorted(words))
    compute = run.model.precision
    # Without autocast products are computed in what the weights are in.
    if memory not in {"", "fp32"} and compute in {"fp32", "tf32"}:
        compute = memory
    return {
        "disk": ", ".join(facts_of(run.model.module, params).stored_dtypes()) or None,
        "memory": memory,
        "compute": compute,
    }


def model_warnings(run_plan: RunPlan, pieces: int) -> list[str]:
    """Name what of the model makes the step another; `pieces` are the micro-batches of one."""
    run = run_plan.run
    warnings = [*chain.from_iterable(each.warnings(run_plan) for each in run.features)]
    low = low_precision(run.model.module)
    if low is not None and pieces > 1:
        warnings.append(
            f"model: {low} weights: their gradients lose bits as {pieces} micro-batches are added "
            "up, some percent over hundreds, and small updates are lost; type accum.buffer=fp32, "
            "which steps fp32 copies, or keep weights in fp32 (model.dtype=float32, where the "
            "class takes it)"
        )
    return warnings
