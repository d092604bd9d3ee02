"""The way of the data: order -> global batch -> plan -> micro-batches, ahead of training.

Everything after "ids of step k" may be done again: restarts, other rank counts and replays under
smaller micro-batches all re-enter there. The next steps are planned and loaded while this one
computes: in bursts, since Python that runs a few times in a row costs half of what it costs once
between two steps that have emptied the caches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from trainer.core.errors import DoesNotFitError
from trainer.core.micro_batch import Fields, MicroBatch
from trainer.core.world import World, rng_key
from trainer.data.loader import Loader, Request
from trainer.objectives.base import Objective, weights_of
from trainer.plan.cut import Cut, IntArray, Layout, Plan
from trainer.plan.cuts import SampleTooLongError
from trainer.plan.order import Cursor, GlobalBatch, Order

PREFETCH_LIMIT_BYTES = 256 * 2**20
"""A step larger than this is not loaded ahead, so that host memory never holds two of them."""

BURST_STEPS = 8
"""Steps that are prepared in one go, at most."""

BURST_BYTES = 16 * 2**20
"""What the steps of a burst may take together; one step alone may take more."""


@final
@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """One global batch, cut, with this rank's micro-batches at hand.

    Attributes:
        step: the step it belongs to, from 1.
        samples: the global batch.
        plan: how it is cut, for every rank.
        micro_batches: this rank's.
        sample_ids: of the global batch, in the user's own data set.
    """

    step: int
    samples: GlobalBatch
    plan: Plan
    micro_batches: tuple[MicroBatch, ...]
    sample_ids: tuple[int, ...]

    def largest_sample(self) -> tuple[int, int]:
        """Name the longest sample: its id and its length in tokens."""
        position = int(self.plan.lengths.argmax())
        return self.sample_ids[position], int(self.plan.lengths[position])

    @property
    def num_tokens(self) -> int:
        """Real input positions of the global batch."""
        return int(self.plan.lengths.sum())


@final
@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the samples of a run come from.

    Attributes:
        order: which samples belong to which step.
        lengths: `(samples,)`, tokens of every training sample.
        loader: turns ids into collated fields.
        objective: counts the weights of a micro-batch.
    """

    order: Order
    lengths: IntArray
    loader: Loader
    objective: Objective


