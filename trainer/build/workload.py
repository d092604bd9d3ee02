"""Say what one rank of a run computes and how much memory it has, as tuning needs to know it."""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from trainer.build.parallel import is_sharded, planned_device
from trainer.build.parts import Parts, bind_run
from trainer.core.errors import DataError
from trainer.core.micro_batch import Fields
from trainer.data.loader import Request
from trainer.plan.cuts import Auto
from trainer.training.batches import PREFETCH_LIMIT_BYTES
from trainer.tune.cache import describe
from trainer.tune.layout import BOUNDARIES
from trainer.tune.memory_limit import MemoryLimit, memory_limit
from trainer.tune.ragged import look
from trainer.tune.workload import Tiled, Workload


def workload(parts: Parts) -> Workload:
    """Give what tuning computes: model, loss, optimizer, and micro-batches of any shape."""
    call_of = partial(bind_run, config=parts.config, world=parts.world)
    return Workload(
        model=parts.module,
        bind=call_of,
        objective=parts.objective,
        make_optimizer=parts.spec.build,
        make_fields=_tiled(parts),
        device=parts.world.device,
        weights=parts.weights,
        sync=parts.parallel.sync,
        fake_ranks=partial(parts.parallel.fake_ranks, parts.world.size, call_of)
        if is_sharded(parts.config, parts.world)
        else None,
    )


def _tiled(parts: Parts) -> Tiled:
    """Make shapes out of the longest sample; others tell which dimensions follow."""
    example, lengths, packed = _example(parts), parts.source.lengths, parts.layout.packed
    if BOUNDARIES in example:
        return Tiled(example, int(lengths.max()))

    def load(i: int) -> Fields | None:
        # What cannot be read is refused, or passed over, where its step needs it.
        with suppress(DataError):
            return parts.source.loader.load(Request((i,), 0, int(lengths[i]), packed))
        return None

    return Tiled(example, int(lengths.max()), look(lengths, load))


def _example(parts: Parts) -> Fields:
    """Give the fields that shapes are made of.

    The kernel that takes all documents of a packed row at once is a GPU's. Where that is not here,
    documents side by side, which take as much, stand in for it.
    """
    is_away = planned_device(parts.config, parts.world).type != parts.world.device.type
    boundaries = inspect.signature(parts.module.forward).parameters.get(BOUNDARIES)
    if not is_away or boundaries is None or boundaries.default is inspect.Parameter.empty:
        return parts.example
    own = {BOUNDARIES, "position_ids"}
    return {name: field for name, field in parts.example.items() if name not in own}


def situation(parts: Parts, work: Workload) -> dict[str, Any]:
    """List everything that measurements and predictions depend on."""
    facts = describe(work, int(parts.source.lengths.max()), parts.config.precision)
    model = parts.config.model
    facts["own lengths"] = repr(getattr(work.make_fields, "dims", None))
    facts["component"] = [model.target, repr(sorted(model.params.items()))]
    if work.fake_ranks is None:
        return facts
    return {**facts, "shards": [parts.world.size, parts.parallel.replicas, work.sync.lockstep]}


def limit_of(parts: Parts, work: Workload) -> tuple[MemoryLimit | None, bool]:
    """Find the memory of one rank, if anyone knows it, and whether it is that of this machine.

    `train plan` takes `accum.memory` at its word, for a machine that is not here too. A run cannot
    have more than there is.
    """
    asked = parts.cut.memory if isinstance(parts.cut, Auto) else None
    device, world = planned_device(parts.config, parts.world), parts.world

    def find(device: torch.device, asked: int | None = None) -> MemoryLimit:
        limit = memory_limit(
            device,
            resident_bytes=work.resident_bytes,
            asked=asked,
            local_ranks=world.local_size,
        )
        # A GPU holds one micro-batch of inputs, which the prediction counts.
        inputs = _inputs_bytes(parts) if device.type == "cpu" else 0
        return replace(limit, bytes=max(0, limit.bytes - inputs), inputs=inputs)

    if device.type != world.device.type:
        return None if asked is None else find(device, asked=asked), False
    there = find(device)
    if asked is None:
        return there, True
    typed = find(device, asked=asked)
    if typed.bytes <= there.bytes:
        return typed, True
    return (typed, False) if parts.config.command == "plan" else (there, True)


def _inputs_bytes(parts: Parts) -> int:
    """Count the inputs of one rank's step, and of the next where that is loaded ahead."""
    lengths = parts.source.lengths
    per_token = sum(field.nbytes for field in parts.example.values()) / float(lengths.max())
    is_in_tokens = parts.config.batch.unit == "tokens"
    tokens = parts.global_batch * (1.0 if is_in_tokens else float(lengths.mean()))
    step = int(per_token * tokens / parts.world.size)
    return step * (2 if step <= PREFETCH_LIMIT_BYTES else 1)
