"""Check what must hold between keys: one line per fault.

A tree is as it was composed, so that any value may be of a wrong type; the schema answers for that.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from trainer.config.arithmetic import complete_sizes, nearest, num_replicas, warmup_steps
from trainer.config.components import FIXED_CUT, GPT
from trainer.config.messages import clip, flat, line, lookup
from trainer.core.errors import ConfigError

DEFAULT_GLOBAL = 512
"""`batch.global` of `conf/batch/samples.yaml`, which gives way to two other sizes."""

NO_GPU = (
    "device=cuda: no GPU is usable here; use device=cpu or device=auto, or plan for one that is "
    "not here: train plan device=cuda accum.memory=80GiB"
)

_SIZES = ("batch.global", "accum.micro", "accum.steps")

_PLANNED, _NOT_HSDP = ("auto", "budget"), ("auto", "none", "ddp", "fsdp")
_FIXED = "type accum=fixed accum.micro=8"
_HSDP = "counts only with parallel=hsdp"

_CONFLICTS: tuple[tuple[str, object, str, object, str], ...] = (
    ("steps", ..., "epochs", ..., "epochs is set too; at most one, type epochs=null"),
    ("batch.normalizer", ("micro_batches",), "accum", _PLANNED, f"depends on the cut; {_FIXED}"),
    ("batchnorm", ("micro",), "accum", _PLANNED, f"depends on the cut; {_FIXED}"),
    ("deterministic", ("layout",), "accum", _PLANNED, f"needs fixed micro-batches; {_FIXED}"),
    ("deterministic", ("layout",), "accum.micro", (None,), f"needs a fixed size; {_FIXED}"),
    ("deterministic", ("layout",), "parallel.mode", ("fsdp", "hsdp"), "needs parallel=ddp"),
    (
        "activation_checkpointing",
        ("auto",),
        "accum",
        ("budget", "fixed", "own"),
        "needs accum=auto",
    ),
    ("parallel.shard", int, "parallel.mode", _NOT_HSDP, _HSDP),
    ("parallel.replicate", int, "parallel.mode", _NOT_HSDP, _HSDP),
    (
        "scheduler.scale",
        ("linear", "sqrt"),
        "scheduler.reference_batch",
        (None,),
        "needs scheduler.reference_batch, the global batch that optimizer.lr was tuned for",
    ),
    ("command", ("evaluate", "export"), "run", (None,), "needs run=outputs/... or run=auto"),
    ("command", ("export",), "export.to", (None,), "needs a folder to write into: export.to=DIR"),
    (
        "run",
        ...,
        "command",
        ("train", "plan", "verify"),
        "read by evaluate, export and verify; to go on with a run: resume=",
    ),
    (
        "export.to",
        ...,
        "command",
        ("train", "plan", "verify", "evaluate"),
        "written by train export run=RUN alone; leave it out",
    ),
    ("init", ..., "resume", ..., "starts a new run; resume= goes on with an old one"),
)
"""A key and its values, another key and its values that it cannot stand beside, and what to do.

