"""Copy a model with all that it contains, and what a forward computed and left in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar, final

from torch import Tensor
from torch.overrides import TorchFunctionMode

Copied = TypeVar("Copied")


@final
class _TensorCopies(TorchFunctionMode):
    """Copies the tensors in `copy.deepcopy`: those that a forward computed too, detached."""

    def __init__(self, copy_of: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self._copy_of = copy_of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Copy a tensor, or call any other function."""
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            args = (args[0].detach(), *args[1:])
        # A parameter copies its data by `clone`.
        if self._copy_of is not None and func in {Tensor.__deepcopy__, Tensor.clone}:
            return self._copy_of(args[0])
        return func(*args, **(kwargs or {}))


def duplicate(
    value: Copied,
    memo: dict[int, Any] | None = None,
    copy_of: Callable[[Tensor], Tensor] | None = None,
) -> Copied:
    """Copy a model, or several objects that share parts, tensors by `copy_of` where it is given."""
    with _TensorCopies(copy_of):
        return copy.deepcopy(value, memo)
