"""The way of the data: order -> global batch -> plan -> micro-batches, ahead of training.

Everything after "ids of step k" may be done again: restarts, other rank counts and replays under
smaller micro-batches all re-enter there. While a step computes, a thread plans and loads the next
ones, or processes do: several steps in a row, since Python that runs a few times in a row costs
half of what it costs once between two steps that have emptied the caches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from typing import final

from pydantic import TypeAdapter

from trainer.core.errors import DoesNotFitError
from trainer.core.micro_batch import Fields, MicroBatch
from trainer.core.stateful import State, Stateful
from trainer.core.world import World, rng_key
from trainer.data.loader import AHEAD, Request
from trainer.objectives.base import Objective, weights_of
from trainer.plan.cut import Cut, Layout, Plan
from trainer.plan.cuts import SampleTooLongError
from trainer.plan.order import Cursor, GlobalBatch
from trainer.training.data import Data

# A step larger than this is not loaded ahead, so that host memory never holds two of them.
PREFETCH_LIMIT_BYTES = 256 * 2**20
# Steps that the thread prepares in a row, at most, and what they may take together; one may take
# more.
STEPS_AHEAD = 8
BYTES_AHEAD = 16 * 2**20


@final
@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """One global batch, cut, with this rank's micro-batches at hand."""

    step: int  # the step it belongs to, from 1
    samples: GlobalBatch
    plan: Plan  # how it is cut, for every rank
    micro_batches: tuple[MicroBatch, ...]  # this rank's
    sample_ids: tuple[int, ...]  # of the global batch, in the user's own data set
    passed_ids: tuple[int, ...]  # likewise of what was passed over before it

    def largest_sample(self) -> tuple[int, int]:
        """Name the longest sample: its id and its length in tokens."""
        position = int(self.plan.lengths.argmax())
        return self.sample_ids[position], int(self.plan.lengths[position])

    @property
    def num_tokens(self) -> int:
        """Real input positions of the global batch."""
        return int(self.plan.lengths.sum())


