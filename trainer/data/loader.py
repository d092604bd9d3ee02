"""From requests for sample ids to collated fields, the same for every number of workers."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer.core.errors import DataError, TrainError
from trainer.core.micro_batch import Fields
from trainer.core.out_of_memory import is_out_of_memory
from trainer.core.world import rng_key
from trainer.data.collate import IGNORED_LABEL, INPUT_IDS, LABELS, Sample, aligned_fields, pack, pad
from trainer.data.files import progress
from trainer.data.limits import Limits, check_length, limits_of, states_lengths
from trainer.data.samples import (
    Samples,
    draws_randomness,
    fault,
    faults_of,
    isolated_rng,
    name_of,
    offered,
    origin_of,
    original_ids,
    read_sample,
    seed_draws,
    unfit_field,
)
from trainer.plan.cut import IntArray

Collate = Callable[[Sequence[Sample]], Any]


@final
@dataclass(frozen=True, slots=True)
class Request:
    """The samples of one micro-batch.

    Attributes:
        ids: sample ids, in order; none for a micro-batch that only fills a count, which has zero
            rows, or under `packed` one row without a label.
        epoch: from 0; selects the draws of augmentations.
        pad_to: tokens that every sequence is padded to, or positions of the packed row. Data
            without tokens, and a data set's own `collate`, do not heed it.
        packed: lay the samples end to end in one row.
    """

    ids: tuple[int, ...]
    epoch: int
    pad_to: int
    packed: bool = False


@final
class Loader:
    """Loads micro-batches of one data set, in this process or ahead in workers.

    What a request gives depends on (data set, seed, request) alone: every sample that may draw
    random numbers is read under generators seeded by (seed, epoch, id), and a `collate` of the
    data set's own under ones seeded by all its ids. The generators of this process stay as
    they were.

    Args:
        dataset: to read from.
        num_workers: loading processes; 0 loads in this one.
        seed: the run's.
        pin_memory: put fields into page-locked memory, for copies to a GPU.
        limits: what token ids and labels must be below.

    Attributes:
        dataset: as given.
        num_workers: as given.
        loads_in_thread: whether `load` may run in a thread beside training; not where it seeds
            the generators that training draws from.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        num_workers: int,
        seed: int,
        pin_memory: bool = False,
        limits: Limits = Limits(),  # noqa: B008 - frozen
    ) -> None:
        self._assemble = _Assembler(dataset, seed, limits)
        self.dataset = dataset
        self.num_workers = num_workers
        self.loads_in_thread = num_workers == 0 and not draws_randomness(dataset)
        self._pin_memory = pin_memory
        self._source = _Source()
        self._workers: DataLoader[Fields | _Failure] | None = None

    def load(self, request: Request) -> Fields:
        """Load one micro-batch in this process.

        Raises:
            DataError: a sample cannot be read or joined with the others; names it.
        """
        fields = self._assemble(request)
        if self._pin_memory:
            return {name: field.pin_memory() for name, field in fields.items()}
        return fields

    @contextmanager
    def naming_samples(
        self, request: Request, settle: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Name the sample whose token id or label a model or a loss has failed to look up.

        Args:
            request: what is computed on; read again, in this process.
            settle: lets nothing else read the data meanwhile.

        Yields:
            Nothing.

        Raises:
            DataError: in place of the failure.
            Exception: as raised inside, where it is anything else.
        """
        try:
            yield
        except Exception as error:
            limits = limits_of(error)
            if limits is not None:
                settle()
                replace(self._assemble, limits=limits)(request)
            raise

    def stream(self, requests: Iterator[Request]) -> Iterator[Fields]:
        """Load micro-batches in the order of their requests.

        Workers run ahead: `requests` is then drawn from by up to two requests a worker before
        they are asked for. A stream that begins ends the one before it.

        Args:
            requests: drawn from in this process, lazily.

        Yields:
            The fields of each.

        Raises:
            DataError: a sample cannot be read or joined with the others, or a worker died.
            RuntimeError: PyTorch's loader failed for another reason.
        """
        if self.num_workers == 0:
            yield from map(self.load, requests)
            return
        self._source.requests = requests
        try:
            for fields in self._started():
                if isinstance(fields, _Failure):
                    raise fields.error
                yield fields
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DataError(
                f"data: a loading process was lost: {' '.join(str(error).split())}; "
                f"num_workers=0 loads without"
            ) from error

    def close(self) -> None:
        """Stop the workers. A later stream starts them again."""
        running = getattr(self._workers, "_iterator", None)
        self._workers = None
        if running is not None:
            running._shutdown_workers()
            for worker in running._workers:
                if worker.is_alive():
                    # It ignores SIGTERM, and a data set may hang.
                    worker.kill()

    def _started(self) -> DataLoader[Fields | _Failure]:
        if self._workers is None:
            self._workers = DataLoader(
                _WorkerSide(self._assemble.prepared()),
                batch_size=None,
                sampler=self._source,
                num_workers=self.num_workers,
                collate_fn=_unchanged,
                pin_memory=self._pin_memory,
                worker_init_fn=_ignore_signals,
                persistent_workers=True,
                # Workers are seeded per sample; the global generator must not be drawn from.
                generator=torch.Generator(),
            )
        return self._workers


def lengths_of(dataset: Samples) -> IntArray:
    """Give the tokens of every sample: what planning and `batch.unit=tokens` count.

    Its `lengths`; else 1 each where the first sample has no one-dimensional `input_ids`; else
    measured by reading every sample once, and remembered for as long as the data set lives.

    Returns:
        `(samples,)` int64, every entry at least 1.

    Raises:
        DataError: `lengths` does not match the data set, or a sample is empty or unreadable.
    """
    lengths = offered(dataset, "lengths")
    if lengths is None:
        return _measured_lengths(dataset)
    with faults_of(f"`lengths` of {type(dataset).__name__}"):
        checked = np.asarray(lengths)
    if checked.shape != (len(dataset),) or checked.dtype.kind not in "iu":
        raise DataError(
            f"data: `lengths` of {type(dataset).__name__} has shape {checked.shape} and dtype "
            f"{checked.dtype}; it must be one integer for each of its {len(dataset)} samples"
        )
    _refuse_empty(dataset, checked)
    return checked.astype(np.int64, copy=False)


_remembered: dict[int, tuple[weakref.ref[Samples], IntArray]] = {}
"""Measured lengths by the identity of their data set, which need not be hashable."""


def _measured_lengths(dataset: Samples) -> IntArray:
    known = _remembered.get(id(dataset))
    if known is not None and known[0]() is dataset:
        return known[1]
    with isolated_rng(dataset):
        lengths = _measure(dataset)
    _refuse_empty(dataset, lengths)
    key = id(dataset)
    # What takes no weak references (slots) is measured again where it must be.
    with suppress(TypeError):
        _remembered[key] = weakref.ref(dataset, lambda _: _remembered.pop(key, None)), lengths
    return lengths


def _measure(dataset: Samples) -> IntArray:
    count = len(dataset)
    lengths = np.ones(count, dtype=np.int64)
    if count == 0 or _length(read_sample(dataset, 0, seed=0, epoch=0)) is None:
        return lengths
    label = f"measuring {count} samples of {type(dataset).__name__}, which has no `lengths`"
    with progress(label, count) as advance:
        for i in range(count):
            length = _length(read_sample(dataset, i, seed=0, epoch=0))
            if length is None:
                raise DataError(f"data: {name_of(dataset, i)} lacks one-dimensional `input_ids`")
            lengths[i] = length
            advance(1)
    return lengths


def _length(sample: Sample) -> int | None:
    tokens = sample.get(INPUT_IDS)
    return len(tokens) if tokens is not None and tokens.dim() == 1 else None


def _refuse_empty(dataset: Samples, lengths: IntArray) -> None:
    if len(lengths) and lengths.min() < 1:
        i = int(lengths.argmin())
        raise DataError(
            f"data: {name_of(dataset, i)} has length {lengths[i]}; at least 1 is needed"
        )


@final
@dataclass(frozen=True)
class _Assembler:
    """Reads and collates the samples of a request; the same in every process."""

    dataset: Samples
    seed: int
    limits: Limits

    def __call__(self, request: Request) -> Fields:
        if not request.ids:
            return self._blank(request)

        def name(position: int) -> str:
            return name_of(self.dataset, request.ids[position])

        with isolated_rng(self.dataset):
            samples = [
                read_sample(self.dataset, i, seed=self.seed, epoch=request.epoch)
                for i in request.ids
            ]
            self._check_lengths(request.ids, samples)
            if self._collate is not None:
                fields = self._collated(self._collate, samples, request)
            else:
                join = pack if request.packed else pad
                fields = join(samples, self._aligned, request.pad_to, name)
        fault = self.limits.fault(fields)
        if fault is not None:
            faults = ((name(k), self.limits.fault(sample)) for k, sample in enumerate(samples))
            own = f"`collate` of {type(origin_of(self.dataset)).__name__}", fault
            raise DataError("data: {}: {}".format(*next((f for f in faults if f[1]), own)))
        return fields

    def _check_lengths(self, ids: Sequence[int], samples: Sequence[Sample]) -> None:
        """Compare samples with what the data set states, by which they are planned.

        Raises:
            DataError: one has another length.
        """
        if self._stated is None or self._collate is not None:  # which may add or cut tokens
            return
        for i, sample in zip(ids, samples, strict=True):
            tokens = _length(sample)
            counts = [] if tokens is None else [tokens]
            if INPUT_IDS not in sample:
                fields = [sample[name] for name in self._aligned if name in sample]
                counts = [len(field) for field in fields if field.dim()]
            check_length(self.dataset, i, counts, int(self._stated[i]))

    def _blank(self, request: Request) -> Fields:
        """Make fields of zero weight, like those of the first sample in all else."""
        pad_to = int(lengths_of(self.dataset)[0])
        fields = self(replace(request, ids=(0,), pad_to=pad_to))
        if request.packed:
            return {**fields, LABELS: torch.full_like(fields[LABELS], IGNORED_LABEL)}
        return {name: field[:0] for name, field in fields.items()}

    def prepared(self) -> _Assembler:
        """Settle what is found out only once, so that no worker has to."""
        self._stated  # noqa: B018 - computes and keeps it
        if self._collate is None:
            self._aligned  # noqa: B018 - likewise
        return self

    @property
    def _collate(self) -> Collate | None:
        collate: Collate | None = offered(self.dataset, "collate")
        return collate

    @cached_property
    def _stated(self) -> IntArray | None:
        """The lengths that the data set itself states, of what may be a part of it."""
        return lengths_of(self.dataset) if states_lengths(self.dataset) else None

    @cached_property
    def _aligned(self) -> frozenset[str]:
        """The fields with one entry per token, told by the shortest and the longest sample."""
        lengths = lengths_of(self.dataset)
        if len(lengths) == 0:
            return frozenset()
        ids = [int(lengths.argmin()), int(lengths.argmax())]
        with isolated_rng(self.dataset):
            samples = [read_sample(self.dataset, i, seed=self.seed, epoch=0) for i in ids]
        counted = [_length(sample) for sample in samples]
        if None in counted and lengths.max() == 1:
            return frozenset()
        tokens = [
            int(lengths[i]) if count is None else count
            for i, count in zip(ids, counted, strict=True)
        ]
        return aligned_fields(samples, tokens)

    def _collated(self, collate: Collate, samples: list[Any], request: Request) -> Fields:
        if draws_randomness(self.dataset):
            seed_draws(rng_key(self.seed, request.epoch, "collate", *request.ids))
        place = f"`collate` of {type(origin_of(self.dataset)).__name__}"
        ids = ", ".join(map(str, original_ids(self.dataset, request.ids[:3])))
        with faults_of(f"{place}, on {len(samples)} samples ({ids}, ...)"):
            fields = collate(samples)
        if not isinstance(fields, Mapping) or not all(
            isinstance(field, Tensor) for field in fields.values()
        ):
            raise DataError(f"data: {place} must return a mapping from names to tensors")
        unfit = unfit_field(fields)
        if unfit is not None:
            raise DataError(f"data: {place}: {unfit}")
        return fields


@final
@dataclass(frozen=True, slots=True)
class _Failure:
    """An error on its way from a worker: raised there, it would arrive as a long traceback."""

    error: TrainError


@final
class _WorkerSide(Dataset[Any]):
    """What workers index: by requests, not by ids."""

    def __init__(self, assemble: _Assembler) -> None:
        self._assemble = assemble

    def __getitem__(self, request: Request) -> Fields | _Failure:
        try:
            return self._assemble(request)
        except TrainError as error:
            return _Failure(error)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return _Failure(fault("a loading process", error))


@final
class _Source(Sampler[Any]):
    """Hands the current stream's requests to the workers, which outlive it."""

    requests: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.requests


def _unchanged(fields: Any) -> Any:  # noqa: ANN401 - passes what it is given
    return fields


def _ignore_signals(_: int) -> None:
    """Leave it to the main process to stop: Ctrl-C reaches the whole process group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
