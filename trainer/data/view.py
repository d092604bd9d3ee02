"""See a data set as the trainer does: the one place that reads what a data set offers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.core.errors import DataError, TrainError
from trainer.core.generators import generators_in, reseed
from trainer.core.stateful import DRAWN
from trainer.core.tensors import bits_of
from trainer.core.world import rng_key
from trainer.data.files import progress
from trainer.data.samples import (
    DataFacts,
    DataRecord,
    Sample,
    Samples,
    as_tensors,
    data_facts,
    faults_of,
    num_tokens,
    preserve_generators,
    raise_fault,
    seed_cpu_draws,
)
from trainer.plan.cut import IntArray
from trainer.plan.lengths import IdsOf, Lengths

MOST_SAMPLES = 2**32
"""What the permutation of an epoch takes."""
PROBES = 64
"""Samples that stand for the contents of a data set in its fingerprint."""


@final
class DataView:
    """A data set, or some of its samples.

    A view has `count` samples; `ids_of` gives their positions in the data set, the same by default,
    and `settings` say what selected them, for the fingerprint. The attribute `dataset` is what the
    user wrote, and `num_skipped` counts the bad records that it left out, on both sides of a split.
    """

    def __init__(
        self,
        dataset: Samples | DataView,
        count: int | None = None,
        ids_of: IdsOf | None = None,
        settings: str = "",
    ) -> None:
        self._whole: DataView | None = None
        self.dataset: Samples
        if isinstance(dataset, DataView):
            self._whole, self.dataset = dataset, dataset.dataset
        else:
            self.dataset = dataset
        self._settings, self._ids_of = settings, ids_of
        self._generators: Mapping[str, Any] = {}
        self.kind = type(self.dataset).__name__
        if count is None:
            with faults_of(f"`__len__` of {self.kind}"):
                count = len(dataset)
        self._count = count
        if self._count > MOST_SAMPLES:
            raise DataError(
                f"data: `__len__` of {self.kind} gives {self._count}, and a data set has at most "
                f"{MOST_SAMPLES} samples: streams without a length are not supported"
            )
        known = self.facts if self._whole is None else self._whole
        self.num_skipped: int = int(known.num_skipped)
        self.skipped: Sequence[str] = known.skipped or ()

    @classmethod
    def of(cls, dataset: Samples | DataView) -> DataView:
        """Give a view of all of a data set; of a view itself."""
        return dataset if isinstance(dataset, DataView) else cls(dataset)

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        # Facts may hold functions that have no name to be unpickled by; they are asked for again.
        state = dict(vars(self))
        state.pop("facts", None)
        return state

    @cached_property
    def facts(self) -> DataFacts:
        """What is known of the whole data set, asked for once."""
        if self._whole is not None:
            return self._whole.facts
        return data_facts(self.dataset)

    def ids(self, positions: IntArray) -> IntArray:
        """Turn positions in this view into indices of the data set as the user wrote it."""
        if self._ids_of is not None:
            positions = self._ids_of(positions)
        if self._whole is not None:
            positions = self._whole.ids(positions)
        return positions

    @cached_property
    def sources(self) -> Mapping[str, IntArray]:
        """Positions of the samples of each source by its name; none where the data state none."""
        names, own = self._source_of_each
        return {name: np.flatnonzero(own == number) for number, name in enumerate(names)}

    def source_of(self, i: int) -> str | None:
        """Name the source of a sample; None where the data state none."""
        names, own = self._source_of_each
        return names[int(own[i])] if names else None

    def source_counts(self, positions: IntArray) -> dict[str, int]:
        """Count the samples of each source among some, by figures; none where none is stated."""
        names, own = self._source_of_each
        if not names:
            return {}
        counts = np.bincount(own[positions], minlength=len(names)).tolist()
        return {f"{DRAWN}{name}": count for name, count in zip(names, counts, strict=True)}

    @cached_property
    def _source_of_each(self) -> tuple[Sequence[str], npt.NDArray[Any]]:
        """The names of the sources, none where the data state none, and that of each sample."""
        names, own = self.facts.source_names, self.facts.source_ids
        if names is None or own is None:
            return (), np.zeros(0, dtype=np.int64)
        return names, np.asarray(own)[self.ids(np.arange(len(self)))]

    @cached_property
    def lengths(self) -> Lengths:
        """Tokens of each sample, at least 1: what planning counts.

        The data set's `lengths`; else 1 each where the first sample has no one-dimensional
        `input_ids`; else measured by reading every sample once.
        """
        if self._whole is not None:
            return self._whole.lengths.part(self._ids_of, self._count)
        stated = self.facts.lengths
        if stated is None:
            lengths = Lengths(self._measured())
        else:
            with faults_of(f"`lengths` of {self.kind}"):
                found = np.asarray(stated)
            if found.shape != (len(self),) or found.dtype.kind not in "iu":
                raise DataError(
                    f"data: `lengths` of {self.kind} has shape {found.shape} and dtype "
                    f"{found.dtype}; it must be one integer for each of its {len(self)} samples"
                )
            lengths = Lengths(found)
        if len(lengths) and lengths.min() < 1:
            text = f"has length {lengths.min()}; at least 1 is needed"
            raise DataError(f"data: {self.name_of(lengths.argmin())} {text}")
        return lengths

    def _measured(self) -> IntArray:
        with self.isolated_rng():
            if len(self) == 0 or num_tokens(self.read(0, seed=0, epoch=0)) is None:
                return np.broadcast_to(np.int64(1), (len(self),))
            lengths = np.ones(len(self), dtype=np.int64)
            label = f"measuring {self.kind}, which has no `lengths`"
            with progress(label, len(self)) as advance:
                for i in range(len(self)):
                    length = num_tokens(self.read(i, seed=0, epoch=0))
                    if length is None:
                        raise DataError(
                            f"data: {self.name_of(i)} lacks one-dimensional `input_ids`"
                        )
                    lengths[i] = length
                    advance()
        return lengths

    def check_lengths(
        self, positions: Sequence[int], samples: Sequence[Sample], aligned: Collection[str] = ()
    ) -> None:
        """Compare samples, as they were read, with the lengths that planning counts."""
        if self.facts.lengths is not None and self.facts.collate is not None:
            return  # which may add or cut tokens
        planned = self.lengths[np.array(positions)].tolist()
        for i, length, sample in zip(positions, planned, samples, strict=True):
            tokens = num_tokens(sample)
            if tokens is not None and tokens != length:
                why = (
                    f"had {length} when it was measured: it changes from read to read; crop to one "
                    "length, or give the data set `lengths` and a `collate` that pads"
                )
                if self.facts.lengths is not None:
                    why = f"`lengths` of the data set says {length}; it must be token counts"
                raise DataError(f"data: {self.name_of(i)} has {tokens} tokens, but {why}")
            for name in aligned:
                field = sample.get(name)
                if field is not None and field.dim() and len(field) != length:
                    raise DataError(
                        f"data: field {name!r} has {len(field)} entries in {self.name_of(i)} of "
                        f"{length} tokens: give one for each token (in labels -100 is no loss "
                        "term), or give the data set a `collate`"
                    )

    def read_each(
        self, positions: Sequence[int], *, seed: int, epoch: int
    ) -> list[dict[str, Tensor]]:
        """Read some samples; see `read`."""
        ids = self.ids(np.array(positions)).tolist()
        return [self._read(i, own, seed, epoch) for i, own in zip(positions, ids, strict=True)]

    def read(self, i: int, *, seed: int, epoch: int) -> dict[str, Tensor]:
        """Read one sample, whose draws depend on (seed, epoch, position) alone.

        Seeds what it may draw from, as `seed_draws`; callers read inside `isolated_rng`.
        """
        return self._read(i, int(self.ids(np.array([i]))[0]), seed, epoch)

    def _read(self, i: int, own: int, seed: int, epoch: int) -> dict[str, Tensor]:
        if self.facts.draws_randomness:
            self.seed_draws(seed, epoch, i)
        try:
            sample: Any = self.dataset[own]
            fields: dict[Any, Any] | None = None
            if isinstance(sample, Mapping):
                fields = dict(sample.items())
        except BaseException as error:
            raise_fault(self.name_of(i), error)
        if fields is None:
            raise DataError(
                f"data: {self.name_of(i)} is a {type(sample).__name__}; "
                "it must be a mapping from names to tensors, e.g. {'input_ids': ids, 'labels': ids}"
            )
        return as_tensors(fields, partial(self.name_of, i))

    def seed_draws(self, *parts: int | str) -> None:
        """Tie the draws that follow to a key's parts.

        Of PyTorch's CPU generator, NumPy's legacy one and Python's, and of those of the data set.
        """
        seed_cpu_draws(key := rng_key(*parts))
        for path, generator in self._generators.items():
            reseed(generator, rng_key(key, path))

    @contextmanager
    def isolated_rng(self) -> Iterator[None]:
        """Find the data set's generators; at the end restore the global ones, and gradient mode.

        Generators cost nothing for data that draw nothing.
        """
        preserved: AbstractContextManager[None] = nullcontext()
        # Some data sets make a generator only as they are first read, so that none is remembered.
        if self.facts.draws_randomness:
            self._generators = generators_in(self.dataset)
            preserved = preserve_generators()
        with preserved, torch.set_grad_enabled(torch.is_grad_enabled()):
            yield

    def original_ids(self, positions: npt.ArrayLike) -> IntArray:
        """Turn positions, `(samples,)`, into the ids that a person reads.

        Those are indices of the data set as the user wrote it, before any sample was held out or
        skipped; of a data set that splits itself the `original_ids` that it gives.
        """
        ids = self.ids(np.asarray(positions, dtype=np.int64))
        own = self.facts.original_ids
        if own is None:
            return ids
        original: IntArray = np.asarray(own)[ids]
        return original

    def name_of(self, i: int) -> str:
        """Name a sample for a message, by its id in the data set that the user wrote."""
        if (own := self.facts.name_of) is not None:
            return str(own(int(self.ids(np.array([i]))[0])))
        return f"sample {self.original_ids([i])[0]} of {self.kind}"

    def records(self) -> Iterator[DataRecord]:
        """Give the records in their order, with those that are no samples; else the samples."""
        if self._whole is None and (own := self.facts.predicted_records) is not None:
            yield from own()
            return
        for i, number in enumerate(self.original_ids(np.arange(len(self))).tolist()):
            place = None
            # Without names of its own a sample has its number.
            if self.facts.name_of is not None:
                place = self.name_of(i)
            yield DataRecord(number=number, place=place, samples=(i,))

    @cached_property
    def fingerprint(self) -> str:
        """What a checkpoint remembers of its data: its `fingerprint`, or else what can be seen.

        Without a `fingerprint` of its own, a data set counts as changed when its class name, its
        number of samples, any of their lengths or, where reading draws nothing, the contents of
        any of up to `PROBES` samples changes.
        """
        if self._whole is not None:
            settings = f"{self._whole.fingerprint}|{self._settings}"
            return hashlib.sha256(settings.encode()).hexdigest()
        own, kind = self.facts.fingerprint, type(self.dataset)
        if own is not None:
            with faults_of(f"`fingerprint` of {self.kind}"):
                if callable(own):
                    own = own()
                return str(own)
        digest = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__}|{len(self)}|".encode())
        digest.update(self.lengths.digest.encode())
        with preserve_generators(), torch.set_grad_enabled(torch.is_grad_enabled()):
            once, again = self._contents(seed=0), self._contents(seed=1)
        # Two readings that differ draw at random, also where the data set says that they do not.
        if once == again:
            digest.update(once)
        return digest.hexdigest()

    def spaced(self, count: int) -> list[int]:
        """Give the positions of up to `count` samples, at even distances."""
        last, count = len(self) - 1, min(count, len(self))
        positions: list[int] = np.unique(np.linspace(0, last, count, dtype=np.int64)).tolist()
        return positions

    def probe(
        self, positions: Iterable[int], *, seed: int
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Read some samples, by position, but those that cannot be: their use ends the run."""
        for i in positions:
            with suppress(TrainError):
                yield i, self.read(i, seed=seed, epoch=0)

    def _contents(self, seed: int) -> bytes:
        digest = hashlib.sha256()
        for i, sample in self.probe(self.spaced(PROBES), seed=seed):
            feed_sample(digest.update, sample, f"{i}|")
        return digest.digest()


def feed_sample(update: Callable[[Any], object], sample: Sample, label: str = "") -> None:
    """Give a hash the names, forms and bits of a sample's fields, after a label of each."""
    for name, tensor in sorted(sample.items()):
        update(f"{label}{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        update(bits_of(tensor.cpu()).numpy().data)