@final
class Feed:
    """Gives the planned batches of a run, from any cursor on.

    Args:
        source: where samples come from, and in which order.
        cut: which samples share a micro-batch.
        layout: what hardware and model ask of the cut.
        world: this rank loads its own micro-batches only.
        seed: every random draw of a step follows from it.
        cursor: where to begin.
    """

    def __init__(
        self, source: Source, *, cut: Cut, layout: Layout, world: World, seed: int, cursor: Cursor
    ) -> None:
        self.cut = cut
        self.layout = layout
        self.cursor = cursor
        self.loader = source.loader
        self.dataset = source.loader.dataset
        self._source = source
        self._world = world
        self._seed = seed
        self._ahead: deque[Future[PlannedBatch]] = deque()
        self._ahead_cursor = cursor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._stream: Iterator[Fields] | None = None
        self._queue: deque[tuple[GlobalBatch, Plan]] = deque()
        self._last_bytes = 0

    def next(self) -> PlannedBatch:
        """Take the next global batch and move the cursor behind it."""
        if self.loader.num_workers:
            batch = self._from_workers()
        elif self._ahead:
            batch = self._ahead.popleft().result()
        else:
            batch = self._load(*self.plan(self.cursor))
        self.cursor = batch.samples.after
        self._last_bytes = sum(f.nbytes for m in batch.micro_batches for f in m.fields.values())
        return batch

    def prefetch(self) -> None:
        """Begin to plan and load the next global batches while the caller computes."""
        light = self._last_bytes <= PREFETCH_LIMIT_BYTES
        if light and self.loader.loads_in_thread and not self._ahead:
            self._ahead_cursor = self.cursor
            fitting = max(1, BURST_BYTES // max(1, self._last_bytes))
            for _ in range(min(BURST_STEPS, fitting)):
                self._ahead.append(self._thread.submit(self._load_ahead))

    def plan(self, cursor: Cursor) -> tuple[GlobalBatch, Plan]:
        """Cut the global batch at a cursor; a pure function of cursor, cut and layout.

        Raises:
            DoesNotFitError: one sample alone exceeds what the memory allows.
        """
        samples = self._source.order.next(cursor)
        try:
            plan = self.cut.cut(self._source.lengths[samples.ids], self.layout)
        except SampleTooLongError as error:
            (sample,) = self.dataset.original_ids(samples.ids[[error.position]])
            raise DoesNotFitError(
                f"sample {sample} of {error.length} tokens does not fit: "
                f"memory allows {error.cap} in one micro-batch; lower data.max_length"
            ) from error
        plan.check(self.layout)
        return samples, plan

    def requests(self, samples: GlobalBatch, plan: Plan) -> list[Request]:
        """Name what this rank loads for a step, one request per micro-batch."""
        rank = self._world.rank
        return [
            Request(tuple(samples.ids[slot].tolist()), samples.epoch, length, plan.packed)
            for slot, length in zip(plan.ranks[rank], plan.padded_lengths[rank], strict=True)
        ]

    @contextmanager
    def naming_samples(self, batch: PlannedBatch) -> Iterator[None]:
        """Name the sample whose token id or label could not be looked up, as the loader does.

        Yields:
            Nothing.
        """
        ids, longest = tuple(batch.samples.ids.tolist()), int(batch.plan.lengths.max())
        with self.loader.naming_samples(Request(ids, batch.samples.epoch, longest), self.pause):
            yield

    def pause(self) -> None:
        """Prepare nothing but what has begun, and wait for it: nothing else then reads the data."""
        while self._ahead and self._ahead[-1].cancel():
            self._ahead.pop()
        wait(self._ahead)

    def smaller(self, batch: PlannedBatch) -> PlannedBatch | None:
        """Cut a global batch, and all that follow it, into smaller micro-batches.

        Returns:
            None where it holds one sample per micro-batch already.
        """
        cut = self.cut.smaller(batch.plan)
        if cut is None:
            return None
        self.use(cut)
        return self._load(batch.samples, cut.cut(batch.plan.lengths, self.layout))

    def smaller_setting(self, batch: PlannedBatch) -> str | None:
        """Name a setting that cuts smaller than a batch is cut; None at one sample each."""
        cut = self.cut.smaller(batch.plan)
        if cut is None:
            return None
        settings = vars(cut)
        if settings.get("lowered"):
            longest = max(length for rank in batch.plan.padded_lengths for length in rank)
            return f"accum=budget accum.max_tokens={max(settings['lowered'], longest)}"
        key = "micro" if settings.get("micro") else "steps"
        return f"accum.{key}={settings[key]}" if settings.get(key) else "a finer cut"

    def use(self, cut: Cut) -> None:
        """Cut every later global batch with `cut`, and drop what was prepared with another."""
        self.cut = cut
        self.pause()
        self._ahead.clear()
        self._stream = None
        self._queue.clear()

    def close(self) -> None:
        """Stop the thread and the loading processes."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._stream = None
        self.loader.close()

    def _load_ahead(self) -> PlannedBatch:
        """Load what follows the last that was loaded, in the thread."""
        batch = self._load(*self.plan(self._ahead_cursor))
        self._ahead_cursor = batch.samples.after
        return batch

    def _load(self, samples: GlobalBatch, plan: Plan) -> PlannedBatch:
        requests = self.requests(samples, plan)
        return self._filled(samples, plan, requests, map(self.loader.load, requests))

    def _from_workers(self) -> PlannedBatch:
        if self._stream is None:
            self._stream = self.loader.stream(self._all_requests(self.cursor))
        first = next(self._stream)  # plans the step, too
        samples, plan = self._queue[0]
        requests = self.requests(samples, plan)
        others = [next(self._stream) for _ in requests[1:]]
        self._queue.popleft()
        return self._filled(samples, plan, requests, iter([first, *others]))

    def _all_requests(self, cursor: Cursor) -> Iterator[Request]:
        while True:
            samples, plan = self.plan(cursor)
            self._queue.append((samples, plan))
            # Workers load nothing, once, where this rank has no share: else they would plan on.
            nothing = Request((), samples.epoch, 1, plan.packed)
            yield from self.requests(samples, plan) or [nothing]
            cursor = samples.after

    def _filled(
        self, samples: GlobalBatch, plan: Plan, requests: list[Request], loaded: Iterator[Fields]
    ) -> PlannedBatch:
        rank, step = self._world.rank, samples.after.step
        # The index runs over all ranks, so that the draws of a micro-batch do not depend on which
        # rank computes it.
        before = sum(len(slots) for slots in plan.ranks[:rank])
        micro_batches = []
        for index, (request, slot) in enumerate(zip(requests, plan.ranks[rank], strict=True)):
            fields = next(loaded)
            micro_batches.append(
                MicroBatch(
                    fields=fields,
                    ids=request.ids,
                    weights=weights_of(self._source.objective, fields),
                    num_tokens=int(plan.lengths[slot].sum()),
                    num_positions=plan.positions(rank, index),
                    rng_key=rng_key(self._seed, "draws", step, before + index),
                )
            )
        return PlannedBatch(
            step=step,
            samples=samples,
            plan=plan,
            micro_batches=tuple(micro_batches),
            sample_ids=tuple(self.dataset.original_ids(samples.ids).tolist()),
        )
