"""Models built without the memory for their weights: recorded, then drawn one at a time.

A constructor runs as it always does, and draws the same numbers from the same generators, but
what it computes is let go of again; a record of how stays. A weight is computed once more when it
is asked for, from the same states of the generators, and so has the same bits. Running for real,
where torchdistx's `deferred_init` ran on shapes alone, lets constructors look at values, as
rejection sampling does.
"""

from __future__ import annotations

import gc
import hashlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.models.casts import assigned_casts
from trainer.models.constructor_inputs import Outside, bytes_of

HELD_BYTES = 16 * 2**20
"""Values at hand while a constructor runs; what was not used for longest is let go of first."""

FILLS = ("zero_", "fill_", "copy_")
"""Operations beside random ones that give every element a value, whatever it was before."""

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments by position and by name."""


class CannotDefer(Exception):  # noqa: N818 - an answer, not a fault: the model is built whole
    """A constructor does what cannot be recorded; the text says what."""


@final
class Weights:
    """Computes the weights that a constructor drew, one at a time.

    Args:
        recorder: watched the constructor.
        views: where the values of each parameter lie, by every name it has.
    """

    def __init__(self, recorder: Recorder, views: Mapping[str, View]) -> None:
        self._recorder = recorder
        self._views = views

    def draw(self, name: str) -> Tensor:
        """Compute a parameter's first value, whole, on the CPU; the same bits at every call."""
        return self._recorder.value(self._views[name])

    def digest(self) -> str:
        """Hash how all values came about, which tells them apart without computing them again."""
        return self._recorder.digest()


def deferred(build: Callable[[], nn.Module]) -> tuple[nn.Module, Weights]:
    """Build a model whose parameters are on the meta device; its buffers are real.

    Takes the memory of one parameter and `HELD_BYTES`, and leaves the generators as `build` does.

    Args:
        build: constructs the model, on the CPU.

    Returns:
        The model, and what its parameters are to begin with.

    Raises:
        CannotDefer: it has to be built whole.
    """
    recorder = Recorder()
    try:
        with recorder, assigned_casts(), warnings.catch_warnings():
            # `copy.deepcopy` looks whether a tensor has memory.
            warnings.filterwarnings("ignore", "Accessing the data pointer", UserWarning)
            module = build()
    except Exception as error:
        # What only a real tensor can do fails on a fake with many types. A fault of the
        # constructor's own shows again when the model is built whole.
        reason = next(iter(str(error).splitlines()), "")
        raise CannotDefer(f"{type(error).__name__}: {reason}"[:150]) from error
    return module, Weights(recorder, recorder.settle(module))


@contextmanager
def drawn(module: nn.Module, weights: Weights, device: torch.device) -> Iterator[None]:
    """Give a deferred model its whole weights inside the block.

    Args:
        module: its parameters are on the meta device, and are again when the block ends.
        weights: what they begin with.
        device: where they are to be.
    """
    metas = [dict(part._parameters) for part in module.modules()]
    real = {
        id(p): nn.Parameter(weights.draw(name).to(device), p.requires_grad)
        for name, p in module.named_parameters()
    }
    try:
        for part, held in zip(module.modules(), metas, strict=True):
            part._parameters.update({name: real.get(id(p)) for name, p in held.items()})
        yield
    finally:
        for part, held in zip(module.modules(), metas, strict=True):
            part._parameters.update(held)


