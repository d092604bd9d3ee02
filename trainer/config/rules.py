"""What must hold between keys: one line per fault."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from trainer.config.batch import resolve_fixed
from trainer.config.mesh import copies_of
from trainer.config.messages import clip, line, lookup
from trainer.config.sections import DEFAULT_GLOBAL
from trainer.core.errors import ConfigError
from trainer.core.launcher import node_of, rendezvous_of

FIXED_CUT = "trainer.plan.cuts.Fixed"
AUTO_CUT = "trainer.plan.cuts.Auto"
PLANNED = ("auto", "budget")
"""Cuts that choose which samples share a micro-batch."""

NO_GPU = (
    "device=cuda: no GPU is usable here; use device=cpu or device=auto, or plan for one that is "
    "not here: train plan device=cuda accum.memory=80GiB"
)

Tree = Mapping[str, Any]


def between(tree: Tree, choices: Mapping[str, Any], typed: frozenset[str]) -> Iterator[str]:
    """Name every contradiction between keys.

    Yields:
        One line per fault.
    """
    yield from _clock(tree)
    yield from _cut(tree, choices)
    yield from _ranks(tree, choices)
    yield from _device(tree)
    yield from _sizes(tree, typed)
    yield from _command(tree)
    yield from _step(tree)
    yield from _paths(tree)


def _clock(tree: Tree) -> Iterator[str]:
    steps, epochs = tree.get("steps"), tree.get("epochs")
    if steps is not None and epochs is not None:
        yield line("steps", steps, f"epochs={epochs} is set too; at most one, say epochs=null")
    warmup, length = lookup(tree, "scheduler.warmup"), steps_of(tree)
    if length is not None and _is_count(warmup) and warmup > length:
        text = f"is more than steps={steps}; the largest valid value is {length}"
        yield line("scheduler.warmup", warmup, text)


def steps_of(tree: Tree) -> int | None:
    """Tell how many steps the run has, where that is known before the data are."""
    steps: Any = tree.get("steps")
    return int(steps) if _is_count(steps) else None


def _cut(tree: Tree, choices: Mapping[str, Any]) -> Iterator[str]:
    name = choices.get("accum")
    if name == "budget" and lookup(tree, "accum.max_tokens") is None:
        yield (
            "accum.max_tokens: accum=budget needs the padded tokens of the largest micro-batch, "
            "e.g. accum.max_tokens=8192"
        )
    if name in PLANNED and lookup(tree, "batch.normalizer") == "micro_batches":
        yield (
            f"batch.normalizer=micro_batches: accum={name} sorts by length, and a mean of means "
            "would depend on it; say accum=fixed accum.micro=8"
        )
    if name in PLANNED and tree.get("batchnorm") == "micro":
        yield "batchnorm=micro: depends on how the batch is cut; say accum=fixed accum.micro=8"
    is_auto = tree.get("activation_checkpointing") == "auto"
    if is_auto and lookup(tree, "accum._target_") != AUTO_CUT:
        yield (
            "activation_checkpointing=auto: weighed against smaller micro-batches, which only "
            "accum=auto chooses; say accum=auto, or activation_checkpointing=true"
        )


def _ranks(tree: Tree, choices: Mapping[str, Any]) -> Iterator[str]:
    mode, ranks = lookup(tree, "parallel.mode"), lookup(tree, "parallel.ranks")
    if mode == "none" and _is_count(ranks) and ranks > 1:
        yield line("parallel.ranks", ranks, "parallel=none is one rank; use parallel=ddp")
    yield from _nodes(tree)
    yield from _copies(tree)
    for key in ("parallel.shard", "parallel.replicate"):
        if mode != "hsdp" and lookup(tree, key) not in ("auto", None):
            yield line(key, lookup(tree, key), "counts only with parallel=hsdp")
    is_fixed = lookup(tree, "accum._target_") == FIXED_CUT
    if tree.get("deterministic") == "layout":
        if not is_fixed or lookup(tree, "accum.micro") is None:
            text = "needs fixed micro-batches; say accum=fixed accum.micro=8"
            yield line("deterministic", "layout", text)
        if mode in ("fsdp", "hsdp"):
            text = f"sums whole gradients; use parallel=ddp, not {mode}"
            yield line("deterministic", "layout", text)
    if choices.get("sync") == "hierarchical" and mode != "hsdp" and (_known_ranks(tree) or 1) > 1:
        yield line("sync", "hierarchical", "needs copies of the model; use parallel=hsdp")


def _copies(tree: Tree) -> Iterator[str]:
    """Check that the copies of `parallel=hsdp`, in their shards, are the ranks there are.

    Yields:
        One line.
    """
    world_size, nodes = _known_ranks(tree), lookup(tree, "parallel.nodes")
    if lookup(tree, "parallel.mode") != "hsdp" or world_size in (1, None) or not _is_count(nodes):
        return
    shard, replicate = lookup(tree, "parallel.shard"), lookup(tree, "parallel.replicate")
    if all(size == "auto" or _is_count(size) for size in (shard, replicate)):
        try:
            copies_of(world_size, max(1, world_size // nodes), shard, replicate)
        except ConfigError as error:
            yield from map(clip, error.faults)


def _device(tree: Tree) -> Iterator[str]:
    """Refuse to compute on a GPU where there is none; a plan computes nothing.

    Yields:
        One line.
    """
    is_plan = tree.get("command") == "plan"
    needs_size = "memory" in (tree.get("accum") or {}) and not lookup(tree, "accum.memory")
    if tree.get("device") == "cuda" and (needs_size or not is_plan) and not _may_have_gpu():
        yield NO_GPU


def _sizes(tree: Tree, typed: frozenset[str]) -> Iterator[str]:
    """Check the sizes of `accum=fixed`, where any two give the third.

    Yields:
        One line per fault.
    """
    if lookup(tree, "accum._target_") != FIXED_CUT:
        if lookup(tree, "batch.global") is None:
            yield line("batch.global", None, "needs a whole number of at least 1, e.g. 512")
        return
    size, micro, steps = sizes_that_count(tree, typed)
    if micro is None and steps is None:
        yield (
            "accum.micro: accum=fixed needs accum.micro (samples per micro-batch) or accum.steps "
            "(micro-batches per rank), e.g. accum.micro=8"
        )
    elif lookup(tree, "batch.unit") == "tokens":
        if size is None or (micro is not None and steps is not None):
            yield line("accum.steps", steps, "with batch.unit=tokens, set this or accum.micro")
    elif all(part is None or _is_count(part) for part in (size, micro, steps)):
        yield from _contradictions(tree, size, micro, steps)


def sizes_that_count(tree: Tree, typed: frozenset[str]) -> tuple[Any, Any, Any]:
    """Let a size that nobody asked for give way to two that were.

    Of `batch.global`, `accum.micro` and `accum.steps` any two give the third. With all three set
    the one that was not typed gives way: a default `batch.global` first, then `accum.steps`.

    Args:
        tree: the composed config.
        typed: dotted keys of the command line.

    Returns:
        Global batch, micro-batch and steps; None for the one that the others give.
    """
    keys = ("batch.global", "accum.micro", "accum.steps")
    size, micro, steps = (lookup(tree, key) for key in keys)
    if None in (size, micro, steps) or typed.issuperset(keys):
        return size, micro, steps
    has_size, has_micro, has_steps = (key in typed for key in keys)
    if not has_size and (size == DEFAULT_GLOBAL or (has_micro and has_steps)):
        return None, micro, steps
    if has_steps and not has_micro:
        return size, None, steps
    return (size, micro, None) if has_size or has_micro else (size, micro, steps)


def _contradictions(tree: Tree, size: Any, micro: Any, steps: Any) -> Iterator[str]:  # noqa: ANN401
    num_ranks = _known_ranks(tree)
    if num_ranks is None:
        return
    try:
        resolve_fixed(size, micro, steps, num_ranks)
    except ConfigError as error:
        yield from map(clip, error.faults)


def _nodes(tree: Tree) -> Iterator[str]:
    """Check that this machine knows its place among several, and where they meet.

    Yields:
        One line per fault.
    """
    nodes, node = lookup(tree, "parallel.nodes"), lookup(tree, "parallel.node")
    address = lookup(tree, "parallel.rendezvous")
    if not _is_count(nodes):
        return
    if nodes == 1:
        for key, value, unset in (("node", node, "auto"), ("rendezvous", address, None)):
            if value != unset:
                yield line(f"parallel.{key}", value, "counts only with parallel.nodes of 2 or more")
        return
    if lookup(tree, "parallel.mode") == "none":
        yield line("parallel.nodes", nodes, "parallel=none is one rank; use parallel=ddp")
    try:
        node_of(node, nodes)
        rendezvous_of(address)
    except ConfigError as error:
        yield from map(clip, error.faults)


def _known_ranks(tree: Tree) -> int | None:
    """Tell how many ranks there will be, where that is known before torch is imported."""
    ranks = lookup(tree, "parallel.ranks")
    if os.environ.get("WORLD_SIZE", "").isdecimal():
        return int(os.environ["WORLD_SIZE"])
    if _is_count(ranks):
        return int(ranks) * int(lookup(tree, "parallel.nodes") or 1)
    no_gpu = tree.get("device") == "cpu" or not _may_have_gpu()
    one = lookup(tree, "parallel.nodes") in (1, None)
    return 1 if (one and no_gpu) or lookup(tree, "parallel.mode") == "none" else None


def _may_have_gpu() -> bool:
    """Whether the system shows a device that torch might use."""
    names = ("nvidia", "kfd", "dxg")
    return any(device.name.startswith(names) for device in Path("/dev").glob("*"))


def _command(tree: Tree) -> Iterator[str]:
    command, run = tree.get("command"), tree.get("run")
    if command in ("evaluate", "export"):
        if run is None:
            yield f"run: train {command} needs a run folder: run=outputs/... or run=auto"
    elif run is not None:
        yield line("run", run, "read by evaluate, export and verify; to go on with a run: resume=")
    target = lookup(tree, "export.to")
    if command == "export" and target is None:
        yield "export.to: train export needs a folder to write into: export.to=DIR"
    elif command != "export" and target is not None:
        yield line("export.to", target, "written by train export run=RUN alone; leave it out")
    if tree.get("init") is not None and tree.get("resume") is not None:
        yield line("init", tree["init"], "starts a new run; resume= goes on with an old one")


def _step(tree: Tree) -> Iterator[str]:
    step, resume = tree.get("step"), tree.get("resume")
    if step in (None, "last") or tree.get("init") is not None or tree.get("run") is not None:
        return
    if resume is None:
        text = "picks a checkpoint: name its run, with run= or init= (the length is steps=)"
        yield line("step", step, text)
    elif tree.get("command") != "verify":  # its run= is another name of resume=
        text = "resume= goes on from the newest checkpoint; a new run from this one: init=RUN"
        yield line("step", step, text)


def _paths(tree: Tree) -> Iterator[str]:
    for key in ("outputs", "name"):
        value = tree.get(key)
        if isinstance(value, str) and (".." in PurePath(value).parts or "\0" in value):
            yield line(key, value, "must not lead upwards with ..")
    if str(tree.get("outputs")).startswith("~"):
        yield line("outputs", tree["outputs"], "~ is no folder here; type outputs=$HOME/...")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
