"""Models built whole where that takes little, else recorded: `parallel=auto` has yet to be weighed.

A constructor runs once, as it always does, wherever its model turns out to be small.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter

from trainer.models.deferred import Weights, deferred

MODEST_BYTES = 2**30
"""Parameters of a model that any rank can hold whole while it is weighed whether all should."""


def modest_or_deferred(build: Callable[[], nn.Module]) -> tuple[nn.Module, Weights | None]:
    """Build a model whole if it has at most `MODEST_BYTES` of parameters, else `deferred`.

    Raises:
        CannotDefer: it has more, and has to be built whole.
    """
    weighed = 0

    def weigh(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal weighed
        # Lazy ones have no size yet; tied ones count as often as they are registered.
        if parameter is not None and not isinstance(parameter, UninitializedParameter):
            weighed += parameter.nbytes
        if weighed > MODEST_BYTES:
            raise _NotModest

    handle = register_module_parameter_registration_hook(weigh)
    try:
        return build(), None
    except _NotModest:
        pass
    finally:
        handle.remove()
    return deferred(build)


class _NotModest(BaseException):
    """Ends a constructor, whatever exceptions it catches."""
