"""Load the collated fields of requested samples, the same for every number of workers."""

from __future__ import annotations

import copy
import signal
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.connection import wait
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer.core.errors import DataError, TrainError
from trainer.core.micro_batch import IGNORED, Fields
from trainer.core.out_of_memory import is_out_of_memory
from trainer.core.signals import SIGNALS
from trainer.core.user_code import described
from trainer.core.world import rng_key
from trainer.data.collate import (
    ATTENTION_MASK,
    LABELS,
    Limits,
    aligned_fields,
    num_rows,
    pack_samples,
    pad_samples,
    value_out_of_range,
)
from trainer.data.samples import (
    INPUT_IDS,
    Sample,
    Samples,
    as_tensors,
    faults_of,
    num_tokens,
    preserve_generators,
    seed_cpu_draws,
)
from trainer.data.view import DataView

PROBED = 8  # samples that show which fields have one entry per token
_AUGMENT = "`augment` of the data"
DYING_S = 1.0  # until a process whose pipe has closed is known to be dead
PrepareFields = Callable[[dict[str, Tensor]], Mapping[str, Any]]
"""Gives a sample as an objective takes it, with as many tokens."""
AHEAD = 2  # requests that a worker, or the thread, loads at least before they are asked for


@final
@dataclass(frozen=True, slots=True)
class Request:
    """The samples of one micro-batch."""

    # Sample ids, in order; none for a micro-batch that only fills a count, which has zero rows, or
    # under `packed` one row without a label
    ids: tuple[int, ...]
    epoch: int  # from 0; selects the draws of augmentations
    # Tokens that every sequence is padded to, or positions of the packed row. Data without tokens,
    # and a data set's own `collate`, do not heed it.
    pad_to: int
    packed: bool = False  # lay the samples end to end in one row


