"""FSDP2: every rank holds a shard of each parameter, of its gradient and of its moments.

The default form is a window: parameters are gathered once, no collective runs while micro-batches
compute, and one reduce-scatter per block ends it. Within the window a rank holds all parameters
and, in fp32, all gradients; shards alone remain between windows.

PyTorch offers the window's end (a backward's last callback) and the clearing of unsharded gradients
by private names only; `tests/ranks/test_ranks.py` holds them to what is relied on here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.core.errors import ConfigError
from trainer.core.micro_batch import Fields
from trainer.core.world import World
from trainer.parallel.base import Parallel, total_norm
from trainer.parallel.collectives import Collectives
from trainer.parallel.timing import time_collectives


@final
class Sharded(Parallel):
    """Parameters, gradients and optimizer state in shards; gathered for a window.

    Args:
        module: the user's module, the same on every rank; it is sharded in place. It is whole, or
            its parameters are on the meta device and get their memory here, in shards.
        call: runs it.
        blocks: submodules that are gathered and reduced each on its own; the rest forms one more.
        world: all ranks.
        replicas: copies of the sharded model (HSDP); 1 shards over all ranks (FSDP).
        mesh: of the ranks; None makes it.
        draw: gives a parameter's first value by its name, whole, the same on every rank; None
            leaves the shards of a model on the meta device to be loaded.

    Raises:
        ConfigError: a parameter cannot be sharded.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[Fields], Any],
        blocks: Sequence[nn.Module],
        world: World,
        *,
        replicas: int = 1,
        mesh: DeviceMesh | None = None,
        draw: Callable[[str], Tensor] | None = None,
    ) -> None:
        for name, parameter in module.named_parameters():
            if parameter.dim() == 0:
                raise ConfigError(
                    f"parallel=fsdp: {name} is a scalar, which FSDP2 cannot shard: "
                    "give it the shape (1,), or use parallel=ddp"
                )
            # FSDP2 takes no other layout in memory; the values stay.
            parameter.data = parameter.data.contiguous()
        self.call = call
        self.world = world
        self.module = module
        # Objectives make new tensors of what a model returns; they write into none of them.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        mesh = mesh or _mesh(world, replicas)
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        self._groups = [part for part in module.modules() if isinstance(part, FSDPModule)]
        for held in self._parts_of_groups():
            _check_types(module, [part.sharded_param for part in held])
        _give_memory(module, world.device, draw)
        for group in self._groups:
            # fp32 would else average, and gloo cannot; neither setter descends to children.
            group.set_gradient_divide_factor(1.0)
            group.set_force_sum_reduction_for_comms(True)
            group.set_reduce_scatter_unused_params(True)
            state: Any = group._get_fsdp_state()
            state._register_pre_backward_hook = partial(
                _register_inside, state._register_pre_backward_hook
            )
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self._live: set[int] = set()
        self._between_copies = mesh.get_group(0) if replicas > 1 else None
        self._collectives: Collectives | None = None
        self._is_across = True
        self._time_collectives()

    def _time_collectives(self) -> None:
        """Tell them from computing, where the host waits for them."""
        if self.world.device.type == "cpu":
            time_collectives(self._groups, self.world.times, self._meets_copies)

    def _meets_copies(self) -> bool:
        return self._between_copies is not None and self._is_across

    @property
    def num_groups(self) -> int:
        """Units that are gathered and reduced each on its own."""
        return len(self._groups)

    def gather(self) -> None:
        """See the base class: one all-gather per block."""
        root = self._root
        root.set_reshard_after_forward(False)
        root.set_reshard_after_backward(False)
        root.set_requires_gradient_sync(False)
        root.set_is_last_backward(False)
        # A rank without micro-batches runs no forward, which would prepare this.
        root._get_fsdp_state()._lazy_init()
        for group in self._groups:
            group.unshard()

    def release(self) -> None:
        """See the base class; a forward that failed half-way may have left a group in it."""
        for group in self._groups:
            group.reshard()
        self._root.reset_iter_state()

    def used(self) -> Sequence[bool]:
        """See the base class.

        Raises:
            ConfigError: the model wrote into a parameter that is gathered, which would be lost.
        """
        self._refuse_written()
        live = self._live | {
            index
            for index, part in self._numbered_parts()
            if part.unsharded_accumulated_grad is not None or _unsharded_grad(part) is not None
        }
        return [index in live for index in range(len(self.parameters))]

    def make_room(self) -> None:
        """See the base class: the buffer of the largest block, and all shards of the gradient.

        FSDP2 allocates them itself, so as much is taken here at once and given back, to an
        allocator that keeps it. In lockstep nothing is left to reduce.
        """
        if self._collectives is not None:
            return
        shards = [
            sum(p.padded_sharded_param_size.numel() * p.sharded_param.itemsize for p in held)
            for held in self._parts_of_groups()
        ]
        copies = 1 if self._between_copies is None else self._between_copies.size()
        sizes = (max(shards) * self.world.size // copies, sum(shards))
        room = [torch.empty(n, dtype=torch.uint8, device=self.world.device) for n in sizes]
        del room

    def reduce(self, used: Sequence[bool]) -> None:
        """See the base class: one reduce-scatter per block, and one all-reduce over replicas."""
        root = self._root
        root.set_requires_gradient_sync(True)
        root.set_reshard_after_backward(True)
        root.set_is_last_backward(True)
        root._get_fsdp_state()._root_post_backward_final_callback()
        self._forget_unused(used)

    def begin_lockstep(self) -> None:
        """See the base class."""
        self._live.clear()
        self.num_reduced = 0
        if self._collectives is not None:
            self._collectives.forget()
            return
        # Reduced gradients do not tell who used a parameter, so each tells it in backward.
        self.gather()
        for index, part in self._numbered_parts():
            hook = partial(self._mark, index)
            part._unsharded_param.register_post_accumulate_grad_hook(hook)
        self.release()
        names = {part: name for name, part in self.module.named_modules()}
        groups = {names[group]: group for group in self._groups}
        self._collectives = Collectives(groups, self._between_copies, self.world)
        self._time_collectives()
        self.needs_rehearsal = True

    @contextmanager
    def reducing(self, *, across: bool, is_last: bool) -> Iterator[None]:
        """See the base class: a block's parameters leave as soon as it has used them."""
        root = self._root
        root.set_reshard_after_forward(True)
        # Backward begins with the root's own parameters.
        root.set_reshard_after_forward(False, recurse=False)
        root.set_reshard_after_backward(True)
        root.set_requires_gradient_sync(True)
        # Overwritten by the line above, so it comes after.
        root.set_requires_all_reduce(across)
        root.set_is_last_backward(is_last)
        self._is_across = across
        self._forget_order()
        assert self._collectives is not None
        with self._collectives.micro_batch():
            yield
        self.num_reduced += 1

    def _forget_order(self) -> None:
        """Forget what earlier micro-batches used, which backward would else gather ahead again."""
        self._root._get_fsdp_state()._comm_ctx.post_forward_order.clear()
        for group in self._groups:
            for held in group._get_fsdp_state()._fsdp_param_groups:
                held._post_forward_indices.clear()

    def stand_in(self) -> None:
        """See the base class."""
        assert self._collectives is not None
        self._collectives.send_rest(across=self._is_across)

    def end_lockstep(self, used: Sequence[bool]) -> None:
        """See the base class."""
        self._forget_unused(used)
        self._live.clear()

    def gradient_norm(self) -> Tensor:
        """See the base class; in fp32 at least."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if not grads:
            return torch.zeros((), device=self.world.device)
        norm = total_norm(grads)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def scale_gradients(self, factor: Tensor) -> None:
        """See the base class."""
        grads = [
            grad.to_local() if isinstance(grad, DTensor) else grad
            for grad in (p.grad for p in self.parameters)
            if grad is not None
        ]
        if grads:
            torch._foreach_mul_(grads, factor)

    def _forget_unused(self, used: Sequence[bool]) -> None:
        """Drop the zeros that every rank reduced for what none of them used."""
        for parameter, flag in zip(self.parameters, used, strict=True):
            if not flag:
                parameter.grad = None

    def _refuse_written(self) -> None:
        for part in self._sharded_parts():
            # PyTorch keeps its own writes out of this count.
            if hasattr(part, "_unsharded_param") and part._unsharded_param._version:
                where = part._module_info
                name = next(n for n, owner in self.module.named_modules() if owner is where.module)
                raise ConfigError(
                    f"model: forward writes into {f'{name}.{where.param_name}'.lstrip('.')}, a "
                    "parameter that is in shards, which would forget it: make it a buffer, or use "
                    "parallel=ddp"
                )

    def _mark(self, index: int, _: Tensor) -> None:
        self._live.add(index)

    def drop_gradients(self) -> None:
        """See the base class. The order counts: any other adds the failed attempt to the next."""
        self._live.clear()
        self._root.reset_iter_state()
        for part in self._sharded_parts():
            part.unsharded_accumulated_grad = None
            if hasattr(part, "_unsharded_param"):
                part._unsharded_param.grad = None
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def _root(self) -> FSDPModule:
        root = self.module
        assert isinstance(root, FSDPModule)
        return root

    def _numbered_parts(self) -> Iterator[tuple[int, Any]]:
        index_of = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        for part in self._sharded_parts():
            if id(part.sharded_param) in index_of:
                yield index_of[id(part.sharded_param)], part

    def _sharded_parts(self) -> Iterator[Any]:
        for parts in self._parts_of_groups():
            yield from parts

    def _parts_of_groups(self) -> Iterator[list[Any]]:
        for group in self._groups:
            for held in group._get_fsdp_state()._fsdp_param_groups:
                yield held.fsdp_params


def _register_inside(register: Callable[[Any], Any], output: Any) -> Any:  # noqa: ANN401 - a model's
    """Register FSDP2's hook before backward; of itself it finds tensors in containers alone.

    Args:
        register: registers it on the tensors in a container.
        output: of a module.
    """
    if isinstance(output, Tensor | dict | list | tuple) or is_dataclass(output):
        return register(output)
    register([*getattr(output, "__dict__", {}).values()])
    return output


def _unsharded_grad(part: Any) -> Tensor | None:  # noqa: ANN401 - private to PyTorch
    parameter: nn.Parameter | None = getattr(part, "_unsharded_param", None)
    return None if parameter is None else parameter.grad


def _check_types(module: nn.Module, held: Sequence[nn.Parameter]) -> None:
    """Refuse a block that trains parameters of several types.

    Raises:
        ConfigError: it does; FSDP2 would stop in the first step.
    """
    first = {p.dtype: p for p in reversed(held) if p.requires_grad}
    if len(first) > 1:
        names = {id(p): name for name, p in module.named_parameters()}
        said = ", ".join(f"{names[id(p)]} {dtype}" for dtype, p in first.items())
        raise ConfigError(
            f"parallel=fsdp: FSDP2 shards one type of parameters a block, and here are {said}: "
            "give the model one type, or use parallel=ddp"
        )


def _give_memory(
    module: nn.Module, device: torch.device, draw: Callable[[str], Tensor] | None
) -> None:
    """Put shards with memory in place of those on the meta device, one parameter at a time."""
    real: dict[int, nn.Parameter] = {}
    for name, meta in module.named_parameters():
        if not meta.is_meta:
            continue
        assert isinstance(meta, DTensor)
        shard: Tensor = torch.empty_like(meta, device=device)
        if draw is not None:
            whole, (mesh, placements) = draw(name).to(device), (meta.device_mesh, meta.placements)
            shard = distribute_tensor(whole.contiguous(), mesh, placements, src_data_rank=None)
        real[id(meta)] = nn.Parameter(shard, meta.requires_grad)
    if real:
        # Assigned under all of their names, so that tied ones stay tied.
        named = module.named_parameters(remove_duplicate=False)
        state = {name: real[id(meta)] for name, meta in named if id(meta) in real}
        module.load_state_dict(state, strict=False, assign=True)


def _mesh(world: World, replicas: int) -> DeviceMesh:
    kind = world.device.type
    if replicas == 1:
        return init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",))
    return init_device_mesh(
        kind, (replicas, world.size // replicas), mesh_dim_names=("replicate", "shard")
    )
