"""Give a model its first weights: each by its name, and no more rows of it than are asked for.

Three makers give them. *Drawn* ones come from the seed: the constructor runs under
`torch.device("meta")`, where tensors have no memory, and what fills a parameter is recorded. Where
it draws random numbers it is also run on memory that is dropped at once, so that the generator
moves as it does on the CPU. A weight is computed later by running its operations again from the
states of the generator that were found, and so has the bits of a model that is built on the CPU.
Those in *files*, and those of a run's own *checkpoint*, are in `trainer.checkpoint.weights`.

A maker may also say itself where weights are, by an attribute `first_weights` of the model that it
gives: those in the files of a model that it loads.

On the meta device only classes are built that declare `draws_on_meta`: their constructors draw
there what they draw on the CPU. Others may do something else, as leave weights undrawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from types import EllipsisType
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.core.errors import ConfigError
from trainer.core.tensors import LazyTensor, fill

_NO_VALUE = (
    "has no first value that can be computed again: draw weights by torch.nn.init and make no "
    "buffers, or declare no draws_on_meta"
)

FirstWeights: TypeAlias = Mapping[str, LazyTensor]
"""What the parameters of a model begin with, by each name that they have in it."""

_TRIAL_STD = 0.02  # deviation of values for a trial

FIRST_WEIGHTS = "first_weights"
"""Attribute of a model on the meta device whose maker knows where its weights are."""


@final
class Fill(NamedTuple):
    """An operation that gave a whole tensor values."""

    func: Any  # the dispatcher's
    args: tuple[Any, ...]  # after the tensor that is written to
    kwargs: Mapping[str, Any]
    state: Tensor | None  # of the default generator when it ran; None where it draws nothing
    makes: bool  # gives the tensor, as torch.zeros does, in place of writing to it

    def run(self, tensor: Tensor) -> None:
        """Give a tensor on the CPU those values; moves the generator as it did then."""
        if self.makes:
            tensor.copy_(self.func(*self.args, **{**self.kwargs, "device": "cpu"}))
        else:
            self.func(tensor, *self.args, **self.kwargs)


@final
@dataclass(frozen=True, eq=False)
class DrawnTensor:
    """What a constructor filled a parameter with, computed again each time it is asked for."""

    shape: torch.Size
    dtype: torch.dtype
    fills: list[Fill] = field(default_factory=list)  # in order

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        """Compute it whole, on the CPU, and give those rows; the same bits at every call."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        now = torch.default_generator.get_state()
        for each in self.fills:
            if each.state is not None:
                torch.default_generator.set_state(each.state)
            each.run(tensor)
        torch.default_generator.set_state(now)
        return tensor[rows]

    def identity(self) -> str:
        """Hash how the values come about."""
        digest = hashlib.blake2b(digest_size=16)
        for func, args, kwargs, state, _ in self.fills:
            digest.update(f"{func} {args} {kwargs}".encode())
            if state is not None:
                digest.update(state.numpy().tobytes())
        return digest.hexdigest()


def build_on_meta(
    build: Callable[[], nn.Module], known: Collection[str] = ()
) -> tuple[nn.Module, FirstWeights]:
    """Build a model that `draws_on_meta` there; the generator moves as on the CPU.

    `known` names parameters whose first values are elsewhere.
    """
    recorder = _FillRecorder()
    with recorder, torch.device("meta"):
        module = build()
    drawn, lost = dict[str, DrawnTensor](), list[str]()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in known:
            continue
        # Tied weights have one storage, so all their names find the same fills.
        if (fills := recorder.fills.get(_key(parameter))) is None:
            lost.append(name)
        else:
            drawn[name] = DrawnTensor(parameter.shape, parameter.dtype, fills)
    # First weights are of parameters: a buffer that is still on the meta device has no values.
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            lost.append(name)
    if lost:
        raise ConfigError(f"model: {lost[0]} {_NO_VALUE}")
    return module, drawn


def is_on_meta(module: nn.Module) -> bool:
    """Whether parameters of a model have no memory."""
    return any(parameter.is_meta for parameter in module.parameters())


@contextmanager
def drawn(module: nn.Module, weights: FirstWeights, device: torch.device) -> Iterator[None]:
    """Give a model on the meta device its first weights, whole, on `device` inside the block."""
    real = {}
    for name, p in module.named_parameters():
        whole = torch.empty_like(p, device=device, requires_grad=False)
        fill(whole, weights[name])
        real[id(p)] = nn.Parameter(whole, p.requires_grad)
    with with_parameters(module, real):
        yield


