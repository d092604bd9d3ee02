"""Call what FSDP2 of torch 2.13 offers, and do the same by its own objects in 2.11 and 2.12.

Those two releases are out and stay as they are. `tests/ranks/test_torch_range.py` runs the tests of
shards under the lowest and the highest torch that the package allows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


def prepare_root(root: FSDPModule) -> None:
    """Do what FSDP2 does in its first forward, which a rank without micro-batches never runs."""
    root._get_fsdp_state()._lazy_init()


def reset(root: FSDPModule) -> None:
    """Leave a forward or backward that failed half-way: shards again, and nothing under way."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    state: Any = root._get_fsdp_state()
    sent, shared = state._comm_ctx, state._state_ctx
    here = sent.device_handle.current_stream()
    for name in ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce"):
        here.wait_stream(getattr(sent, f"{name}_stream"))
    sent.all_gather_state = None
    if hasattr(sent, "reduce_scatter_states"):
        sent.reduce_scatter_states.clear()
    else:
        sent.reduce_scatter_state = None
    sent.post_forward_order.clear()
    for each in shared.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = TrainingState.IDLE
        for group in _groups(each):
            _reset_group(group)
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def reduce_unused(unit: FSDPModule) -> None:
    """Have a block reduce zeros for parameters without a gradient, which another rank may use."""
    if hasattr(unit, "set_reduce_scatter_unused_params"):
        unit.set_reduce_scatter_unused_params(True)
        return
    for group in _groups(unit._get_fsdp_state()):
        _add_zeros(group)


def add_in(unit: FSDPModule, dtype: torch.dtype) -> None:
    """Have a block add up its reduced gradients in a dtype, which else is that of its shards."""
    for group in _groups(unit._get_fsdp_state()):
        group._orig_dtype = dtype


def _groups(state: Any) -> list[Any]:  # noqa: ANN401 - FSDP2's own types differ by release
    """List the parameter groups of a block: 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return [*state._fsdp_param_groups]
    if state._fsdp_param_group is None:
        return []
    return [state._fsdp_param_group]


def _reset_group(group: Any) -> None:  # noqa: ANN401 - likewise
    gathered = group._all_gather_result
    if gathered is not None and isinstance(gathered.all_gather_work, dist.Work):
        gathered.all_gather_work.wait()
    results = "_all_gather_result", "_all_reduce_state", "_partial_reduce_output"
    for name in (*results, "_post_reduce_event", "_reshard_after_forward_event"):
        setattr(group, name, None)
    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE
    group._to_sharded()


def _add_zeros(group: Any) -> None:  # noqa: ANN401 - likewise
    reduce = group.post_backward

    def post_backward(*unused: object) -> None:
        for each in group.fsdp_params if group.reduce_grads else ():
            whole = getattr(each, "_unsharded_param", None)
            if whole is None or not whole.requires_grad:
                continue
            if whole.grad is None and each.unsharded_accumulated_grad is None:
                whole.grad = torch.zeros_like(whole)
        reduce(*unused)

    group.post_backward = post_backward
