"""Say who this rank is and how many there are, and sum over all of them.

A world of one rank needs no process group and sends nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.core.errors import Preempted, TrainError, error_from_dict, error_to_dict
from trainer.core.rank_progress import Phase, PhaseTimes, RankProgress
from trainer.core.signals import UNBEGUN

Value = TypeVar("Value")

LONG_TIMEOUT = timedelta(hours=2)
"""How long a collective waits, e.g. while one rank tunes or saves. Connections tell at once of a
rank that died; within steps `parallel.timeout_s` ends ranks that do not go on long before."""

GROUP = 4  # ranks that a message of few bytes goes round at once


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The data-parallel ranks of one run."""

    rank: int = 0  # this process, from 0
    size: int = 1  # number of ranks
    local_size: int = 1  # ranks on this machine, which share its memory and its cores
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    # On the CPU, for what one rank does while the others wait; None where nothing is sent: on one
    # rank, and where one process works out what several would do.
    long_timeout_group: dist.ProcessGroup | None = None
    # Small groups of this rank, by which values of all ranks are brought together; see `groups_of`
    groups: Sequence[dist.ProcessGroup] = field(default=(), compare=False)
    rank_progress: RankProgress = field(default_factory=RankProgress, compare=False)
    compiles: bool = False  # whether a new length may hold up any step, and not the first alone
    times: PhaseTimes = field(default_factory=PhaseTimes, compare=False)  # what its phases took

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run folder."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Add a tensor over all ranks, in place. Collective."""
        self._wait_in(dist.all_reduce, values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Take the largest over all ranks, in place. Collective."""
        self._wait_in(dist.all_reduce, values, dist.ReduceOp.MAX)
        return values

    def begin_sum(self, values: Tensor) -> Callable[[], Any]:
        """Begin to add a tensor over several ranks, in place. Collective.

        What it gives waits for the sum; on an accelerator its stream does, and not the host.
        """
        if self.long_timeout_group is None:
            return lambda: None
        work = dist.all_reduce(values, async_op=True)
        assert work is not None

        def wait() -> None:
            with self.rank_progress.waiting():
                work.wait()

        return wait

    def copy_from_main(self, values: Tensor) -> Tensor:
        """Overwrite a tensor by the main rank's, in place. Collective."""
        self._wait_in(dist.broadcast, values, 0)
        return values

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Add a few numbers over all ranks, in float64; no device is waited for. Collective."""
        return self._reduce_numbers(numbers, dist.ReduceOp.SUM)

    def max_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Take the largest over all ranks of each of a few numbers, likewise. Collective."""
        return self._reduce_numbers(numbers, dist.ReduceOp.MAX)

    def _reduce_numbers(
        self, numbers: Sequence[float], how: dist.ReduceOp.RedOpType
    ) -> list[float]:
        # On the CPU, which gloo sends.
        given = torch.tensor(numbers, dtype=torch.float64)
        if self.size > 1:
            with self.rank_progress.waiting():
                for group in self.groups or (None,):
                    dist.all_reduce(given, how, group)
                for group in reversed(self.groups):
                    dist.broadcast(given, group=group, group_src=0)
        reduced: list[float] = given.tolist()
        return reduced

    def collect(self, value: Any) -> list[Any]:  # noqa: ANN401 - any JSON
        """Give every rank all ranks' values, in their order, as JSON: no pickle. Collective."""
        if self.long_timeout_group is None:
            return [json.loads(json.dumps(value))]
        values = [value]
        with self.rank_progress.waiting():
            for group in self.groups or (self.long_timeout_group,):
                values = [*chain.from_iterable(_gather(values, group))]
            for group in reversed(self.groups):
                values = _copy_from_first(values, group)
        return values

    def unless_stopped(self, build: Callable[[], Value]) -> Value:
        """Build the same on all ranks, unless a signal ends that on any of them. Collective."""
        built = list[Value]()
        with suppress(Preempted):
            built.append(build())
        self.end_if(not built)
        return built[0]

    def end_if(self, was_asked: bool, how: str = UNBEGUN) -> None:
        """End by `Preempted` if a signal asked any rank to; `how` says where. Collective."""
        if any(self.collect(was_asked)):
            raise Preempted(how)

    def on_main(self, work: Callable[[], Value]) -> Value:
        """Do something on the main rank alone; all get what came out, or its error. Collective."""
        if self.long_timeout_group is None:
            return work()
        answer, failure = dict[str, Any](), None
        if self.is_main:
            try:
                answer = {"value": work()}
            except TrainError as error:
                answer, failure = error_to_dict(error), error
        with self.rank_progress.waiting():
            answer = _copy_from_first(answer, self.long_timeout_group)
        if "value" not in answer:
            raise failure or error_from_dict(answer)
        value: Value = answer["value"]
        return value

    def on_all(self, work: Callable[[], Value]) -> list[Value]:
        """Give every rank what came out of all, as JSON, or one's `TrainError`. Collective."""
        try:
            found = {"value": work()}
        except TrainError as error:
            # The other ranks wait for an answer of this one, and end by the same error.
            self.collect(error_to_dict(error))
            raise
        answers = self.collect(found)
        for answer in answers:
            if "value" not in answer:
                raise error_from_dict(answer)
        return [answer["value"] for answer in answers]

    def apart(self) -> World:
        """Make a world for another thread, whose messages never meet this one's. Collective."""
        if self.long_timeout_group is None:
            return self
        group = dist.new_group(backend="gloo", timeout=LONG_TIMEOUT)
        groups = groups_of(self.rank, self.size)
        return replace(self, long_timeout_group=group, groups=groups, rank_progress=RankProgress())

    def note(self, phase: Phase, *, step: int | None = None) -> None:
        """Note what this rank does now, for whoever may ask why it does not answer."""
        self.times.enter(phase)
        place = replace(self.rank_progress.read(), phase=phase, micro_batch=0)
        if step is not None and step != place.step:
            # Compiled code may meet a new length, and be compiled anew, in any step.
            place = replace(place, step=step, is_first=place.step == 0 or self.compiles)
        self.rank_progress.write(place)

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        self._wait_in(dist.barrier)

    def _wait_in(self, collective: Callable[..., object], *given: object) -> None:
        if self.size > 1:
            with self.rank_progress.waiting():
                collective(*given)


def groups_of(rank: int, size: int, timeout: timedelta = LONG_TIMEOUT) -> list[dist.ProcessGroup]:
    """Make the groups of a rank; none where one would be of all. Collective.

    Each is of `GROUP` neighbours, of which the first goes on to the next: a tree. Round all ranks
    at once a message passes each of them: of 4,096 it takes 170 times as long.
    """
    found, step = list[dist.ProcessGroup](), 1
    while step < size > GROUP:
        # Where a rank goes on no further it makes one alone, since names go by how many it made.
        ranks = [rank]
        if rank % step == 0:
            first = rank - rank % (step * GROUP)
            ranks = [*range(first, min(first + step * GROUP, size), step)]
        group = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
        if ranks[1:]:
            found.append(group)
        step *= GROUP
    return found


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:  # noqa: ANN401 - any JSON
    """Give every rank of a group the JSON of all of them, in their order. Collective."""
    own = _as_bytes(value)
    # Sizes go first: all tensors of a gathering have one shape.
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(own)]), group=group)
    counts = [*map(int, sizes)]
    texts = [torch.empty(max(counts), dtype=torch.uint8) for _ in counts]
    padded = torch.nn.functional.pad(own, (0, max(counts) - len(own)))
    dist.all_gather(texts, padded, group=group)
    pairs = zip(texts, counts, strict=True)
    return [json.loads(bytes(each[:count].numpy())) for each, count in pairs]


def _copy_from_first(value: Value, group: dist.ProcessGroup) -> Value:
    """Give every rank of a group the JSON of its first one. Collective."""
    sent = _as_bytes(value)
    count = torch.tensor([len(sent)])
    dist.broadcast(count, group_src=0, group=group)
    if group.rank() > 0:
        sent = torch.empty(int(count), dtype=torch.uint8)
    dist.broadcast(sent, group_src=0, group=group)
    found: Value = json.loads(bytes(sent.numpy()))
    return found


def _as_bytes(value: Any) -> Tensor:  # noqa: ANN401 - any JSON
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def rng_key(*parts: int | str) -> int:
    """Hash the parts, `(seed, step, micro_batch)` say, into a seed for one draw, in [0, 2**63).

    The CPU generator reads only the low 32 bits of a seed, so every part must reach them;
    BLAKE2b mixes them all. Costs about 1 us.
    """
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