@final
class Loader(Dataset[Any]):
    """Loads micro-batches of one data set, in this process or ahead in workers.

    What a request gives depends on (data set, seed, request) alone: a sample that may draw random
    numbers is read, and one that the data set's `augment` or an objective changes is changed, under
    generators seeded by (seed, epoch, id), a `collate` of the data set's own under ones seeded by
    all ids. The generators of this process stay as they were. `limits` are what token ids and
    labels must be below.
    """

    def __init__(
        self,
        dataset: Samples | DataView,
        *,
        num_workers: int,
        seed: int,
        pin_memory: bool = False,
        limits: Limits | None = None,
    ) -> None:
        # First, since a loading process that is not forked unpickles the user's classes behind it.
        self.dataset = DataView.of(dataset)
        self.num_workers, self.seed = num_workers, seed
        self.limits, self._unaligned = limits or {}, frozenset[str]()
        # What changes a sample once it is read, in order, by who asks for it
        self._changes = dict[str, PrepareFields]()
        self._pin_memory = pin_memory
        self._sampler = _RequestSampler()
        self._workers: DataLoader[Fields | Exception] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # What a loading process needs
        return {**vars(self), "_sampler": None, "_workers": None}

    def load(self, request: Request) -> Fields:
        """Load one micro-batch in this process; a DataError names what cannot be read or joined."""
        fields = self._assembled(request)
        if not self._pin_memory:
            return fields
        return {name: field.pin_memory() for name, field in fields.items()}

    def longest(self) -> Request:
        """Ask for the longest sample alone."""
        lengths = self.dataset.lengths
        return Request(ids=(lengths.argmax(),), epoch=0, pad_to=lengths.max())

    def of(self, dataset: DataView, num_workers: int) -> Loader:
        """Make a loader of another data set, the same in all else."""
        aligned, loader = self.aligned, copy.copy(self)
        loader.dataset, loader.num_workers, loader.aligned = dataset, num_workers, aligned
        loader._changes = {**self._changes}
        loader._changes.pop(_AUGMENT, None)
        loader._sampler, loader._workers = _RequestSampler(), None
        return loader

    @property
    def draws_randomness(self) -> bool:
        """Whether loading seeds the generators that training draws from."""
        return self.dataset.facts.draws_randomness or bool(self._changes)

    @property
    def loads_in_thread(self) -> bool:
        """Whether `load` may run in a thread beside training."""
        return self.num_workers == 0 and not self.draws_randomness

    def augment_with(self, augment: PrepareFields | None) -> None:
        """Change every sample before an objective does; before a stream begins.

        Loaders that are made `of` this one do not: they load what is evaluated.
        """
        self._change(_AUGMENT, augment)

    def prepare_with(self, prepare: PrepareFields | None) -> None:
        """Change every sample before collation; before a stream begins."""
        self._change("`prepare` of the objective", prepare)

    def _change(self, owner: str, change: PrepareFields | None) -> None:
        if change is not None:
            self._changes[owner] = change
        vars(self).pop("aligned", None)

    def leave_unaligned(self, names: Collection[str]) -> None:
        """Let fields have lengths of their own, as labels of an encoder-decoder have them."""
        self._unaligned = frozenset(names)
        vars(self).pop("aligned", None)

    @property
    def makes_mask(self) -> bool:
        """Whether `attention_mask` comes from padding, and not from the data."""
        return self.aligned & {INPUT_IDS, ATTENTION_MASK} == {INPUT_IDS}

    def limit(self, limits: Limits) -> None:
        """Bound ids or labels; before a stream begins, whose workers know no more."""
        self.limits = {**limits, **self.limits}

    def stream(self, requests: Iterator[Request], ahead: int = AHEAD) -> Generator[Fields]:
        """Load micro-batches in the order of their requests.

        Workers draw `ahead` requests each, in this process, before those are asked for; without
        workers a thread draws `AHEAD`, if it may. A stream that begins ends the one before it. A
        sample that cannot be read or joined, or a worker that died, is a DataError.
        """
        if self.num_workers == 0:
            if self.loads_in_thread:
                yield from self._ahead(requests)
            else:
                yield from map(self.load, requests)
            return
        self._sampler.requests = requests
        try:
            for fields in begin_loading(self._started(ahead)):
                if isinstance(fields, Exception):
                    raise fields  # raised in a worker it would arrive as a long traceback
                yield fields
        except Exception as error:
            is_gone = isinstance(error, OSError | EOFError) or "DataLoader worker" in str(error)
            if isinstance(error, TrainError) or not (is_gone or self._deaths()):
                raise
            raise DataError(
                f"data: a DataLoader worker died: {self._deaths() or described(error)}; "
                "num_workers=0 loads in the main process"
            ) from error

    def _deaths(self) -> str:
        """Say how loading processes ended that were to go on."""
        running = self._running
        if running is None:
            return ""
        workers, codes = running._workers, list[int]()
        ended = wait([worker.sentinel for worker in workers], DYING_S)
        for worker in workers:
            if worker.sentinel in ended:
                worker.join()  # its pipe closes a moment before it has an exit code
        for worker in workers:
            if worker.exitcode is not None:
                codes.append(worker.exitcode)
        if -signal.SIGKILL in codes:
            return "it was killed (SIGKILL), as happens when the host's memory runs out"
        if codes:
            return f"it ended with exit code {codes[0]}"
        return ""

    def _ahead(self, requests: Iterator[Request]) -> Iterator[Fields]:
        """Load in a thread."""
        waiting: deque[Future[Fields]] = deque()
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as thread:
            try:
                for request in requests:
                    waiting.append(thread.submit(self.load, request))
                    if len(waiting) > AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                thread.shutdown(wait=False, cancel_futures=True)

    @property
    def _running(self) -> Any:  # noqa: ANN401 - a class of PyTorch's own
        """Give what owns the workers; PyTorch has no public way to stop persistent ones."""
        return None if self._workers is None else self._workers._iterator

    def close(self) -> None:
        """Stop the workers. A later stream starts them again."""
        running, self._workers = self._running, None
        if running is not None:
            with suppress(OSError, EOFError, RuntimeError):  # of one that has died
                running._shutdown_workers()
            for worker in running._workers:
                if worker.is_alive():
                    # It ignores SIGTERM, and a data set may hang.
                    worker.kill()

    def _started(self, ahead: int) -> DataLoader[Fields | Exception]:
        if self._workers is not None and (self._workers.prefetch_factor or 0) < ahead:
            self.close()  # PyTorch reads the factor once
        if self._workers is None:
            self.aligned  # noqa: B018 - computed here, no worker has to
            self._workers = DataLoader(
                self,
                batch_size=None,
                sampler=self._sampler,
                num_workers=self.num_workers,
                prefetch_factor=ahead,
                pin_memory=self._pin_memory,
                worker_init_fn=ignore_signals,
                persistent_workers=True,
                # Workers are seeded per sample; the global generator must not be drawn from.
                generator=torch.Generator(),
            )
        return self._workers

    def _assembled(self, request: Request) -> Fields:
        """Read and collate the samples of a request."""
        if not request.ids:
            return self._blank(request)
        data, ids = self.dataset, request.ids

        def name(position: int) -> str:
            return data.name_of(ids[position])

        with self._isolated():
            samples = self._prepared(ids, request.epoch)
            data.check_lengths(ids, samples, self.aligned)
            if data.facts.collate is not None:
                fields = self._collated(data.facts.collate, samples, request)
            else:
                join = pack_samples if request.packed else pad_samples
                pad_token = data.facts.pad_token_id or 0
                fields = join(samples, self.aligned, request.pad_to, name, pad_token)
        if fault := value_out_of_range(fields, self.limits):
            for k, sample in enumerate(samples):
                if own := value_out_of_range(sample, self.limits):
                    raise DataError(f"data: {name(k)}: {own}")
            raise DataError(f"data: `collate` of {data.kind}: {fault}")
        return fields

    def __getitem__(self, request: Request) -> Fields | Exception:
        """Load in a worker, which indexes by requests in place of ids."""
        try:
            return self._assembled(request)
        except Exception as error:
            if isinstance(error, TrainError) or is_out_of_memory(error):
                return error
            raise

    def _blank(self, request: Request) -> Fields:
        """Make fields of zero weight, like those of the first sample in all else."""
        fields = self._assembled(replace(request, ids=(0,), pad_to=int(self.dataset.lengths[0])))
        if request.packed:
            return {**fields, LABELS: torch.full_like(fields[LABELS], IGNORED)}
        return {name: field[:0] for name, field in fields.items()}

    @cached_property
    def aligned(self) -> frozenset[str]:
        """The fields with one entry per token, as the shortest, the longest and others show."""
        data, lengths = self.dataset, self.dataset.lengths
        if len(lengths) == 0 or data.facts.collate is not None:
            return frozenset()
        samples, tokens = list[dict[str, Tensor]](), list[int]()
        with self._isolated():
            looked_at = lengths.argmin(), lengths.argmax(), *data.spaced(PROBED)
            for i, found in data.probe(looked_at, seed=self.seed):
                sample = self._as_prepared(i, found, epoch=0)
                count = num_tokens(sample)
                if count is None and lengths.max() == 1:
                    return frozenset()
                if count is None:
                    count = int(lengths[i])
                samples.append(sample)
                tokens.append(count)
        return aligned_fields(samples, tokens) - self._unaligned

    @contextmanager
    def _isolated(self) -> Iterator[None]:
        """Restore the global generators in the end, where anything here seeds them."""
        preserved: AbstractContextManager[None] = nullcontext()
        if self._changes:
            preserved = preserve_generators()
        with preserved, self.dataset.isolated_rng():
            yield

    def _prepared(self, ids: Sequence[int], epoch: int) -> list[dict[str, Tensor]]:
        """Read samples, and change them as augmentations and the objective ask."""
        samples = self.dataset.read_each(ids, seed=self.seed, epoch=epoch)
        if not self._changes:
            return samples
        return [self._as_prepared(*each, epoch) for each in zip(ids, samples, strict=True)]

    def _as_prepared(self, i: int, sample: dict[str, Tensor], epoch: int) -> dict[str, Tensor]:
        for owner, change in self._changes.items():
            place = f"{owner}, on {self.dataset.name_of(i)}"
            # Draws of its own, and not once more those that the data set had.
            seed_cpu_draws(rng_key(self.seed, epoch, i, owner.split("`")[1]))
            with faults_of(place):
                sample = as_tensors(dict(change(sample)), lambda place=place: place)  # type: ignore[misc] # mypy infers no lambda with a default
        return sample

    def _collated(
        self, collate: Callable[[Sequence[Sample]], Any], samples: list[Any], request: Request
    ) -> Fields:
        data = self.dataset
        if data.facts.draws_randomness:
            data.seed_draws(self.seed, request.epoch, "collate", *request.ids)
        place = f"`collate` of {data.kind}"
        ids = ", ".join(map(str, data.original_ids(request.ids[:3])))
        with faults_of(f"{place}, on {len(samples)} samples ({ids}, ...)"):
            fields = collate(samples)
        if not isinstance(fields, Mapping) or not all(
            isinstance(field, Tensor) for field in fields.values()
        ):
            raise DataError(f"data: {place} must return a mapping from names to tensors")
        rows, count = num_rows(fields, samples), len(samples)
        if rows < count:
            raise DataError(
                f"data: {place} gives {rows} rows for {count} samples ({ids}, ...): give one for "
                "each, or all of them end to end in one row"
            )
        return as_tensors(fields, lambda: place)


@final
class _RequestSampler(Sampler[Any]):
    """Hands the current stream's requests to the workers, which outlive it."""

    requests: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.requests


def begin_loading(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start the workers of a loader, and leave SIGCHLD to whom it is.

    PyTorch's handler raises wherever the main thread is, as within an update of the weights.
    """
    before = signal.getsignal(signal.SIGCHLD)
    loaded: Iterator[Any] = iter(loader)
    if signal.getsignal(signal.SIGCHLD) is not before:
        signal.signal(signal.SIGCHLD, before)
    return loaded


def ignore_signals(_: int) -> None:
    """Leave it to the main process to stop: a terminal's signals reach the whole process group."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
