"""Count the bytes of live tensors, real and fake, and say what they belong to."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, final

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.checkpoint.average import WeightAverage
from trainer.core.format import percent, size
from trainer.core.rows import Row, join_parts, row

_Bytes = Annotated[int, Field(ge=0, le=2**48)]  # no micro-batch takes more


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The most tensor bytes alive at once during a step, and what they were at that moment.

    Allocator rounding, fragmentation and the scratch space inside kernels are not tensors.
    """

    peak_bytes: _Bytes  # the sum of all parts
    parameters: _Bytes = 0
    gradients: _Bytes = 0  # accumulated
    optimizer_state: _Bytes = 0  # between steps
    average: _Bytes = 0  # of the weights over steps
    activations: _Bytes = 0  # everything else: inputs, saved for backward, temporaries
    buffers: _Bytes = 0


def memory_rows(
    predicted: MemoryEstimate | None, limit: int | None, world_size: int, *, is_here: bool
) -> list[Row]:
    """Set the predicted need beside the limit, of one rank; either may be unknown."""
    text, shown, parts, peak = None, None, dict[str, int](), None
    if limit:
        text = f"limit {size(limit)}, usage not predicted"
    if predicted is not None:
        parts = {name.replace("_", " "): count for name, count in asdict(predicted).items()}
        peak = parts.pop("peak bytes")
        share = "limit unknown"
        if limit:
            share = f"{percent(peak / limit)} of {size(limit)}"
        text = f"{size(peak)} predicted, {share}"
    note = "an estimate for a machine that is not here" if not is_here else None
    if text:
        shown = join_parts(text + " per rank" * (world_size > 1), note)
    terms = list[str]()
    for name, count in parts.items():
        if count:
            terms.append(f"{name} {size(count)}")
    return [
        row(
            "memory",
            shown,
            group="computed",
            predicted_peak_bytes=peak,
            memory_limit_bytes=limit,
        ),
        row("peak", " + ".join(terms) or None, memory_parts=parts, memory_note=note),
    ]


@final
class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call] # untyped in torch
    """Counts live storages while it is entered; each counts once, however many views it has.

    A storage is counted from the operation that first shows it until it is freed, so tensors
    that exist before are counted by `assign`. Of a tensor in shards this rank's own counts; sparse
    tensors do not. About 5 us per operation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # untyped in torch
        self._sizes, self._parts = dict[int, int](), dict[int, str]()
        self._totals, self._at_peak = Counter[str](), dict[str, int]()
        self._live = self._peak = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let models compile while it is entered, and count what their graphs allocate."""
        return True

    @property
    def estimate(self) -> MemoryEstimate:
        """The peak since the last `reset`, by part."""
        return MemoryEstimate(peak_bytes=sum(self._at_peak.values()), **self._at_peak)

    def reset(self) -> None:
        """Begin a new peak at what is alive now."""
        self._peak, self._at_peak = self._live, dict(self._totals)

    def assign(self, part: str, tensors: Iterable[Tensor]) -> None:
        """Say which part of `MemoryEstimate` tensors belong to, counting those not seen before."""
        for tensor in tensors:
            key = self._count(tensor)
            if key is not None:
                self._totals[self._parts[key]] -= self._sizes[key]
                self._totals[part] += self._sizes[key]
                self._parts[key] = part
        if self._live == self._peak:
            self.reset()

    def follow_average(
        self, decay: float | None, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Average the weights after each step of an optimizer as a run does; None does not."""
        if decay is not None:
            average = WeightAverage(decay)
            average.begin(model)
            self.assign("average", filter(torch.is_tensor, tree_leaves(average.state())))
            optimizer.register_step_post_hook(lambda *_: average.after_update(1))

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operation gives
        """Run one operation and count what it allocated."""
        if func is torch.ops.prim.device.default:  # asked of a fake several times an operation
            return getattr(args[0], "fake_device", None) or func(*args)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> int | None:
        """Count what a tensor's storage has grown by, and give the storage's key."""
        local = getattr(tensor, "_local_tensor", tensor)
        if local.layout != torch.strided:
            return None
        storage = local.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key not in self._sizes:
            # torch keeps the Python object of a storage for as long as the storage itself.
            weakref.finalize(storage, self._forget, key).atexit = False
            self._sizes[key], self._parts[key] = 0, "activations"
        grown = size - self._sizes[key]
        self._sizes[key] = size
        self._totals[self._parts[key]] += grown
        self._live += grown
        if self._live > self._peak:
            self.reset()
        return key

    def _forget(self, key: int) -> None:
        size = self._sizes.pop(key)
        self._totals[self._parts.pop(key)] -= size
        self._live -= size
