"""Resolve how a run uses its hardware: the precision, the ranks, the sync policy, the memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trainer.assemble.instantiate import construct
from trainer.config.cards import CARDS
from trainer.config.rules import num_replicas
from trainer.config.run_config import RunConfig
from trainer.core import gpu
from trainer.core.errors import ConfigError
from trainer.core.format import size
from trainer.core.world import World
from trainer.models.bind import AUTOCAST
from trainer.models.recompute import blocks_of
from trainer.parallel import setup
from trainer.parallel.sync import Deferred, SyncPolicy, reduction_of
from trainer.plan.traffic import MOST_OF_MEMORY, ModelBytes
from trainer.tune.memory_limit import MEBI, MemoryLimit, memory_limit

POLICY_MICRO_BATCHES = 8  # micro-batches that a policy is asked about before the first step


def _sync_policy(config: RunConfig, world: World, mode: str) -> SyncPolicy:
    """Build the sync policy; refuse one that does not fit the run. Collective."""
    policy = construct(config.sync, "sync", SyncPolicy, config.trust)
    name, kind = policy.name, type(policy).__name__
    # Which also refuses an answer that no micro-batch may have.
    answers = [reduction_of(policy, index, is_last=False) for index in range(POLICY_MICRO_BATCHES)]
    if any(each != answers for each in world.collect(answers)):
        raise ConfigError(
            f"sync={name}: `reduction` of {kind} answers otherwise on other ranks, which would "
            "wait for each other: answer by `index` and `is_last` alone"
        )
    if config.deterministic == "layout" and (policy.lockstep or policy.overlaps):
        text = "reduces within micro-batches, and deterministic=layout once, in a fixed order"
        raise ConfigError(f"sync={name}: {text}: type sync=auto")
    # What several ranks could not have is refused on one rank, too.
    typed = config.parallel.mode if mode == "none" else mode
    if typed not in ("auto", "none") and (fault := setup.sync_fault(policy, typed)) is not None:
        raise ConfigError(f"sync={name}: {fault}")
    return policy


def may_shard(config: RunConfig, world: World) -> bool:
    """Whether each rank may hold a part of the model alone."""
    is_laid_out = config.command in {"train", "plan"}
    return is_laid_out and parallel_mode(config, world) in {"auto", *setup.SHARDED}


def parallel_setup(
    config: RunConfig,
    world: World,
    module: nn.Module,
    mode: str,
    precision: str,
    *,
    single_backward: bool = False,
    begun: Sequence[Any] | None = None,
    why_mode: str | None = None,
) -> setup.ParallelSetup:
    """Resolve `sync`, the copies, and `deterministic=layout` under a resolved mode. Collective.

    `precision` is the word that it became; `single_backward` whether a micro-batch has one alone;
    `begun` mode, ranks and policy that `sync=auto` was where the run goes on.
    """
    policy = _sync_policy(config, world, mode)
    replicas, asked = 1, config.parallel
    if mode == "ddp":
        replicas = world.size
    elif mode == "hsdp":
        replicas = num_replicas(world.size, world.local_size, asked.shard, asked.replicate)
    # A config of shards may not ask for it.
    is_ordered = config.deterministic == "layout"
    found = setup.ParallelSetup(
        mode=mode, replicas=replicas, sync=policy, is_ordered=is_ordered, why_mode=why_mode
    )
    # One rank has nothing to reduce.
    if is_ordered or mode == "none":
        return replace(found, sync=Deferred())
    mesh = None
    if mode in setup.SHARDED and world.long_timeout_group is not None:
        from trainer.parallel.fsdp import make_mesh  # noqa: PLC0415 - half a second

        mesh = make_mesh(world, replicas)
    limit, _ = rank_memory(config, world)
    parameters = [p for p in module.parameters() if p.requires_grad]
    most = sys.maxsize
    if limit is not None:
        most = limit.bytes
    dtype = AUTOCAST.get(precision)
    if mode not in setup.SHARDED or not setup.may_cast(module, planned_device(config, world)):
        dtype = None
    sizes = ModelBytes(
        mode=mode,
        model_bytes=sum(map(setup.gradient_bytes, parameters)),
        gathered_bytes=sum(p.numel() * (dtype or p.dtype).itemsize for p in parameters),
        shard=world.size // replicas,
        replicas=replicas,
        limit_bytes=world.on_main(lambda: most),
        scatters_whole=planned_device(config, world).type == "cpu",
    )
    is_open = config.sync.name == "auto"
    found = replace(found, sizes=sizes, is_open=is_open, mesh=mesh, dtype=dtype)
    if not is_open:
        return found
    *layout, name = begun or (None,)
    # What was taken for another layout does not count under this one.
    if layout != [mode, world.size]:
        name = None
    # Buckets in another order round otherwise; of a model compiled as a whole, all gradients come
    # at the end.
    in_parts = not config.compile or bool(blocks_of(module))
    overlaps = single_backward and in_parts and not config.deterministic
    return found.chosen(name, overlaps=overlaps and planned_device(config, world).type != "cpu")


def parallel_mode(config: RunConfig, world: World) -> str:
    """Resolve `parallel` as far as nothing is weighed; `auto` is for `auto_mode` to resolve.

    Other commands than `train` and `plan` compute in one process; ordered sums are of whole
    gradients; and on one rank there is nothing to lay out.
    """
    mode = config.parallel.mode
    if mode == "none" and world.size > 1:
        text = f"is one rank, and there are {world.size}; use parallel=ddp"
        raise ConfigError(f"parallel=none: {text}")
    if world.size == 1:
        return "none"
    is_open = config.deterministic != "layout" and config.command in {"train", "plan"}
    return "ddp" if mode == "auto" and not is_open else mode


def auto_mode(config: RunConfig, world: World, module: nn.Module) -> tuple[str, str]:
    """Choose what `parallel=auto` is, and say why: whole copies of the model, or shards of it.

    Whole copies need one reduction a step and nothing gathered, so they are taken wherever they
    leave room for activations; then shards within one machine, whose network is the faster; then
    shards over all ranks. The optimizer is taken for one that keeps two moments.
    """
    limit, _ = rank_memory(config, world)
    if limit is None:
        return "ddp", (
            "parallel=auto chose ddp without checking memory: set accum.memory=80GiB to check it"
        )
    shares = {"ddp": 1}
    # FSDP2 shards no scalars.
    if all(parameter.dim() for parameter in module.parameters()):
        if 1 < world.local_size < world.size:
            shares["hsdp"] = world.local_size
        shares["fsdp"] = world.size
    state = sum(p.nbytes + setup.training_bytes(p) for p in module.parameters())
    room = limit.bytes * MOST_OF_MEMORY
    # Where none leaves that room, it is the last, which needs the least.
    for mode, ranks in shares.items():  # noqa: B007 - used below
        if state / ranks <= room:
            break
    each = [f"{name} {size(state // ranks)}" for name, ranks in shares.items()]
    return mode, (
        f"parallel=auto chose {mode}: memory limit {size(limit.bytes)} ({limit.source}), half of "
        "it reserved for activations; weights, gradients and optimizer state need "
        f"{', '.join(each)}"
    )


def planned_device(config: RunConfig, world: World) -> torch.device:
    """Give where the plan is to run: `train plan` may ask for a GPU that is not here."""
    if config.command != "plan" or config.device == "auto":
        return world.device
    if config.device == "cpu":
        return torch.device("cpu")
    return torch.device(gpu.DEVICE_TYPE)


def rank_memory(
    config: RunConfig, world: World, resident_bytes: int = 0
) -> tuple[MemoryLimit | None, bool]:
    """Find the memory of one rank, if anyone knows it, and whether it is that of this machine.

    `train plan` takes `accum.memory` at its word, for a machine that is not here too; else a card
    that `device` names has what its driver reports. A run cannot have more than there is.
    `resident_bytes` are the model's tensors, which are there already.
    """
    device, asked = planned_device(config, world), config.accum.params.get("memory")
    card = CARDS.get(config.device)
    typed: MemoryLimit | None = None
    if asked is not None:
        typed = memory_limit(device, asked=asked)
    elif card is not None:
        typed = memory_limit(
            device, asked=card.memory_mib * MEBI, source=f"memory of {config.device}"
        )
    if device.type != world.device.type:
        return typed, False
    there = memory_limit(device, resident_bytes=resident_bytes, local_ranks=world.local_size)
    if typed is None or (typed.bytes > there.bytes and config.command != "plan"):
        return there, True
    return typed, typed.bytes <= there.bytes


def _fitting_precision(config: RunConfig, device: torch.device, module: nn.Module) -> str:
    # Autocast casts fp32 weights alone, so that a model without any would compute as before.
    if all(p.dtype != torch.float32 for p in module.parameters()):
        return "fp32"
    has_bf16 = gpu.has_fast_bf16(device)
    # A card that is not here cannot be asked; its data sheet says it.
    if (card := CARDS.get(config.device)) is not None:
        has_bf16 = card.has_bf16
    return "bf16" if has_bf16 else "fp32"


def resolve_precision(
    config: RunConfig, world: World, module: nn.Module, recorded: Mapping[str, Any] | None = None
) -> str:
    """Resolve `precision` on the main rank; the others follow, and GPUs compute so. Collective.

    `auto` is what a run has been computing in, on whatever hardware it goes on. For a run that
    begins it is bf16 where the hardware is made for it, and fp32 elsewhere and for models without a
    weight in fp32, which autocast would not reach.
    `recorded` is the contract of the checkpoint that is read; None where there is none.
    """

    def resolve() -> str:
        device, begun = planned_device(config, world), (recorded or {}).get("precision")
        word: str = config.precision
        if word == "auto":
            word = begun or _fitting_precision(config, device, module)
        if word == "tf32" and device.type == "cpu":
            remedy = " resume_allow=[precision]" * (begun is not None)
            raise ConfigError(f"precision=tf32: needs a GPU; type precision=fp32{remedy}")
        if word == "fp16" and any(p.dtype == torch.float16 for p in module.parameters()):
            raise ConfigError("precision=fp16: the model's weights are fp16; give them in fp32")
        return word

    word = world.on_main(resolve)
    gpu.set_matmul_precision(word, world.device)
    return word