`...` is anything but null. The value of a group is the name of its option.
"""

Tree = Mapping[str, Any]


def rule_faults(tree: Tree, choices: Mapping[str, Any]) -> Iterator[str]:
    """Name every contradiction between keys.

    Yields:
        One line per fault.
    """
    options = {group.replace("/", "."): option for group, option in choices.items()}
    view: Tree = defaultdict(lambda: None, flat(tree) | options)
    for key, values, other, others, text in _CONFLICTS:
        if other in view and _is_one_of(view.get(key), values) and _is_one_of(view[other], others):
            yield line(key, view[key], text)
    yield from _place_faults(view)
    yield from _size_faults(view)
    yield from _schedule_faults(tree["scheduler"], tree.get("steps"))
    model = tree["model"]
    width, num_heads = model.get("width"), model.get("num_heads")
    if model.get("_target_") == GPT and _is_count(width) and _is_count(num_heads):
        is_rotary = model.get("positions") == "rotary"
        yield from filter(None, [heads_fault(width, num_heads, is_rotary=is_rotary)])


def _is_one_of(value: object, values: Any) -> bool:  # noqa: ANN401 - see _CONFLICTS
    if values is ...:
        return value is not None
    return _is_count(value) if values is int else value in values


def _place_faults(view: Tree) -> Iterator[str]:
    """Name contradictions about where a run computes, what it reads and where it writes.

    Yields:
        One line per fault.
    """
    mode, ranks, command = view["parallel.mode"], view["parallel.ranks"], view["command"]
    if mode == "none" and _is_count(ranks) and ranks > 1:
        yield line("parallel.ranks", ranks, "parallel=none is one rank; use parallel=ddp")
    if view.get("sync") == "hierarchical" and mode != "hsdp" and (_known_ranks(view) or 1) > 1:
        yield "sync=hierarchical: needs copies of the model; use parallel=hsdp"
    # A plan computes nothing; only the size of the memory has to be known.
    is_planned = command == "plan" and view.get("accum.memory", True) is not None
    if view["device"] == "cuda" and not is_planned and not _may_have_gpu():
        yield NO_GPU
    has_run = view["init"] or view["run"] or (command == "verify" and view["resume"])
    if view["step"] != "last" and not has_run:
        text = "picks a checkpoint of run=RUN or init=RUN; how long a run is: steps="
        yield line("step", view["step"], text)
    for key in ("outputs", "name"):
        if ".." in PurePath(str(view[key])).parts or str(view[key]).startswith("~"):
            yield line(key, view[key], "must not lead upwards with .., or begin with ~")


def _known_ranks(view: Tree) -> int | None:
    """Tell how many ranks there will be, where that is known before torch is imported."""
    ranks, mode = view["parallel.ranks"], view["parallel.mode"]
    if os.environ.get("WORLD_SIZE", "").isdecimal():
        return int(os.environ["WORLD_SIZE"])
    if _is_count(ranks):
        return int(ranks)
    return 1 if view["device"] == "cpu" or mode == "none" or not _may_have_gpu() else None


def _may_have_gpu() -> bool:
    """Whether the system shows a device that torch might use."""
    names = ("nvidia", "kfd", "dxg")
    return any(device.name.startswith(names) for device in Path("/dev").glob("*"))


def _size_faults(view: Tree) -> Iterator[str]:
    """Check the sizes of `accum=fixed`, where any two give the third, and of the mesh.

    Yields:
        One line per fault.
    """
    global_batch, micro, steps = sizes = [view[key] for key in _SIZES]
    mesh = view["parallel.shard"], view["parallel.replicate"]
    world_size, is_fixed = _known_ranks(view), view["accum._target_"] == FIXED_CUT
    if global_batch is None and (not is_fixed or micro is None or steps is None):
        yield line("batch.global", None, "needs a whole number of at least 1, e.g. 512")
    elif is_fixed and micro is None and steps is None:
        yield (
            "accum.micro: accum=fixed needs accum.micro (samples per micro-batch) or accum.steps "
            "(micro-batches per rank), e.g. accum.micro=8"
        )
    elif is_fixed and view["batch.unit"] == "tokens" and None not in (micro, steps):
        yield line("accum.steps", steps, "with batch.unit=tokens, set this or accum.micro")
    elif is_fixed and world_size and all(size is None or _is_count(size) for size in sizes):
        try:
            complete_sizes(global_batch, micro, steps, world_size)
        except ConfigError as error:
            yield from map(clip, error.faults)
    is_mesh = view["parallel.mode"] == "hsdp" and all(s == "auto" or _is_count(s) for s in mesh)
    if is_mesh and world_size not in (None, 1):
        try:
            num_replicas(world_size, world_size, *mesh)
        except ConfigError as error:
            yield from map(clip, error.faults)


def give_way(tree: dict[str, Any], typed: Collection[str]) -> None:
    """Null one of three sizes of `accum=fixed` that nobody asked for and the others give, in place.

    With all of `batch.global`, `accum.micro` and `accum.steps` set, the one that was not typed
    gives way: a default `batch.global` first, then `accum.steps`.

    Args:
        tree: the composed config.
        typed: dotted keys of the command line.
    """
    sizes = [lookup(tree, key) for key in _SIZES]
    has_global, has_micro, has_steps = (key in typed for key in _SIZES)
    is_fixed = lookup(tree, "accum._target_") == FIXED_CUT
    if not is_fixed or None in sizes or (has_global and has_micro and has_steps):
        return
    if not has_global and (sizes[0] == DEFAULT_GLOBAL or (has_micro and has_steps)):
        tree["batch"] = {**tree["batch"], "global": None}
    elif has_global or has_micro or has_steps:
        other = "micro" if has_steps and not has_micro else "steps"
        tree["accum"] = {**tree["accum"], other: None}


def _schedule_faults(scheduler: Tree, steps: Any) -> Iterator[str]:  # noqa: ANN401
    """Check that a schedule fits into the run, where its length is known before the data are.

    Yields:
        One line per fault.
    """
    warmup: Any = scheduler.get("warmup")
    share = scheduler.get("decay", 0)
    are_numbers = all(isinstance(x, int | float) and 0 <= x < math.inf for x in (warmup, share))
    if (
        not _is_count(steps)
        or not are_numbers
        or not str(scheduler.get("_target_")).startswith("trainer.")
    ):
        return
    begin, decay = warmup_steps(warmup, steps), round(share * steps)
    if begin > steps:
        text = f"is more than steps={steps}; the largest valid value is {steps}"
        yield line("scheduler.warmup", warmup, text)
    elif begin + decay > steps:
        text = f"{decay} steps of decay and {begin} of warm-up exceed the run's {steps} steps"
        fits = f"the largest valid value is {(steps - begin) / steps:.3g}"
        yield line("scheduler.decay", share, f"{text}; {fits}")


def heads_fault(width: int, num_heads: int, *, is_rotary: bool) -> str | None:
    """Say why a width cannot be shared by so many heads, and name the nearest sizes that can.

    Args:
        width: channels.
        num_heads: attention heads.
        is_rotary: rotary positions turn pairs of channels, so that a head has an even number.

    Returns:
        One line; None where they can.
    """
    step = 2 if is_rotary else 1
    multiple = max(1, num_heads) * step
    if width % multiple == 0:
        return None
    # One head always does, so the nearest number is less than twice as many.
    fits = [n for n in range(1, min(2 * num_heads, width, 1024) + 1) if width % (n * step) == 0]
    return (
        f"model.width, model.num_heads: {num_heads} heads do not share a width of {width}"
        f"{' in even parts, which rotary positions need' if is_rotary else ''}; nearest: "
        f"model.width={max(1, round(width / multiple)) * multiple}"
        f"{f' or model.num_heads={nearest(num_heads, fits)}' if fits else ''}"
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