@contextmanager
def any_values(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Give a model on the meta device values of no meaning, for a trial of what its layers do.

    All matrices share the memory of the largest, so that a large model takes little.
    """
    largest = max(map(torch.numel, module.parameters()), default=0)
    pool = torch.randn(largest, generator=torch.Generator().manual_seed(0))
    pool = pool.mul_(_TRIAL_STD).to(device)
    real = {}
    for p in module.parameters():
        found = pool[: p.numel()].view(p.shape).to(p.dtype)
        # Norms scale by numbers around 1.
        if p.dim() <= 1:
            found = 1 + found
        real[id(p)] = nn.Parameter(found, p.requires_grad)
    with with_parameters(module, real):
        yield


@contextmanager
def with_parameters(module: nn.Module, by_id: Mapping[int, nn.Parameter]) -> Iterator[None]:
    """Put others in place of a model's parameters inside the block, by their ids.

    Each under every name that it has, so that tied ones stay tied.
    """
    before = [(part._parameters, dict(part._parameters)) for part in module.modules()]
    try:
        for parameters, own in before:
            parameters.update({name: by_id.get(id(p), p) for name, p in own.items()})
        yield
    finally:
        for parameters, own in before:
            parameters.update(own)


@final
class _FillRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call] # untyped in torch
    """Records what fills tensors on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # untyped in torch
        self.fills: dict[int, list[Fill]] = {}
        # Kept alive, so that their ids stay their own.
        self._storages: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run one operation, and record it if it fills a whole tensor on the meta device."""
        kwargs = dict(kwargs or {})
        values = tree_leaves((args, kwargs))
        if func._schema.is_mutable and isinstance(args[0], Tensor) and args[0].is_meta:
            is_whole = args[0].nbytes == args[0].untyped_storage().nbytes()
            others = tree_leaves((args[1:], kwargs))
            if not is_whole or any(isinstance(leaf, Tensor | torch.Generator) for leaf in others):
                raise ConfigError(f"model: what {func} writes to {_NO_VALUE}")
            self._record(args[0], func, args[1:], kwargs, makes=False)
        found = func(*args, **kwargs)
        is_made = isinstance(found, Tensor) and not any(isinstance(x, Tensor) for x in values)
        if is_made and found.is_meta and "empty" not in func._schema.name:
            self._record(found, func, args, kwargs, makes=True)
        # A copy begins as what it is of.
        if func is torch.ops.aten.clone.default and (fills := self.fills.get(_key(args[0]))):
            self._storages.append(found.untyped_storage())
            self.fills[_key(found)] = [*fills]
        return found

    def _record(self, target: Tensor, func: Any, args: Any, kwargs: Any, *, makes: bool) -> None:  # noqa: ANN401
        draws = torch.Tag.nondeterministic_seeded in func.tags
        state = torch.default_generator.get_state() if draws else None
        fill = Fill(func, args, kwargs, state, makes)
        if draws:
            fill.run(torch.empty(target.shape, dtype=target.dtype, device="cpu"))
        self._storages.append(target.untyped_storage())
        self.fills.setdefault(_key(target), []).append(fill)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


LARGE_BYTES = 2**30  # that a constructor may fill before the model is counted first


def counted(build: Callable[[], nn.Module], check: Callable[[nn.Module], None]) -> nn.Module | None:
    """Build a model on the meta device and check its size; None where its class cannot be."""
    module = None
    # A fault of the constructor's own shows again, in full, off the meta device.
    with suppress(Exception), torch.device("meta"):
        module = build()
    if module is None or not is_on_meta(module):
        return None
    check(module)
    return module


@final
class Filled(TorchDispatchMode):  # type: ignore[no-untyped-call] # untyped in torch
    """Counts what a constructor makes out of nothing; at `LARGE_BYTES` something is done, once."""

    def __init__(self, when_large: Callable[[], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # untyped in torch
        self.total, self.when_large = 0, when_large

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run an operator, and count what it gives where it takes no tensor."""
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and not any(isinstance(arg, Tensor) for arg in args):
            before, self.total = self.total, self.total + found.nbytes * (not found.is_meta)
            if before <= LARGE_BYTES < self.total:
                self.when_large()
        return found


def refuse_lazy_or_sparse(model: nn.Module) -> None:
    """Refuse weights that have no shape yet, and embeddings whose gradients are sparse."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                f"model: {name} has no shape before the first forward: give lazy modules their "
                "sizes, e.g. nn.Linear in place of nn.LazyLinear"
            )
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise ConfigError(
                f"model: {name} gives sparse gradients, which are not clipped, reduced or saved "
                "here: build it with sparse=False, whose gradient is the same"
            )