@final
@dataclass(eq=False)
class Feed(Stateful):
    """Gives the planned batches of a run from a cursor on, with this rank's micro-batches."""

    data: Data
    objective: Objective  # counts the weights of a micro-batch
    cut: Cut
    layout: Layout
    world: World
    seed: int  # from which every random draw of a step follows
    cursor: Cursor  # behind the last batch that was taken
    # Cuts the samples of a step, by its number, otherwise than `cut` did
    recut: Callable[[Plan, Feed, int], Plan] = lambda plan, *_: plan

    def __post_init__(self) -> None:
        self._ahead: deque[Future[PlannedBatch]] = deque()
        self._ahead_cursor = self.cursor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._stream: Iterator[Fields] | None = None
        self._queue: deque[tuple[GlobalBatch, Plan]] = deque()
        self._last_bytes = 0

    def state(self) -> State:
        """See the base class."""
        return asdict(self.cursor)

    def load(self, state: State) -> None:
        """See the base class; before the first batch is taken."""
        cursor = TypeAdapter(Cursor).validate_python(dict(state))
        steps, samples = cursor.step + cursor.passed_steps, cursor.samples + cursor.passed
        if max(0, cursor.epoch) > steps or not 0 <= cursor.offset <= samples:
            raise ValueError(f"no steps lead to {cursor}")
        self.cursor = cursor

    def next(self) -> PlannedBatch:
        """Take the next global batch and move the cursor behind it."""
        batch = self._take()
        if batch.samples.size != self.data.order.size_of(batch.samples.before):
            self.use(self.cut)  # decided since it was prepared, as by a part with state
            batch = self._take()
        self.cursor = batch.samples.after
        self._last_bytes = sum(f.nbytes for m in batch.micro_batches for f in m.fields.values())
        return batch

    def prefetch(self) -> None:
        """Begin to plan and load the next global batches while the caller computes.

        Data that draw from the global generators are loaded when they are needed; what fails is
        raised by `next`, so that the step before comes to its end.
        """
        light = self._last_bytes <= PREFETCH_LIMIT_BYTES
        if light and self.data.loader.loads_in_thread and not self._ahead:
            self._ahead_cursor = self.cursor
            fitting = max(1, BYTES_AHEAD // max(1, self._last_bytes))
            for _ in range(min(STEPS_AHEAD, fitting)):
                self._ahead.append(self._thread.submit(self._load_ahead))

    def plan(self, cursor: Cursor) -> tuple[GlobalBatch, Plan]:
        """Cut the global batch at a cursor; a pure function of cursor, cut and layout."""
        samples = self.data.order.next(cursor)
        try:
            plan = self.cut.cut(self.data.lengths[samples.ids], self.layout)
            plan = self.recut(plan, self, samples.after.step)
        except SampleTooLongError as error:
            (sample,) = self.data.loader.dataset.original_ids(samples.ids[[error.position]])
            raise DoesNotFitError(
                f"sample {sample} of {error.length} tokens{self.layout.group_note} does not fit: "
                f"memory allows {error.cap} in one micro-batch; lower data.max_length"
            ) from error
        plan.check(self.layout)
        return samples, plan

    def requests(self, samples: GlobalBatch, plan: Plan) -> list[Request]:
        """Name what this rank loads for a step, one request per micro-batch."""
        rank = self.world.rank
        return [
            Request(tuple(samples.ids[slot].tolist()), samples.epoch, length, plan.packed)
            for slot, length in zip(plan.ranks[rank], plan.padded_lengths[rank], strict=True)
        ]

    def pause(self) -> None:
        """Prepare nothing but what has begun, and wait for it: nothing else then reads the data."""
        while self._ahead and self._ahead[-1].cancel():
            self._ahead.pop()
        wait(self._ahead)

    def smaller(self, batch: PlannedBatch) -> PlannedBatch | None:
        """Cut a global batch, and all that follow, smaller; None at one sample per micro-batch."""
        cut = self.cut.smaller(batch.plan)
        if cut is None:
            return None
        self.use(cut)
        return self._load(batch.samples, cut.cut(batch.plan.lengths, self.layout))

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
        self.data.loader.close()

    def _take(self) -> PlannedBatch:
        """Take what was prepared, or prepare it now."""
        if self.data.loader.num_workers:
            return self._from_workers()
        return (
            self._ahead.popleft().result() if self._ahead else self._load(*self.plan(self.cursor))
        )

    def _load_ahead(self) -> PlannedBatch:
        """Load what follows the last that was loaded, in the thread."""
        batch = self._load(*self.plan(self._ahead_cursor))
        self._ahead_cursor = batch.samples.after
        return batch

    def _load(self, samples: GlobalBatch, plan: Plan) -> PlannedBatch:
        requests = self.requests(samples, plan)
        return self._fill(samples, plan, requests, map(self.data.loader.load, requests))

    def _from_workers(self) -> PlannedBatch:
        if self._stream is None:
            coming = self._all_requests(self.cursor)
            self._stream = self.data.loader.stream(coming, self._requests_ahead())
        first = next(self._stream)  # `_all_requests` plans the step, and queues it
        samples, plan = self._queue[0]
        requests = self.requests(samples, plan)
        others = [next(self._stream) for _ in requests[1:]]
        self._queue.popleft()
        return self._fill(samples, plan, requests, [first, *others])

    def _requests_ahead(self) -> int:
        """Choose how far each worker runs ahead: all together a step and more, of bounded size."""
        loader, requests = self.data.loader, self.requests(*self.plan(self.cursor))
        if len(requests) <= loader.num_workers:
            return AHEAD
        first = requests[0]
        fields = loader.load(replace(first, ids=first.ids[:1])).values()
        nbytes = sum(field.nbytes for field in fields) * (1 if first.packed else len(first.ids))
        fitting = PREFETCH_LIMIT_BYTES // max(1, nbytes * loader.num_workers)
        return max(AHEAD, min(AHEAD + (len(requests) - 1) // loader.num_workers, fitting))

    def _all_requests(self, cursor: Cursor) -> Iterator[Request]:
        while True:
            samples, plan = self.plan(cursor)
            self._queue.append((samples, plan))
            # Workers load nothing, once, where this rank has no share: else they would plan on.
            nothing = Request((), samples.epoch, 1, plan.packed)
            yield from self.requests(samples, plan) or [nothing]
            cursor = samples.after

    def _fill(
        self, samples: GlobalBatch, plan: Plan, requests: list[Request], loaded: Iterable[Fields]
    ) -> PlannedBatch:
        """Put fields, weights and the keys of random draws into this rank's micro-batches."""
        rank, step = self.world.rank, samples.after.step
        # The index runs over all ranks, so that the draws of a micro-batch do not depend on which
        # rank computes it.
        before = sum(map(len, plan.ranks[:rank]))
        # A rank without micro-batches still gets an empty one from its workers.
        each = zip(requests, plan.ranks[rank], loaded, strict=False)
        micro_batches = tuple(
            MicroBatch(
                fields=fields,
                ids=request.ids,
                positions=tuple(slot.tolist()),
                weights=weights_of(self.objective, fields),
                num_tokens=int(plan.lengths[slot].sum()),
                num_positions=plan.positions(rank, index),
                rng_key=rng_key(self.seed, "draws", step, before + index),
            )
            for index, (request, slot, fields) in enumerate(each)
        )
        original_ids = self.data.loader.dataset.original_ids
        return PlannedBatch(
            step=step,
            samples=samples,
            plan=plan,
            micro_batches=micro_batches,
            sample_ids=tuple(original_ids(samples.ids).tolist()),
            passed_ids=tuple(original_ids(samples.passed).tolist()),
        )
