"""See a data set as the trainer does: the one place that reads what a data set offers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trainer.core.errors import DataError, TrainError
from trainer.core.tensors import bits_of
from trainer.core.world import World, rng_key
from trainer.data.collate import pad
from trainer.data.files import progress
from trainer.data.index import LISTED_SKIPS, SKIP_CAP
from trainer.data.samples import (
    HELD_OUT,
    Sample,
    Samples,
    as_tensors,
    faults_of,
    held_out_count,
    held_out_ids,
    held_out_mask,
    num_tokens,
    preserve_generators,
    raise_fault,
    seed_draws,
    train_ids,
)
from trainer.plan.cut import IntArray
from trainer.plan.lengths import IdsOf, Lengths, picked
from trainer.plan.order import VERSION
from trainer.plan.permutation import DRAWN_WHOLE

PROBES = 64
"""Samples that stand for the contents of a data set in its fingerprint."""


@final
class DataView:
    """A data set, or some of its samples.

    What `Samples` lists as optional is read here, when it is first asked for.

    Args:
        dataset: as the user wrote it, or a view that this one is a part of.
        count: samples in it; all of `dataset` by default.
        ids_of: gives their positions in `dataset`; they are the same by default.
        settings: what selected them, for the fingerprint.
        version: of the rules by which data are split and recognised; a part has its whole's.

    Attributes:
        dataset: as the user wrote it.
        kind: name of its class.
        num_skipped: bad records that were left out of the data set, on either side of a split.
        skipped: the first of them, each with the reason.

    Raises:
        DataError: `__len__` fails, or gives no count.
    """

    def __init__(
        self,
        dataset: Samples | DataView,
        count: int | None = None,
        ids_of: IdsOf | None = None,
        settings: str = "",
        version: int = VERSION,
    ) -> None:
        whole = self._whole = dataset if isinstance(dataset, DataView) else None
        self._settings, self._ids_of = settings, ids_of
        self.version: int = version if whole is None else whole.version
        self.dataset: Samples = dataset.dataset if isinstance(dataset, DataView) else dataset
        self.kind = type(self.dataset).__name__
        with faults_of(f"`__len__` of {self.kind}"):
            self._count = len(dataset) if count is None else count
        self.num_skipped: int = int(self.optional("num_skipped") or 0)
        self.skipped: Sequence[str] = self.optional("skipped") or ()
        if whole is not None:
            self.num_skipped, self.skipped = whole.num_skipped, whole.skipped

    @classmethod
    def of(cls, dataset: Samples | DataView) -> DataView:
        """Give a view of all of a data set; of a view itself."""
        return dataset if isinstance(dataset, DataView) else cls(dataset)

    def __len__(self) -> int:
        return self._count

    def ids(self, positions: IntArray) -> IntArray:
        """Turn positions in this view into indices of the data set as the user wrote it."""
        within = positions if self._ids_of is None else self._ids_of(positions)
        return within if self._whole is None else self._whole.ids(within)

    def optional(self, name: str) -> Any:  # noqa: ANN401 - whatever it is
        """Give an attribute of the data set that `Samples` lists as optional, or None."""
        with faults_of(f"`{name}` of {self.kind}"):
            return getattr(self.dataset, name, None)

    @cached_property
    def draws_randomness(self) -> bool:
        """Whether reading a sample may draw from the global generators."""
        draws = self.optional("draws_randomness")
        return True if draws is None else bool(draws)

    @property
    def collate(self) -> Callable[[Sequence[Sample]], Any] | None:
        """What makes fields of samples in place of padding."""
        collate: Callable[[Sequence[Sample]], Any] | None = self.optional("collate")
        return collate

    @cached_property
    def states_lengths(self) -> bool:
        """Whether the data set has `lengths` of its own."""
        return self.optional("lengths") is not None

    @cached_property
    def lengths(self) -> Lengths:
        """Tokens of each sample, at least 1: what planning counts.

        The data set's `lengths`; else 1 each where the first sample has no one-dimensional
        `input_ids`; else measured by reading every sample once.

        Raises:
            DataError: `lengths` does not match the data set, or a sample is empty or unreadable.
        """
        if self._whole is not None:
            return self._whole.lengths.part(self._ids_of, self._count)
        lengths = Lengths(self._stated() if self.states_lengths else self._measured())
        if len(lengths) and lengths.min() < 1:
            text = f"has length {lengths.min()}; at least 1 is needed"
            raise DataError(f"data: {self.name_of(lengths.argmin())} {text}")
        return lengths

    def _stated(self) -> npt.NDArray[Any]:
        with faults_of(f"`lengths` of {self.kind}"):
            lengths = np.asarray(self.optional("lengths"))
        if lengths.shape != (len(self),) or lengths.dtype.kind not in "iu":
            raise DataError(
                f"data: `lengths` of {self.kind} has shape {lengths.shape} and dtype "
                f"{lengths.dtype}; it must be one integer for each of its {len(self)} samples"
            )
        return lengths

    def _measured(self) -> IntArray:
        with self.isolated_rng():
            if len(self) == 0 or num_tokens(self.read(0, seed=0, epoch=0)) is None:
                return np.broadcast_to(np.int64(1), (len(self),))
            lengths = np.ones(len(self), dtype=np.int64)
            label = f"measuring {len(self)} samples of {self.kind}, which has no `lengths`"
            with progress(label) as advance:
                for i in range(len(self)):
                    length = num_tokens(self.read(i, seed=0, epoch=0))
                    if length is None:
                        raise DataError(
                            f"data: {self.name_of(i)} lacks one-dimensional `input_ids`"
                        )
                    lengths[i] = length
                    advance()
        return lengths

    def check_lengths(self, positions: Sequence[int], counts: Sequence[Sequence[int]]) -> None:
        """Refuse a sample none of whose `counts` is the length that the data set states."""
        if not self.states_lengths:
            return
        stated = self.lengths[np.array(positions)].tolist()
        for i, length, each in zip(positions, stated, counts, strict=True):
            if each and length not in each:
                raise DataError(
                    f"data: {self.name_of(i)} has {each[0]} tokens, but `lengths` of the data set "
                    f"says {length}; it must be token counts"
                )

    def read_each(
        self, positions: Sequence[int], *, seed: int, epoch: int
    ) -> list[dict[str, Tensor]]:
        """Read some samples; see `read`."""
        ids = self.ids(np.array(positions)).tolist()
        return [self._read(i, own, seed, epoch) for i, own in zip(positions, ids, strict=True)]

    def read(self, i: int, *, seed: int, epoch: int) -> dict[str, Tensor]:
        """Read one sample, whose draws depend on (seed, epoch, position) alone.

        Seeds PyTorch's CPU generator, NumPy's legacy one and Python's; callers that must not lose
        the state of those read inside `isolated_rng`.

        Raises:
            DataError: the data set failed, or the sample is no mapping from names to tensors;
                names the sample.
        """
        return self.read_each([i], seed=seed, epoch=epoch)[0]

    def _read(self, i: int, own: int, seed: int, epoch: int) -> dict[str, Tensor]:
        if self.draws_randomness:
            seed_draws(rng_key(seed, epoch, i))
        try:
            sample: Any = self.dataset[own]
            fields = dict(sample.items()) if isinstance(sample, Mapping) else None
        except BaseException as error:
            raise_fault(self.name_of(i), error)
        if fields is None:
            raise DataError(
                f"data: {self.name_of(i)} is a {type(sample).__name__}; "
                "it must be a mapping from names to tensors, e.g. {'input_ids': ids, 'labels': ids}"
            )
        return as_tensors(fields, partial(self.name_of, i))

    @contextmanager
    def isolated_rng(self) -> Iterator[None]:
        """Restore the global generators at the end; costs nothing for data that draw nothing."""
        with preserve_generators() if self.draws_randomness else nullcontext():
            yield

    def original_ids(self, positions: npt.ArrayLike) -> IntArray:
        """Turn positions, `(samples,)`, into the ids that a person reads.

        Those are indices of the data set as the user wrote it, before any sample was held out or
        skipped; of a data set that splits itself the `original_ids` that it gives.
        """
        ids = self.ids(np.asarray(positions, dtype=np.int64))
        own = self.optional("original_ids")
        return ids if own is None else np.asarray(own)[ids]

    def name_of(self, i: int) -> str:
        """Name a sample for a message, by its id in the data set that the user wrote."""
        return f"sample {self.original_ids([i])[0]} of {self.kind}"

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
        own, kind = self.optional("fingerprint"), type(self.dataset)
        if own is not None:
            with faults_of(f"`fingerprint` of {self.kind}"):
                return str(own() if callable(own) else own)
        digest = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__}|{len(self)}|".encode())
        if self.version == 1 or len(self) <= DRAWN_WHOLE:
            self.lengths.feed(digest.update)
        else:
            digest.update(self.lengths.digest.encode())
        with preserve_generators():
            once, again = self._contents(seed=0), self._contents(seed=1)
        # Two readings that differ draw at random, also where the data set says that they do not.
        digest.update(once if once == again else b"")
        return digest.hexdigest()

    def _contents(self, seed: int) -> bytes:
        """Digest samples at even distances; what cannot be read ends the run where it is used."""
        digest = hashlib.sha256()
        count = min(PROBES, len(self))
        for i in np.unique(np.linspace(0, len(self) - 1, count, dtype=np.int64)).tolist():
            try:
                sample = self.read(i, seed=seed, epoch=0)
            except TrainError:
                continue
            feed_sample(digest.update, sample, f"{i}|")
        return digest.digest()


def feed_sample(update: Callable[[Any], object], sample: Sample, label: str = "") -> None:
    """Give a hash the names, forms and bits of a sample's fields, after a label of each."""
    for name, tensor in sorted(sample.items()):
        update(f"{label}{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        update(bits_of(tensor.cpu()).numpy().data)


def split_by_seed(dataset: Samples | DataView, split: str, holdout: float, seed: int) -> DataView:
    """Take one side of a data set that brings no split: `holdout` of its samples, or the rest.

    `holdout` is the share held out, at least one sample; 0 leaves `held_out` empty.

    Returns:
        A view in the data set's own order; both sides of one view share its measured lengths.
        Beyond `DRAWN_WHOLE` samples, since version 2, a formula says what is in it, and no list.

    Raises:
        DataError: there is no sample.
    """
    whole = DataView.of(dataset)
    if len(whole) == 0:
        raise DataError(f"data: {whole.kind} holds no samples")
    settings = f"{split}|{holdout!r}|{seed}"
    count = held_out_count(len(whole), holdout)
    ids_of: IdsOf | None = None
    if count and whole.version > 1 and len(whole) > DRAWN_WHOLE:
        ids_of = partial(held_out_ids if split == HELD_OUT else train_ids, len(whole), count, seed)
    elif count:
        mask = held_out_mask(np.arange(len(whole), dtype=np.uint64), holdout, seed)
        ids_of = partial(picked, np.flatnonzero(mask if split == HELD_OUT else ~mask))
    return DataView(whole, count if split == HELD_OUT else len(whole) - count, ids_of, settings)


def readable(datasets: Sequence[DataView], seed: int, world: World) -> list[DataView]:
    """Leave out of data sets the samples that cannot be read: `data.on_bad=skip`. Collective.

    The main rank reads every sample once before the first step, and what cannot be read is no
    sample: order, lengths, plan and normalizer are those of a data set without it, on every rank
    and in every replay. A sample that is sound then and cannot be read later ends the run: steps
    that leave it out would not be those of a resumed run.

    Bad is a sample that raises, is no mapping to tensors, is empty or of another length than
    `lengths` says, or has other fields, dtypes or dimensions than the first sound one.

    Args:
        datasets: all of the training data, and what else there is.
        seed: the run's; what samples draw here is what they draw in the first epoch.
        world: all ranks.

    Returns:
        A view of each; the first one counts what was left out of all of them.

    Raises:
        DataError: more than `SKIP_CAP` of a data set is bad; one sample is always allowed.
    """
    found = world.on_main(lambda: [_read_all(dataset, seed) for dataset in datasets])
    views = [_sound(dataset, *read) for dataset, read in zip(datasets, found, strict=True)]
    bad = [fault for faults, _ in found for _, fault in faults]
    # What a data set itself passes over, its other split counts as well.
    views[0].num_skipped = datasets[0].num_skipped + len(bad)
    views[0].skipped = [*bad, *datasets[0].skipped][:LISTED_SKIPS]
    return views


def _sound(dataset: DataView, bad: Sequence[tuple[int, str]], lengths: Sequence[int]) -> DataView:
    """Leave bad samples, given by position, out of a view, which takes the measured lengths."""
    if not dataset.states_lengths:
        dataset.lengths = Lengths(np.array(lengths, dtype=np.int64))
    if not bad:
        return dataset
    positions = [i for i, _ in bad]
    sound = np.delete(np.arange(len(dataset)), positions)
    return DataView(dataset, len(sound), partial(picked, sound), f"without {positions}")


def _read_all(dataset: DataView, seed: int) -> tuple[list[tuple[int, str]], list[int]]:
    """Read every sample once; gives what is bad, by position, and all lengths."""
    bad: list[tuple[int, str]] = []
    lengths = [1] * len(dataset)
    first: tuple[int, Sample] | None = None
    most = max(1, int(SKIP_CAP * len(dataset)))
    label = f"reading {len(dataset)} samples of {dataset.kind} once (data.on_bad=skip)"
    with dataset.isolated_rng(), progress(label) as advance:
        for i in range(len(dataset)):
            try:
                sample = dataset.read(i, seed=seed, epoch=0)
                lengths[i] = _checked_length(dataset, i, sample, first)
                first = first or (i, sample)
            except DataError as error:
                bad.append((i, str(error).removeprefix("data: ")))
            if len(bad) > most:
                raise DataError(
                    f"data: {len(bad)} of the first {i + 1} samples are bad, more than the "
                    f"{SKIP_CAP:.0%} of {len(dataset)} that data.on_bad=skip allows; "
                    f"the first: {bad[0][1]}"
                )
            advance()
    return bad, lengths


def _checked_length(
    dataset: DataView, i: int, sample: Sample, first: tuple[int, Sample] | None
) -> int:
    """Count the tokens of a sample, 1 where it has none; a DataError where it cannot be used."""
    count = num_tokens(sample)
    if count == 0:
        raise DataError(f"{dataset.name_of(i)} is empty")
    if dataset.collate is None:
        dataset.check_lengths([i], [[] if count is None else [count]])
        if first is not None:
            pad((first[1], sample), (), 0, lambda k: dataset.name_of((first[0], i)[k]))
    return count or 1
