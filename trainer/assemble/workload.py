"""Say what one rank of a run computes, in which time, and with which memory."""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import replace
from functools import partial

from trainer.assemble.hardware import rank_memory
from trainer.assemble.run import MOST_STAGES, Run
from trainer.config.cards import CARDS
from trainer.core.errors import DataError
from trainer.core.micro_batch import Fields
from trainer.data.loader import Request
from trainer.models.bind import BOUNDARIES
from trainer.models.first_weights import is_on_meta
from trainer.plan.cut import Cost, IntArray
from trainer.training.batches import PREFETCH_LIMIT_BYTES
from trainer.tune.flops import ComputeCounts, card_at, card_cost
from trainer.tune.memory_limit import MemoryLimit
from trainer.tune.packed_documents import unpacked
from trainer.tune.workload import Tiled, Workload, measured_dims

FAKE_SHARDS = 16  # of more, which take minutes, a rank holds less in proportion
SAMPLED_STEPS = 8  # global batches of the first epoch, for tuning and the plan's means


def workload_of(run: Run) -> Workload:
    """Give what tuning computes: model, loss, optimizer, and micro-batches of any shape."""
    world, setup = run.world, run.model.setup
    ranks, size, shards = None, world.size, (1, 1)
    if run.is_sharded:
        size = min(size, FAKE_SHARDS * setup.replicas)
        shards = size // setup.replicas, world.size // setup.replicas
    if run.is_sharded or setup.mode == "ddp":
        ranks = partial(setup.fake_ranks, size, run.model.bind, world.device)
    return Workload(
        model=run.model,
        make_fields=_tiled(run),
        ema_decay=run.config.ema.decay,
        compiled=run.config.compile,
        fake_ranks=ranks,
        shards=shards,
    )


def _tiled(run: Run) -> Tiled:
    """Make shapes out of the longest sample; others show which dimensions follow its length."""
    example, lengths = run.example, run.data.lengths
    module, device, longest = run.model.module, run.world.device, lengths.max()
    is_away = run.planned_device.type != device.type
    # Without that kernel boundaries are looked at, and a model on the meta device runs fake alone.
    has_kernel = not is_away and (not is_on_meta(module) or device.type != "cpu")
    boundaries = inspect.signature(module.forward).parameters.get(BOUNDARIES)
    is_optional = boundaries is None or boundaries.default is not boundaries.empty
    if not has_kernel and is_optional and BOUNDARIES in example:
        # The kernel that takes all documents of a packed row at once is a GPU's. Where that is not
        # here, documents side by side, which take as much, stand in for it.
        example = unpacked(example)
    if BOUNDARIES in example:
        return Tiled(example, longest)

    def load(i: int) -> Fields | None:
        # What cannot be read is refused, or passed over, where its step needs it.
        request = Request((i,), 0, int(lengths[i]), run.layout.packed)
        with suppress(DataError):
            fields = run.data.loader.load(request)
            if request.packed:
                fields = unpacked(fields)
            return fields
        return None

    some = lengths.sample()
    dims = measured_dims(lengths[some], lambda place: load(int(some[place])))
    return Tiled(example, longest, dims)


def device_cost(run: Run, counts: ComputeCounts | None) -> Cost:
    """Give the time model of the device by arithmetic; on a CPU it is a constant."""
    if run.planned_device.type == "cpu":
        return run.layout.cost
    named = CARDS.get(run.config.device)
    cost = card_cost(counts, card_at(run.world.device) or named, run.model.product_word)
    if named:
        return cost
    # The machine's own speed is measured, and not taken from a data sheet.
    return replace(cost, seconds_per_token=None)


def memory_of_rank(run: Run, resident_bytes: int) -> tuple[MemoryLimit | None, bool]:
    """Find the memory of one rank, less what inputs take on a CPU, and whether it is here.

    Those are the inputs of a step, and of the next where that is loaded ahead; a GPU holds one
    micro-batch of them, which the prediction counts.
    """
    config, world, lengths = run.config, run.world, run.data.lengths
    limit, is_here = rank_memory(config, world, resident_bytes)
    if limit is None or run.planned_device.type != "cpu":
        return limit, is_here
    per_token = sum(field.nbytes for field in run.example.values()) / float(lengths.max())
    # A step never has more than an epoch.
    tokens = min(run.data.order.sizes.largest, len(lengths)) * float(lengths.mean())
    if config.batch.unit == "tokens":
        tokens = min(run.data.order.sizes.largest, float(lengths.sum()))
    of_step = int(per_token * tokens / world.size)
    inputs = of_step
    # The next step's are loaded ahead.
    if of_step <= PREFETCH_LIMIT_BYTES:
        inputs = 2 * of_step
    return replace(limit, bytes=max(0, limit.bytes - inputs), inputs=inputs), is_here


def sampled_batches(run: Run) -> list[IntArray]:
    """Take the lengths behind the first few steps of the first epoch."""
    order, batches = run.data.order, list[IntArray]()
    cursor = order.start
    while cursor.epoch == 0 and len(batches) < min(SAMPLED_STEPS, max(1, run.data.total_steps)):
        samples = order.next(cursor)
        cursor = samples.after
        batches.append(run.data.lengths[samples.ids])
    # Steps of the sizes that the first ones do not have may need more memory.
    sizes = list(dict.fromkeys(stage.size for stage in run.data.stages))
    if not sizes or len(sizes) > MOST_STAGES:
        sizes = []
        # Of sizes that are many, or found on the way, the largest stands for all.
        if not order.sizes.is_constant:
            sizes.append(order.sizes.largest)
    return [*batches, *(run.data.lengths[order.batch_of(size)] for size in sizes)]