@final
@dataclass(frozen=True)
class View:
    """Where the values of a tensor lie: in which storage, and how."""

    storage: int
    num_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Describe a tensor."""
        storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
        where = id(storage), storage.nbytes()
        return cls(*where, tensor.dtype, tensor.shape, tensor.stride(), offset)

    @property
    def is_whole(self) -> bool:
        """Whether it covers its storage."""
        return self.num_bytes == self.dtype.itemsize * self.size.numel()


@final
@dataclass(frozen=True)
class Operation:
    """One operation as it ran.

    Attributes:
        func: the operation.
        given: its arguments, views in place of fakes.
        result: what it gave, likewise.
        reads: storages whose values it may depend on.
        writes: storages that hold other values after it.
        generator: what it drew from, and the state it found; None where it draws nothing.
    """

    func: Callable[..., Any]
    given: Given
    result: Any
    reads: frozenset[int]
    writes: frozenset[int]
    generator: tuple[torch.Generator, Tensor] | None

    def again(self, values: Values) -> None:
        """Compute it again, from and into values."""
        if self.generator is None:
            values.run(self.func, self.given, self.result)
            return
        generator, found = self.generator
        now = generator.get_state()
        generator.set_state(found)
        values.run(self.func, self.given, self.result)
        generator.set_state(now)


@final
class Values:
    """Real storages, by the fake ones they stand for.

    Args:
        missing: gives a storage that is not at hand.
    """

    def __init__(self, missing: Callable[[View], torch.UntypedStorage]) -> None:
        self._missing = missing
        self._held: OrderedDict[int, torch.UntypedStorage] = OrderedDict()

    def run(self, func: Callable[..., Any], given: Given, result: Any = None) -> Any:  # noqa: ANN401
        """Run an operation on real values, and keep what its views hold afterwards."""
        # A constant may become what later operations change in place.
        given_ = tree_map_only(Tensor, torch.clone, given)
        args, kwargs = tree_map_only(View, self.tensor, given_)
        real = func(*args, **kwargs)
        self.keep(given, (args, kwargs))
        if result is not None:
            self.keep(result, real)
        return real

    def tensor(self, view: View) -> Tensor:
        """Give the tensor that a view stands for."""
        storage = self._held.get(view.storage)
        if storage is None:
            storage = self._held[view.storage] = self._missing(view)
        real = torch.empty(0, dtype=view.dtype)
        return real.set_(storage, view.offset, view.size, view.stride)

    def keep(self, views: Any, tensors: Any) -> None:  # noqa: ANN401 - trees of the same form
        """Take what tensors hold, the newest last."""
        for view, tensor in zip(tree_leaves(views), tree_leaves(tensors), strict=True):
            if isinstance(view, View):
                self._held[view.storage] = tensor.untyped_storage()
                self._held.move_to_end(view.storage)

    def trim(self, most_bytes: int) -> None:
        """Let go of what was not used for longest, down to so many bytes."""
        held = sum(storage.nbytes() for storage in self._held.values())
        while held > most_bytes:
            held -= self._held.popitem(last=False)[1].nbytes()


@final
class _Shared(FakeTensorMode):  # type: ignore[no-untyped-call] # untyped in torch
    """Stays the same when a constructor copies a module: a copy of it corrupts memory."""

    def __deepcopy__(self, memo: object) -> Self:
        return self


@final
class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call] # untyped in torch
    """Runs every operation for real and records it; the code that asked sees fakes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # untyped in torch
        self._mode = _Shared(allow_non_fake_inputs=True)
        self._values = Values(self._again)
        self._outside = Outside()
        self._operations: list[Operation] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # alive, so that ids stay their own

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an operation of the dispatcher
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operation gives
        """Run one operation.

        Raises:
            CannotDefer: it cannot be recorded.
        """
        asked = args, dict(kwargs or {})
        changed = [leaf for leaf in tree_leaves(_changed(func, asked)) if isinstance(leaf, Tensor)]
        if not all(isinstance(tensor, FakeTensor) for tensor in changed):
            raise CannotDefer(f"{func} changes a tensor from elsewhere")
        leaves = tree_leaves(asked)
        if any(isinstance(leaf, torch.UntypedStorage) for leaf in leaves):
            raise CannotDefer(f"{func} is given a storage")
        if self._outside.shares(View.of(tensor).storage for tensor in changed):
            raise CannotDefer(f"{func} changes an array from elsewhere")
        given = tree_map_only(Tensor, self._noted, asked)
        generator = _drawn_from(func, asked)
        real = self._values.run(func, given)
        fake = self._faked(func, asked, real)
        result = tree_map_only(Tensor, self._noted, fake)
        self._values.keep(result, real)
        self._outside.lend(func, filter(_is_real, leaves), _storages(result))
        reads = _storages(given)
        writes = (_storages(result) - reads) | {View.of(tensor).storage for tensor in changed}
        if writes:
            if generator is not None or func.overloadpacket.__name__ in FILLS:
                reads -= {View.of(t).storage for t in changed if View.of(t).is_whole}
            kept = func, given, result, frozenset(reads), frozenset(writes), generator
            self._operations.append(Operation(*kept))
        self._values.trim(HELD_BYTES)
        return fake

    def value(self, view: View) -> Tensor:
        """Compute what a view holds in the end."""
        return Values(self._again).tensor(view)

    def digest(self) -> str:
        """Hash every operation: what it is, what it was given, and what it drew from."""
        digest, numbers = hashlib.blake2b(digest_size=16), dict[int, int]()
        for operation in self._operations:
            drawn = () if operation.generator is None else (operation.generator[1],)
            digest.update(str(operation.func).encode())
            for leaf in tree_leaves((operation.given, operation.result, drawn)):
                digest.update(_bytes_of(leaf, numbers))
        return digest.hexdigest()

    def settle(self, module: nn.Module) -> dict[str, View]:
        """Put meta parameters and real buffers in place of the fakes in a finished model.

        Returns:
            Where the values of the parameters lie, by name.

        Raises:
            CannotDefer: a fake stays where nobody finds it, a parameter is none, or a value from
                elsewhere is no longer what it was.
        """
        if not self._outside.is_unchanged():
            raise CannotDefer("values from elsewhere changed after they were read")
        real = [name for name, p in module.named_parameters() if _is_real(p)]
        if real:
            raise CannotDefer(f"{real[0]} is a parameter from elsewhere")
        named = module.named_parameters(remove_duplicate=False)
        views = {name: View.of(p) for name, p in named}
        settled: dict[int, Tensor] = {}
        for part in module.modules():
            for held in (part._parameters, vars(part)):
                held.update(self._exchanged(held, settled))
        self._values.trim(0)
        gc.collect()
        # Weak references would find them sooner, but `Module.to` refuses tensors that have any.
        if any(type(o) is FakeTensor and o.fake_mode is self._mode for o in gc.get_objects()):
            raise CannotDefer("the model keeps tensors outside of its modules")
        return views

    def _exchanged(self, held: Mapping[str, Any], settled: dict[int, Tensor]) -> dict[str, Any]:
        """Give what is to stand for those entries that hold fakes; one for each fake."""

        def settle(fake: Tensor) -> Tensor:
            if id(fake) not in settled:
                is_parameter = isinstance(fake, nn.Parameter)
                settled[id(fake)] = _meta(fake) if is_parameter else self.value(View.of(fake))
            return settled[id(fake)]

        return {
            name: tree_map_only(FakeTensor, settle, value)
            for name, value in held.items()
            if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value))
        }

    def _noted(self, tensor: Tensor) -> View | Tensor:
        """Describe a fake; take a copy of what the constructor brought from elsewhere."""
        if not isinstance(tensor, FakeTensor):
            return self._outside.take(tensor)
        view = View.of(tensor)
        if view.storage not in self._storages:
            self._storages[view.storage] = tensor.untyped_storage()
        return view

    def _faked(self, func: Any, asked: Given, real: Any) -> Any:  # noqa: ANN401 - as above
        """Give what the operation gives on fakes; where it depends on values, fakes of those.

        Raises:
            CannotDefer: it does not compute on the CPU.
        """
        if any(leaf.device.type != "cpu" for leaf in tree_leaves(real) if isinstance(leaf, Tensor)):
            raise CannotDefer(f"{func} computes elsewhere than on the CPU")
        try:
            with self._mode:
                return func(*asked[0], **asked[1])
        except (DataDependentOutputException, DynamicOutputShapeException):
            return tree_map_only(Tensor, self._mode.from_tensor, real)

    def _again(self, view: View) -> torch.UntypedStorage:
        """Compute the values of a storage from the beginning."""
        needed, path = {view.storage}, []
        for operation in reversed(self._operations):
            if operation.writes & needed:
                needed = (needed - operation.writes) | operation.reads
                path.append(operation)
        values = Values(_empty)
        for operation in reversed(path):
            operation.again(values)
        return values.tensor(view).untyped_storage()


