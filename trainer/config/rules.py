"""Check what must hold between keys: one line per fault."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from trainer.config.components import AUTO_CUT, FIXED_CUT
from trainer.config.messages import clip, line, lookup
from trainer.config.sizes import complete_sizes, num_replicas
from trainer.core.errors import ConfigError

DEFAULT_GLOBAL = 512
"""`batch.global` of `conf/batch/samples.yaml`, which gives way to two other sizes."""

PLANNED = ("auto", "budget")
"""Cuts that choose which samples share a micro-batch."""

NO_GPU = (
    "device=cuda: no GPU is usable here; use device=cpu or device=auto, or plan for one that is "
    "not here: train plan device=cuda accum.memory=80GiB"
)

_SIZES = ("batch.global", "accum.micro", "accum.steps")

Tree = Mapping[str, Any]


def rule_faults(tree: Tree, choices: Mapping[str, Any]) -> Iterator[str]:
    """Name every contradiction between keys.

    Yields:
        One line per fault.
    """
    yield from _clock(tree)
    yield from _cut(tree, choices)
    yield from _ranks(tree, choices)
    yield from _device(tree)
    yield from _sizes(tree)
    yield from _command(tree)
    yield from _paths(tree)


def _clock(tree: Tree) -> Iterator[str]:
    steps, epochs = tree.get("steps"), tree.get("epochs")
    if steps is not None and epochs is not None:
        yield line("steps", steps, f"epochs={epochs} is set too; at most one, type epochs=null")
    warmup = lookup(tree, "scheduler.warmup")
    if _is_count(steps) and _is_count(warmup) and warmup > steps:
        text = f"is more than steps={steps}; the largest valid value is {steps}"
        yield line("scheduler.warmup", warmup, text)


def _cut(tree: Tree, choices: Mapping[str, Any]) -> Iterator[str]:
    name = choices.get("accum")
    fixed = "type accum=fixed accum.micro=8"
    if name == "budget" and lookup(tree, "accum.max_tokens") is None:
        yield (
            "accum.max_tokens: accum=budget needs the padded tokens of the largest micro-batch, "
            "e.g. accum.max_tokens=8192"
        )
    if name in PLANNED and lookup(tree, "batch.normalizer") == "micro_batches":
        yield (
            f"batch.normalizer=micro_batches: accum={name} sorts by length, and a mean of means "
            f"would depend on it; {fixed}"
        )
    if name in PLANNED and tree.get("batchnorm") == "micro":
        yield f"batchnorm=micro: depends on how the batch is cut; {fixed}"
    is_auto = tree.get("activation_checkpointing") == "auto"
    if is_auto and lookup(tree, "accum._target_") != AUTO_CUT:
        yield (
            "activation_checkpointing=auto: weighed against smaller micro-batches, which only "
            "accum=auto chooses; type accum=auto, or activation_checkpointing=true"
        )
    is_fixed = lookup(tree, "accum._target_") == FIXED_CUT
    if tree.get("deterministic") == "layout":
        if not is_fixed or lookup(tree, "accum.micro") is None:
            yield f"deterministic=layout: needs fixed micro-batches; {fixed}"
        if (mode := lookup(tree, "parallel.mode")) in ("fsdp", "hsdp"):
            yield f"deterministic=layout: sums whole gradients; use parallel=ddp, not {mode}"


def _ranks(tree: Tree, choices: Mapping[str, Any]) -> Iterator[str]:
    mode, ranks = lookup(tree, "parallel.mode"), lookup(tree, "parallel.ranks")
    if mode == "none" and _is_count(ranks) and ranks > 1:
        yield line("parallel.ranks", ranks, "parallel=none is one rank; use parallel=ddp")
    world_size = _known_ranks(tree)
    if choices.get("sync") == "hierarchical" and mode != "hsdp" and (world_size or 1) > 1:
        yield "sync=hierarchical: needs copies of the model; use parallel=hsdp"
    shard, replicate = lookup(tree, "parallel.shard"), lookup(tree, "parallel.replicate")
    if mode != "hsdp":
        for key, value in (("shard", shard), ("replicate", replicate)):
            if value not in ("auto", None):
                yield line(f"parallel.{key}", value, "counts only with parallel=hsdp")
    elif world_size not in (1, None) and all(
        size == "auto" or _is_count(size) for size in (shard, replicate)
    ):
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        local_size = int(local) if local.isdecimal() else world_size
        try:
            num_replicas(world_size, local_size, shard, replicate)
        except ConfigError as error:
            yield from map(clip, error.faults)


def _known_ranks(tree: Tree) -> int | None:
    """Tell how many ranks there will be, where that is known before torch is imported."""
    ranks = lookup(tree, "parallel.ranks")
    if os.environ.get("WORLD_SIZE", "").isdecimal():
        return int(os.environ["WORLD_SIZE"])
    if _is_count(ranks):
        return int(ranks)
    no_gpu = tree.get("device") == "cpu" or not _may_have_gpu()
    return 1 if no_gpu or lookup(tree, "parallel.mode") == "none" else None


def _may_have_gpu() -> bool:
    """Whether the system shows a device that torch might use."""
    names = ("nvidia", "kfd", "dxg")
    return any(device.name.startswith(names) for device in Path("/dev").glob("*"))


def _device(tree: Tree) -> Iterator[str]:
    """Refuse to compute on a GPU where there is none; a plan computes nothing.

    Yields:
        One line.
    """
    is_plan = tree.get("command") == "plan"
    needs_size = "memory" in (tree.get("accum") or {}) and not lookup(tree, "accum.memory")
    if tree.get("device") == "cuda" and (needs_size or not is_plan) and not _may_have_gpu():
        yield NO_GPU


def _sizes(tree: Tree) -> Iterator[str]:
    """Check the sizes of `accum=fixed`, where any two give the third.

    Yields:
        One line per fault.
    """
    global_batch, micro, steps = (lookup(tree, key) for key in _SIZES)
    if lookup(tree, "accum._target_") != FIXED_CUT:
        if global_batch is None:
            yield line("batch.global", None, "needs a whole number of at least 1, e.g. 512")
    elif micro is None and steps is None:
        yield (
            "accum.micro: accum=fixed needs accum.micro (samples per micro-batch) or accum.steps "
            "(micro-batches per rank), e.g. accum.micro=8"
        )
    elif lookup(tree, "batch.unit") == "tokens":
        if global_batch is None or (micro is not None and steps is not None):
            yield line("accum.steps", steps, "with batch.unit=tokens, set this or accum.micro")
    elif all(part is None or _is_count(part) for part in (global_batch, micro, steps)):
        try:
            complete_sizes(global_batch, micro, steps, _known_ranks(tree) or 1)
        except ConfigError as error:
            yield from map(clip, error.faults if _known_ranks(tree) else ())


def give_way(tree: dict[str, Any], typed: Collection[str]) -> None:
    """Null one of three sizes of `accum=fixed` that nobody asked for and the others give, in place.

    With all of `batch.global`, `accum.micro` and `accum.steps` set, the one that was not typed
    gives way: a default `batch.global` first, then `accum.steps`.

    Args:
        tree: the composed config.
        typed: dotted keys of the command line.
    """
    global_batch, micro, steps = (lookup(tree, key) for key in _SIZES)
    is_fixed = lookup(tree, "accum._target_") == FIXED_CUT
    has_global, has_micro, has_steps = (key in typed for key in _SIZES)
    all_typed = has_global and has_micro and has_steps
    if not is_fixed or all_typed or None in (global_batch, micro, steps):
        return
    if not has_global and (global_batch == DEFAULT_GLOBAL or (has_micro and has_steps)):
        tree["batch"] = {**tree["batch"], "global": None}
    elif has_steps and not has_micro:
        tree["accum"] = {**tree["accum"], "micro": None}
    elif has_global or has_micro:
        tree["accum"] = {**tree["accum"], "steps": None}


def _command(tree: Tree) -> Iterator[str]:
    command, run, target = tree.get("command"), tree.get("run"), lookup(tree, "export.to")
    if command in ("evaluate", "export"):
        if run is None:
            yield f"run: train {command} needs a run folder: run=outputs/... or run=auto"
    elif run is not None:
        yield line("run", run, "read by evaluate, export and verify; to go on with a run: resume=")
    if command == "export" and target is None:
        yield "export.to: train export needs a folder to write into: export.to=DIR"
    elif command != "export" and target is not None:
        yield line("export.to", target, "written by train export run=RUN alone; leave it out")
    yield from _checkpoint(tree)


def _checkpoint(tree: Tree) -> Iterator[str]:
    step, resume, init = tree.get("step"), tree.get("resume"), tree.get("init")
    if init is not None and resume is not None:
        yield line("init", init, "starts a new run; resume= goes on with an old one")
    if step in (None, "last") or init is not None or tree.get("run") is not None:
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
        yield line("outputs", tree["outputs"], "~ is not expanded here; type outputs=$HOME/...")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
