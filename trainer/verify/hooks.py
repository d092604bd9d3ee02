"""Find hooks on the gradients of parameters, which run for every micro-batch."""

from __future__ import annotations

from torch import nn

KINDS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
"""Where a parameter keeps its hooks, and what registers them."""


def hooked(module: nn.Module) -> dict[str, str]:
    """Name the parameters with a hook on their gradient, each with what registered it."""
    return {
        name: method
        for name, parameter in module.named_parameters()
        for attribute, method in KINDS.items()
        if getattr(parameter, attribute, None)
    }
