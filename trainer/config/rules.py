"""Check what must hold between keys, and work out sizes and steps from what was typed.

A tree is as it was composed, so that any value may be of a wrong type; the schema answers for that.
Plain Python: it runs while the command line is checked, before numpy or torch are imported.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, final

from trainer.config.cards import CARDS
from trainer.config.command_words import OF_OTHER_DATA, READING, commands_but, text_faults
from trainer.config.components import COMPONENTS, EVAL_SETS
from trainer.config.declared import declared
from trainer.config.messages import Tree, flat, line, lookup, refusals
from trainer.config.metric_mode import metric_faults
from trainer.core.errors import ConfigError
from trainer.core.format import AVERAGED
from trainer.core.urls import is_url

_SIZES = ("batch.global", "accum.micro", "accum.steps")
# Of a cut that takes both, so that any two of three sizes do
_TWO_SIZES = {"accum.micro", "accum.steps"}

_NOT_HSDP, _STARTING = ("auto", "none", "ddp", "fsdp"), ("train", "plan", "verify")
_HSDP = "has an effect only with parallel=hsdp"
_PICKS = "picks a checkpoint of run=, init= or resume=RUN; for the length of a run type steps="
_IS_READ = f"read by {', '.join(READING)}, plan and verify; to go on with a run: resume="
_ALL = "only to evaluate a run on other data: train evaluate run=RUN data.path=OTHER "
_ALL += "data.holdout=all"
_SHOWS = "shows samples under train plan: type train plan ..."
_FOR_PLAN = "names a card for train plan; a run takes device=cuda or auto"
_ESTIMATES = "is only for the estimates of train plan; leave it out"
_NO_PATH = "takes the place of data.path, which these data lack; see eval.sets"
_ARE_WRITTEN = "written only by train evaluate run=RUN; leave it out"
_IS_COMPARED = "compared only by train verify: type train verify matrix=true, or leave it out"
_IS_WRITTEN = "used only by train export run=RUN; leave it out"

_CONFLICTS: tuple[tuple[str, object, str, object, str], ...] = (
    ("steps", ..., "epochs", ..., "epochs is set too; at most one, type epochs=null"),
    ("deterministic", ("layout",), "parallel.mode", ("fsdp", "hsdp"), "needs parallel=ddp"),
    ("batch.global", ..., "batch.gives_sizes", (True,), "batch.stages has the sizes; leave it out"),
    ("parallel.shard", int, "parallel.mode", _NOT_HSDP, _HSDP),
    ("parallel.replicate", int, "parallel.mode", _NOT_HSDP, _HSDP),
    ("command", READING, "run", (None,), "needs run=outputs/... or run=auto"),
    ("command", ("export",), "export.to", (None,), "needs a folder to write into: export.to=DIR"),
    ("run", ..., "command", _STARTING, _IS_READ),
    ("data.holdout", ("all",), "command", commands_but("evaluate"), _ALL),
    ("data.eval_path", ..., "data.holdout", ("all",), "with data.holdout=all type data.path"),
    ("data.show", int, "command", commands_but("plan"), _SHOWS),
    ("eval.predictions", (True,), "command", commands_but("evaluate"), _ARE_WRITTEN),
    ("network", ..., "command", commands_but("plan"), _ESTIMATES),
    ("checkpoint.bandwidth", ..., "command", commands_but("plan"), _ESTIMATES),
    ("device", tuple(CARDS), "command", commands_but("plan"), _FOR_PLAN),
    ("data.eval_path", ..., "data.path", (None,), _NO_PATH),
    ("ema.evaluate", (True,), "ema.decay", (None,), "needs an average: type ema.decay=0.999"),
    ("matrix", (True,), "command", commands_but("verify"), _IS_COMPARED),
    ("export.to", ..., "command", commands_but("export"), _IS_WRITTEN),
    ("export.merge", (True,), "command", commands_but("export"), _IS_WRITTEN),
    ("export.merge", (True,), "adapter", ("none",), "the run has no adapter; leave it out"),
    ("init", ..., "resume", ..., "starts a new run; resume= goes on with an old one"),
)
"""A key and its values, another key and its values that it cannot stand beside, and what to do.