def _empty(view: View) -> torch.UntypedStorage:
    return torch.empty(view.num_bytes, dtype=torch.uint8).untyped_storage()


def _meta(fake: Tensor) -> nn.Parameter:
    """Make a parameter without memory, with what code may have attached to it."""
    empty = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
    parameter = nn.Parameter(empty, requires_grad=fake.requires_grad)
    own = vars(fake.detach())
    vars(parameter).update({n: value for n, value in vars(fake).items() if n not in own})
    return parameter


def _bytes_of(leaf: Any, numbers: dict[int, int]) -> bytes:  # noqa: ANN401 - any argument
    """Write an argument so that it is the same in every process.

    Args:
        leaf: of an operation.
        numbers: of the storages so far, by what `View` calls them; grows.
    """
    if isinstance(leaf, View):
        number = numbers.setdefault(leaf.storage, len(numbers))
        return repr((number, leaf.dtype, leaf.size, leaf.stride, leaf.offset)).encode()
    if isinstance(leaf, Tensor):
        # What a constructor brought from elsewhere, NumPy's numbers for example.
        return bytes_of(leaf)
    return b"" if isinstance(leaf, torch.Generator) else repr(leaf).encode()


def _is_real(leaf: Any) -> bool:  # noqa: ANN401 - any argument
    return isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)


def _storages(tree: Any) -> set[int]:  # noqa: ANN401 - any tree
    return {leaf.storage for leaf in tree_leaves(tree) if isinstance(leaf, View)}


def _changed(func: Any, asked: Given) -> list[Any]:  # noqa: ANN401 - an operation
    """List the arguments that an operation changes in place."""
    args, kwargs = asked
    return [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _drawn_from(func: Any, asked: Given) -> tuple[torch.Generator, Tensor] | None:  # noqa: ANN401
    """Tell which generator an operation draws from, and its state."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    typed = [leaf for leaf in tree_leaves(asked) if isinstance(leaf, torch.Generator)]
    generator = typed[0] if typed else torch.default_generator
    return generator, generator.get_state()
