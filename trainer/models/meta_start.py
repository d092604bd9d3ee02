"""Build a model on the meta device, and compute its first weights one at a time.

The constructor runs under `torch.device("meta")`, where tensors have no memory. What fills a
parameter is recorded; where it draws random numbers it is also run on memory that is dropped at
once, so that the generator moves as it does on the CPU. A weight is computed later by running its
operations again from the states of the generator that were found, and so has the bits of a model
that is built on the CPU.

Only for classes that declare `draws_on_meta`: their constructors draw on the meta device what they
draw on the CPU. Others may do something else there (transformers leaves weights undrawn).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Fill = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any], Tensor | None]
"""An operation that gave a whole tensor values: the dispatcher's function, its arguments after the
tensor, and the state of the default generator when it ran; None where it draws nothing."""


@final
class Weights:
    """Computes the weights that a constructor drew.

    Args:
        fills: what filled each parameter, in order, by every name it has.
        parameters: on the meta device, by the same names.
    """

    def __init__(
        self, fills: Mapping[str, Sequence[Fill]], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self._fills = fills
        self._forms = {name: (p.shape, p.dtype) for name, p in parameters.items()}

    def draw(self, name: str) -> Tensor:
        """Compute a parameter's first value, whole, on the CPU; the same bits at every call."""
        shape, dtype = self._forms[name]
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        now = torch.default_generator.get_state()
        for func, args, kwargs, state in self._fills[name]:
            if state is not None:
                torch.default_generator.set_state(state)
            func(tensor, *args, **kwargs)
        torch.default_generator.set_state(now)
        return tensor

    def digest(self) -> str:
        """Hash how all values come about, which tells them apart without computing them."""
        digest = hashlib.blake2b(digest_size=16)
        for name, fills in self._fills.items():
            for func, args, kwargs, state in fills:
                drawn_from = b"" if state is None else state.numpy().tobytes()
                digest.update(f"{name} {func} {args} {kwargs}".encode() + drawn_from)
        return digest.hexdigest()


def build_on_meta(build: Callable[[], nn.Module]) -> tuple[nn.Module, Weights]:
    """Build a model that `draws_on_meta` there; the generator moves as on the CPU."""
    recorder = _FillRecorder()
    with recorder, torch.device("meta"):
        module = build()
    named = dict(module.named_parameters(remove_duplicate=False))
    fills = {name: recorder.fills[_key(parameter)] for name, parameter in named.items()}
    return module, Weights(fills, named)


def is_on_meta(module: nn.Module) -> bool:
    """Whether parameters of a model have no memory."""
    return any(parameter.is_meta for parameter in module.parameters())


@contextmanager
def drawn(module: nn.Module, weights: Weights, device: torch.device) -> Iterator[None]:
    """Give a model on the meta device its first weights, whole, on `device` inside the block."""
    metas = [dict(part._parameters) for part in module.modules()]
    real = {
        id(p): nn.Parameter(weights.draw(name).to(device), p.requires_grad)
        for name, p in module.named_parameters()
    }
    try:
        for part, own in zip(module.modules(), metas, strict=True):
            part._parameters.update({name: real.get(id(p)) for name, p in own.items()})
        yield
    finally:
        for part, own in zip(module.modules(), metas, strict=True):
            part._parameters.update(own)


@final
class _FillRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call] # untyped in torch
    """Records what fills tensors on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # untyped in torch
        self.fills: dict[int, list[Fill]] = {}
        self._storages: list[torch.UntypedStorage] = []  # alive, so that their ids stay their own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run one operation, and record it if it fills a whole tensor on the meta device."""
        kwargs = dict(kwargs or {})
        target = args[0] if func._schema.is_mutable else None
        if isinstance(target, Tensor) and target.is_meta:
            others = tree_leaves((args[1:], kwargs))
            is_whole = target.nbytes == target.untyped_storage().nbytes()
            if not is_whole or any(isinstance(leaf, Tensor | torch.Generator) for leaf in others):
                raise NotImplementedError(f"{func} on the meta device")
            draws = torch.Tag.nondeterministic_seeded in func.tags
            state = torch.default_generator.get_state() if draws else None
            if draws:
                dropped = torch.empty(target.shape, dtype=target.dtype, device="cpu")
                func(dropped, *args[1:], **kwargs)
            self._storages.append(target.untyped_storage())
            self.fills.setdefault(_key(target), []).append((func, args[1:], kwargs, state))
        return func(*args, **kwargs)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