`...` is anything but null, `int` a number of 1 or more. A group's value is its option's
name; beside its settings a component has the flags of its class.
"""


@final
class _View(dict[str, Any]):
    """Values by dotted key; of one that is not there, None."""

    def __missing__(self, key: str) -> None:
        return None


def rule_faults(tree: Tree, choices: Mapping[str, Any]) -> Iterator[str]:
    """Name every contradiction between keys, a line for each."""
    options = {group.replace("/", "."): option for group, option in choices.items()}
    targets = {path: str(lookup(tree, f"{path}._target_")) for path in COMPONENTS}
    view = _View()
    for path, target in targets.items():
        for name, flag in declared(target).flags.items():
            view[f"{path}.{name}"] = flag
    view |= flat(tree) | options
    for key, values, other, others, text in _CONFLICTS:
        if _is_one_of(view[key], values) and _is_one_of(view[other], others):
            yield line(key, view[key], text)
    yield from text_faults(view, view["command"])
    yield from _weight_faults(view)
    yield from _place_faults(view)
    yield from metric_faults(view)
    # No step is taken by others.
    if view["command"] not in OF_OTHER_DATA:
        yield from _size_faults(view)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**63


def _is_one_of(value: object, values: Any) -> bool:  # noqa: ANN401 - see _CONFLICTS
    if values is ...:
        return value is not None
    if values is int:
        return _is_count(value)
    return bool(value in values)


def _weight_faults(view: Tree) -> Iterator[str]:
    """Name contradictions about where weights come from."""
    if view["init"] or view["run"] or view["resume"]:
        return
    if view["step"] != "last":
        yield line("step", view["step"], _PICKS)
    if view["init.partial"] is True:
        yield line("init.partial", True, "takes weights in part; type init=RUN or FOLDER, too")
    is_random = view["model.draws_on_meta"] or view["model.config"] is not None
    if view["command"] == "train" and view["adapter.is_adapter"] and is_random:
        text = "would stand beside random weights, which stay frozen; type model=hf model.path="
        yield line("adapter", view["adapter"], f"{text}FOLDER, or init=RUN")


def _place_faults(view: Tree) -> Iterator[str]:
    """Name contradictions about where a run computes, what it reads and where it writes."""
    mode, ranks = view["parallel.mode"], view["parallel.ranks"]
    if mode == "none" and _is_count(ranks) and ranks > 1:
        yield line("parallel.ranks", ranks, "parallel=none is one rank; use parallel=ddp")
    for key in view:
        if key.startswith(f"{EVAL_SETS}.") and key.endswith(".holdout"):
            yield line(key, view[key], "all samples of a set are evaluated; leave it out")
    begins = (f"{EVAL_SETS}.{AVERAGED}", f"data.sources.{AVERAGED}")
    for key in {".".join(each.split(".")[:3]): None for each in view if each.startswith(begins)}:
        yield f"{key}: figures of the averaged weights are named so; choose another name"
    if is_url(str(view["export.to"])):
        yield line("export.to", view["export.to"], "must be a folder; copy what is written there")
    outputs = str(view["outputs"])
    if ".." in PurePath(outputs).parts or outputs.startswith("~"):
        yield line("outputs", outputs, "must not lead upwards with .., or begin with ~")


def _known_ranks(view: Tree) -> int | None:
    """Tell how many ranks there will be, where that is known before torch is imported."""
    ranks, mode = view["parallel.ranks"], view["parallel.mode"]
    if os.environ.get("WORLD_SIZE", "").isdecimal():
        return int(os.environ["WORLD_SIZE"])
    if _is_count(ranks):
        return int(ranks)
    if view["device"] == "cpu" or mode == "none":
        return 1
    # Files of the system for a GPU that torch, which is not asked yet, might use
    names = ("nvidia", "kfd", "dxg")
    if any(device.name.startswith(names) for device in Path("/dev").iterdir()):
        return None
    return 1


def _size_faults(view: Tree) -> Iterator[str]:
    """Check the sizes of `accum=fixed`, where any two give the third, and of the mesh."""
    global_batch, micro, steps = sizes = [view[key] for key in _SIZES]
    gives_sizes, stages = view["batch.gives_sizes"], list[Any]()
    for key, size in view.items():
        if key.startswith("batch.stages."):
            stages.append(size)
    mesh = view["parallel.shard"], view["parallel.replicate"]
    # Where ranks are not known yet, `complete_sizes` is asked again once they are.
    world_size, is_fixed = _known_ranks(view), view.keys() >= _TWO_SIZES
    if global_batch is None and not gives_sizes and (not is_fixed or None in (micro, steps)):
        yield line("batch.global", None, "needs a whole number of at least 1, e.g. 512")
    elif is_fixed and micro is None and steps is None:
        text = "accum=fixed needs the number of samples per micro-batch, e.g. 8, or accum.steps"
        yield line("accum.micro", None, text)
    elif is_fixed and (gives_sizes or view["batch.unit"] == "tokens") and None not in sizes[1:]:
        how = "steps grow with batch.stages" if gives_sizes else "with batch.unit=tokens"
        yield line("accum.steps", steps, f"{how}, set this or accum.micro")
    elif is_fixed and world_size and all(s is None or _is_count(s) for s in [*sizes, *stages]):
        named = "a stage of "
        if not stages and not gives_sizes:
            stages, named = [global_batch], "batch.global="
        for size in stages:
            yield from refusals(complete_sizes, size, micro, steps, world_size, named)
    is_mesh = view["parallel.mode"] == "hsdp" and all(s == "auto" or _is_count(s) for s in mesh)
    if is_mesh and world_size not in (None, 1):
        yield from refusals(num_replicas, world_size, world_size, *mesh)


def give_way(tree: dict[str, Any], typed: Collection[str], default_global: int) -> None:
    """Null what nobody typed and something typed replaces, in place.

    Steps stand in place of a recipe's epochs, or the reverse. Two of the three sizes of
    `accum=fixed` give the third: a default `batch.global` gives way first, always to sizes of a
    class's own; then `accum.steps`.
    """
    for length, other in (("steps", "epochs"), ("epochs", "steps")):
        if length in typed and other not in typed and tree[length] is not None:
            tree[other] = None
    has_global, has_micro, has_steps = (key in typed for key in _SIZES)
    gives_sizes = declared(str(lookup(tree, "batch._target_"))).flags.get("gives_sizes", False)
    if gives_sizes and not has_global:
        tree["batch"] = {**tree["batch"], "global": None}
    sizes = [gives_sizes or lookup(tree, _SIZES[0]), *(lookup(tree, key) for key in _SIZES[1:])]
    has_global |= gives_sizes
    is_fixed = flat(tree).keys() >= _TWO_SIZES
    if not is_fixed or None in sizes or (has_global and has_micro and has_steps):
        return
    if not has_global and (sizes[0] == default_global or (has_micro and has_steps)):
        tree["batch"] = {**tree["batch"], "global": None}
    elif has_global or has_micro or has_steps:
        # The one that was typed stays; else the micro-batch, which is what memory bounds.
        other = "micro" if has_steps and not has_micro else "steps"
        tree["accum"] = {**tree["accum"], other: None}


def complete_sizes(
    global_batch: int | None,
    micro: int | None,
    steps: int | None,
    world_size: int,
    named: str = "batch.global=",
) -> int:
    """Give the global batch of `accum=fixed`, where two of its three sizes give the third.

    Ranks share the global batch as evenly as they can, so the busiest of `world_size` holds
    `ceil(global_batch / world_size)` samples. The last micro-batch of a rank may be short; without
    `micro`, the `steps` of a rank are as even as they can be. Sizes that contradict are a
    `ConfigError`, which calls the global batch `named`, and names the nearest that agree.
    """
    if global_batch is None:
        if micro is None or steps is None:
            raise ConfigError("batch.global: needed, unless accum.micro and accum.steps are given")
        return micro * steps * world_size
    # Samples of the busiest rank, rounded up
    share = -(-global_batch // world_size)
    if steps is None:
        return global_batch
    agrees = steps <= share
    if micro is not None:
        agrees = steps == -(-share // micro)
    if agrees:
        return global_batch
    # `steps` micro-batches of up to `largest` samples hold from `fewest` to `most` of them.
    largest, even = micro or 1, -(-share // steps)
    fewest, most = (steps - 1) * largest * world_size + 1, steps * largest * world_size
    nearest, cut = most, f"{steps} micro-batches"
    if micro is not None:
        cut += f" of accum.micro={micro}"
        if global_batch <= most:
            nearest = fewest
    fixes = [f"{named}{nearest}", f"accum.steps={-(-share // largest)}"]
    # Where ceilings do not meet, no micro-batch gives so many steps.
    if micro is not None and -(-share // even) == steps:
        fixes.append(f"accum.micro={even}")
    raise ConfigError(
        f"accum.steps={steps}: {named}{global_batch} gives each of {world_size} rank"
        f"{'s' * (world_size > 1)} {share} samples, which are not {cut}. "
        f"The nearest sizes that agree: {', or '.join(fixes)}"
    )


def num_replicas(world_size: int, local_size: int, shard: object, replicate: object) -> int:
    """Give the copies of the model under `parallel=hsdp`; by default a machine holds one.

    A machine has `local_size` ranks. Sizes that do not give the number of ranks are a
    `ConfigError`, which names the nearest that do.
    """
    if isinstance(shard, int):
        part = shard
    elif isinstance(replicate, int):
        part = max(1, world_size // replicate)
    else:
        part = local_size
    copies = max(1, world_size // part)
    if isinstance(replicate, int):
        copies = replicate
    if copies * part == world_size:
        return copies
    divisors = list[int]()
    for number in range(1, world_size + 1):
        if world_size % number == 0:
            divisors.append(number)
    fitting = min(divisors, key=lambda n: abs(n - part))
    raise ConfigError(
        f"parallel.shard={part}: times parallel.replicate={copies} must be the {world_size} ranks "
        f"of the run; e.g. parallel.shard={fitting} parallel.replicate={world_size // fitting}"
    )
