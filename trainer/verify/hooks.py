"""Find hooks on the gradients of parameters, which run for every micro-batch."""

from __future__ import annotations

from torch import nn

KINDS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}


def hooked(module: nn.Module) -> dict[str, str]:
    """Name the parameters with a hook on their gradient, each with what registered it."""
    named = list(module.named_parameters())
    return {name: KINDS[kind] for name, p in named for kind in KINDS if getattr(p, kind, None)}
