"""Find the state that a model declares: what its forwards move and no gradient updates.

Declared are buffers, saved in checkpoints or not; random generators among the attributes of
modules; and what `get_extra_state` gives. Every other attribute stays as the forward made it: a
flag put back without the hooks that it stands for would have the next forward register them again.
Where a forward runs that is none of the step's, numbers go back too: by them buffers are known to
be up to date.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

from torch import Tensor, nn

from trainer.core.generators import is_generator, undo_of

NO_EXTRA_STATE = nn.Module.get_extra_state
_NUMBERS = {int, float}  # and no bool
_Buffers = dict[str, Tensor | None]


def parts_of(*roots: object) -> Iterator[object]:
    """Give the modules of models, and other objects as they are."""
    for root in roots:
        yield from root.modules() if isinstance(root, nn.Module) else (root,)


def own_generators(*roots: object) -> Iterator[Any]:
    """Find the random generators among the attributes of modules and of other objects."""
    for part in parts_of(*roots):
        yield from _generators(part)


def _generators(part: object) -> list[Any]:
    values = getattr(part, "__dict__", {}).values()
    return [each for each in values if is_generator(each.__class__)]


def undo_other_state(*roots: object) -> list[Callable[[], object]]:
    """Remember all declared state but buffers; gives what puts it back."""
    undo: list[Callable[[], object]] = []
    # In one walk, since it is done in every step.
    for part in parts_of(*roots):
        undo += map(undo_of, _generators(part))
        if isinstance(part, nn.Module) and type(part).get_extra_state is not NO_EXTRA_STATE:
            undo.append(_undo_extra(part))
    return undo


def undo_numbers(modules: Iterable[nn.Module]) -> list[Callable[[], object]]:
    """Remember the numbers among the attributes of modules; gives what puts them back."""
    undo: list[Callable[[], object]] = []
    for part in modules:
        numbers = {name: value for name, value in vars(part).items() if type(value) in _NUMBERS}
        undo.append(partial(vars(part).update, numbers))
    return undo


def _undo_extra(module: nn.Module) -> Callable[[], object]:
    state = copy.deepcopy(module.get_extra_state())
    # A copy each time: the module may go on with what it is given.
    return lambda: module.set_extra_state(copy.deepcopy(state))


def has_declared_state(module: nn.Module) -> bool:
    """Whether there is anything that its forwards may move."""
    return any(part._buffers for part in module.modules()) or bool(undo_other_state(module))


@final
class EarlierState:
    """Holds the declared state that a module has now, to compute from it once more."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = [part._buffers for part in module.modules()]
        self._copies = _cloned(self._buffers)
        self._undo = [*undo_other_state(module), *undo_numbers(module.modules())]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let the module begin with it inside the block; what it writes there is forgotten.

        Other tensors take the place of its buffers, whose values a backward may still need.
        """
        now = [*map(dict, self._buffers)]
        undo = [*undo_other_state(self._module), *undo_numbers(self._module.modules())]
        self._put(_cloned(self._copies), self._undo)
        try:
            yield
        finally:
            self._put(now, undo)

    def _put(self, values: Sequence[_Buffers], undo: Sequence[Callable[[], object]]) -> None:
        for buffers, each in zip(self._buffers, values, strict=True):
            buffers.clear()
            buffers.update(each)
        for put_back in undo:
            put_back()


def _cloned(buffers: Sequence[_Buffers]) -> list[_Buffers]:
    """Clone the buffers of modules, one that several of them share once."""
    clones: dict[int, Tensor] = {}
    copies = list[_Buffers]()
    for each in buffers:
        mine: _Buffers = dict(each)
        for name, tensor in each.items():
            if tensor is None:
                continue
            if id(tensor) not in clones:
                # Both share memory until either is written, through `.data` or a kernel too. So
                # constants, such as a mask in every block, take no more.
                try:
                    clones[id(tensor)] = tensor._lazy_clone()
                except RuntimeError:
                    # The memory is NumPy's or a file's, or the tensor of a subclass without it.
                    clones[id(tensor)] = tensor.clone()
            mine[name] = clones[id(tensor)]
        copies.append(mine)
    return copies
