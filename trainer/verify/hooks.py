"""Functions that a model holds: hooks on its parameters and modules, and exchanged forwards.

`copy.deepcopy` drops hooks on parameters, and a copy without them would be exact where the run is
not. Functions count as constants to it: one that holds the model in a closure would go on working
on the model itself, and the copy would prove nothing.
"""

from __future__ import annotations

import copy
import dis
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, final

import torch
from torch import nn

KINDS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
"""Where a parameter keeps its hooks, and what registers them."""

UNCARRIED = (
    "has a hook on its gradient that reads an object of its module, or one that cannot be copied, "
    "so it was left out here and nothing is proven: let it hold what it needs, or take it off"
)
"""Of a parameter."""

SHARED = (
    "got a gradient from the copy that this compares, through a function or a scripted module that "
    "cannot be copied with the model, so nothing is proven: write it as a method of the module"
)
"""Of a parameter."""

STATELESS = (
    ModuleType, type, FunctionType, BuiltinFunctionType, int, float, complex, str, bytes, type(None)
)  # fmt: skip
"""What a hook may read from its module, and not move."""


@final
class UncarriedError(Exception):
    """A hook depends on what cannot be copied with the model."""


def hooked(module: nn.Module) -> dict[str, str]:
    """Name the parameters with a hook on their gradient, each with what registered it."""
    return {
        name: method
        for name, parameter in module.named_parameters()
        for attribute, method in KINDS.items()
        if getattr(parameter, attribute, None)
    }


def carry(source: nn.Module, twin: nn.Module, memo: dict[int, Any]) -> tuple[str, ...]:
    """Put the hooks of a model's parameters onto those of its copy, and its functions into it.

    What a function holds of the model becomes what the copy has in its place; what else it holds
    is copied with it, an optimizer too.

    Args:
        source: the model.
        twin: its copy, without a hook.
        memo: of `copy.deepcopy`.

    Returns:
        Parameters with a hook that reads something else, which the copy then goes without.
    """
    twins, uncarried = dict(twin.named_parameters()), dict[str, None]()
    for name, parameter in source.named_parameters():
        for attribute, method in KINDS.items():
            for hook in (getattr(parameter, attribute, None) or {}).values():
                # What is frozen by now has no gradient, and takes no hook.
                if not twins[name].requires_grad:
                    continue
                try:
                    getattr(twins[name], method)(_carried(hook, memo))
                except Exception:  # copying what a user's hook holds may raise anything
                    uncarried[name] = None
    _carry_functions(source, twin, memo)
    return tuple(uncarried)


def _carry_functions(source: nn.Module, twin: nn.Module, memo: dict[int, Any]) -> None:
    modules = dict(twin.named_modules())
    for name, part in source.named_modules():
        if name in modules and not isinstance(part, torch.jit.ScriptModule):
            mine, theirs = part.__dict__, modules[name].__dict__
            for key in [key for key, held in mine.items() if isinstance(held, dict)]:
                _rebind(mine[key], theirs.get(key), memo)  # of hooks, among others
            _rebind(mine, theirs, memo)


def _rebind(mine: dict[Any, Any], theirs: Any, memo: dict[int, Any]) -> None:  # noqa: ANN401 - what a copy has in its place
    """Exchange the functions in a copied dictionary for ones that hold the copy."""
    for key, value in mine.items() if isinstance(theirs, dict) else ():
        if isinstance(value, FunctionType | partial) and key in theirs:
            # What cannot be copied stays; gradients that it leaves in the model are looked for.
            with suppress(Exception):
                theirs[key] = _carried(value, memo, checks_globals=False)


def drop_hooks(module: nn.Module) -> None:
    """Take all hooks off a model's parameters."""
    for parameter in module.parameters():
        for attribute in KINDS:
            (getattr(parameter, attribute, None) or {}).clear()


def _carried(hook: Any, memo: dict[int, Any], *, checks_globals: bool = True) -> Any:  # noqa: ANN401 - anything callable
    """Copy something callable with what it holds; of what fails, nothing half made is left.

    Raises:
        UncarriedError: it reads an object that is no constant from its module.
    """
    before = dict(memo)
    try:
        return _rebound(hook, memo, checks_globals=checks_globals)
    except Exception:
        memo.clear()
        memo.update(before)
        raise


def _rebound(hook: Any, memo: dict[int, Any], *, checks_globals: bool) -> Any:  # noqa: ANN401 - anything callable
    """Copy something callable with what it holds; functions count as constants to `deepcopy`.

    Raises:
        UncarriedError: it reads an object of its module.
    """
    if isinstance(hook, ModuleType):
        return hook
    if isinstance(hook, FunctionType):
        return _rebound_function(hook, memo, checks_globals=checks_globals)
    if isinstance(hook, MethodType):
        owner = copy.deepcopy(hook.__self__, memo)
        return MethodType(hook.__func__, owner)
    if isinstance(hook, partial):
        held = copy.deepcopy((hook.args, hook.keywords), memo)
        return partial(
            _rebound(hook.func, memo, checks_globals=checks_globals), *held[0], **held[1]
        )
    return copy.deepcopy(hook, memo)


def _rebound_function(
    function: FunctionType, memo: dict[int, Any], *, checks_globals: bool
) -> FunctionType:
    if checks_globals:
        for name in _globals_read(function.__code__):
            if not isinstance(function.__globals__.get(name), STATELESS):
                raise UncarriedError
    cells = []
    for cell in function.__closure__ or ():
        if id(cell) not in memo:
            # Before its content, which may be the function itself; and what two share, they share.
            memo[id(cell)] = CellType()
            content = _rebound(cell.cell_contents, memo, checks_globals=checks_globals)
            memo[id(cell)].cell_contents = content
        cells.append(memo[id(cell)])
    defaults = copy.deepcopy(function.__defaults__, memo)
    twin = FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults, tuple(cells) or None
    )
    twin.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
    # Decorators leave what they wrap, by which its signature is read.
    twin.__dict__.update(function.__dict__)
    return twin


def _globals_read(code: CodeType) -> Iterator[str]:
    """List what a function, or one within it, reads from its module.

    Yields:
        Names.
    """
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for held in code.co_consts:
        if isinstance(held, CodeType):
            yield from _globals_read(held)
