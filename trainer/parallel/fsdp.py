"""Shard a model by FSDP2: every rank holds a part of each parameter, gradient and moment.

The default form is a window: parameters are gathered once, no collective runs while micro-batches
compute, and one reduce-scatter per block ends it. FSDP2 itself can only reduce within a backward,
before ranks could agree, so the window's end is ours. Within the window a rank holds all parameters
and all gradients; shards alone remain between windows.

Under bf16 or fp16 parameters are gathered in that type, 2 bytes each, and a backward's gradients
are of it; they are added up and reduced in the type of the shards, which is fp32. Gradients of
weights that are in half precision themselves may be wider, too (`grad_dtype`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from operator import attrgetter
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.core.errors import ConfigError
from trainer.core.micro_batch import Fields
from trainer.core.tensors import fill, gradient_dtype, local_part, whole_of
from trainer.core.world import World
from trainer.models.first_weights import FirstWeights
from trainer.parallel import fsdp_calls
from trainer.parallel.base import Parallel, drop_unused, norm_in_double, reduce_scatter
from trainer.parallel.block_order import BlockOrder, close_object, open_object
from trainer.parallel.sync import Reduction


@final
class Sharded(Parallel):
    """Parameters, gradients and optimizer state in shards; gathered for a window.

    `blocks` are gathered and reduced each on its own; the rest forms one more. Parameters on the
    meta device get their memory here, in shards, and begin with `weights`, whose values None leaves
    open. fp32 parameters are gathered in `dtype`.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[Fields], Any],
        blocks: Sequence[nn.Module],
        world: World,
        mesh: DeviceMesh,
        *,
        weights: FirstWeights | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        wide = dict[str, torch.dtype]()
        for name, parameter in module.named_parameters():
            if gradient_dtype(parameter) != parameter.dtype:
                wide[name] = gradient_dtype(parameter)
            if parameter.dim() == 0:
                raise ConfigError(
                    f"parallel=fsdp: {name} is a scalar: give it the shape (1,), or parallel=ddp"
                )
            # FSDP2 takes no other layout in memory; the values stay.
            parameter.data = parameter.data.contiguous()
        # Objectives make new tensors of what a model returns; they write into none of them.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        # Autocast casts inputs where an operator asks for it, as it does without shards.
        reduce_dtype = torch.float32 if wide or dtype is not None else None
        policy = MixedPrecisionPolicy(dtype, reduce_dtype, cast_forward_inputs=False)
        for part in (*blocks, module):
            # FSDP2 looks for the tensors whose backward it waits for in containers alone.
            part.register_forward_hook(open_object)
            fully_shard(part, mesh=mesh, mp_policy=policy)
            part.register_forward_hook(close_object)
        _give_memory(module, world.device, weights)
        self._shards = dict(module.named_parameters())
        for name, gradient in wide.items():
            self._shards[name].grad_dtype = gradient
        self._whole: dict[str, nn.Parameter] = {}
        self._groups = _groups_of(module, self._shards)
        for unit in self._groups:
            # fp32 would else average, and gloo cannot; neither setter descends to children.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            fsdp_calls.reduce_unused(unit)
        trained = [*filter(attrgetter("requires_grad"), self._shards.values())]
        super().__init__(module, call, trained, world)
        self._sharing = mesh.get_group(mesh.ndim - 1)
        self._copies: dist.ProcessGroup | None = None
        if mesh.ndim > 1:
            self._copies = mesh.get_group(0)
        self._order: BlockOrder | None = None
        assert isinstance(module, FSDPModule)  # which `fully_shard` made of it
        self._root: FSDPModule = module

    def _open(self) -> None:
        # In lockstep each block gathers for itself, where it is used.
        if not self._in_lockstep:
            self.gather()
            return
        if self._order is None:
            # Reduced gradients do not tell who used a parameter, so each tells it in backward.
            self.gather()
            for index, parameter in enumerate(self._trained().values()):
                hook: Any = parameter.register_post_accumulate_grad_hook
                hook(lambda _, index=index: self._live.add(index))
            self.release()
            for unit, names in self._groups.items():
                if names:
                    fsdp_calls.add_in(unit, gradient_dtype(self._shards[names[0]]))
            self._order = BlockOrder(self.module, self.world)
        for whole in self._trained().values():
            # FSDP2 casts as it reduces, zeros as well
            whole.grad_dtype = whole.dtype

    def gather(self) -> None:
        """See the base class: one all-gather per block."""
        root = self._root
        root.set_reshard_after_forward(False)
        root.set_reshard_after_backward(False)
        root.set_requires_gradient_sync(False)
        fsdp_calls.prepare_root(root)
        with self.world.rank_progress.waiting():
            for unit in self._groups:
                unit.unshard()
        # FSDP2 makes them in the first gather, and goes on with the same objects.
        self._whole = self._whole or dict(self.module.named_parameters())
        for name, whole in self._trained().items():
            whole.grad_dtype = gradient_dtype(self._shards[name])

    def release(self) -> None:
        """See the base class; a forward that failed half-way may have left a group in it."""
        for unit in self._groups:
            unit.reshard()
        fsdp_calls.reset(self._root)

    def used(self) -> Sequence[bool]:
        """See the base class; what the model wrote into a gathered parameter would be lost."""
        if self._in_lockstep:
            self._refuse_rest()
        for name, parameter in self._whole.items():
            if parameter._version:  # PyTorch keeps its own writes out of this count
                raise ConfigError(
                    f"model: forward writes into {name}, a sharded parameter, which loses it: "
                    "make it a buffer, or use parallel=ddp"
                )
        return [
            whole.grad is not None or index in self._live
            for index, whole in enumerate(self._trained().values())
        ]

    @property
    def computed_with(self) -> Sequence[nn.Parameter]:
        """See the base class: those that FSDP2 gathers, once the first step has begun."""
        return [*self._trained().values()]

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: self._whole[name] for name, p in self._shards.items() if p.requires_grad}

    def make_room(self) -> None:
        """See the base class: the buffer of the largest block, and all shards of the gradient.

        As much is taken here at once and given back, to an allocator that keeps it. In lockstep
        nothing is left to reduce.
        """
        if self._in_lockstep:
            return
        shards = list[int]()
        for names in self._groups.values():
            num_bytes = 0
            for name in names:
                itemsize = gradient_dtype(self._shards[name]).itemsize
                num_bytes += prod(self._shape(name)) * itemsize
            shards.append(num_bytes)
        sizes = (max(shards) * self._sharing.size(), sum(shards))
        room = [torch.empty(n, dtype=torch.uint8, device=self.world.device) for n in sizes]
        del room

    def reduce(self, used: Sequence[bool]) -> None:
        """See the base class: one reduce-scatter per block, and one all-reduce over copies."""
        if not self._in_lockstep:
            for unit, names in self._groups.items():
                if names:
                    self._reduce_group(names)
                unit.reshard()
            fsdp_calls.reset(self._root)
        drop_unused(self.parameters, used)

    def _reduce_group(self, names: Sequence[str]) -> None:
        """Sum the whole gradients of a group, and leave each rank its shard of them."""
        size, first = self._sharing.size(), self._shards[names[0]]
        pieces = [prod(self._shape(name)) for name in names]
        dtype, device = gradient_dtype(first), self.world.device
        flat = torch.zeros((size, sum(pieces)), dtype=dtype, device=device)
        for name, place in zip(names, torch.split(flat, pieces, 1), strict=True):
            whole = self._whole[name]
            if whole.grad is not None:
                _chunk(whole.grad, torch.unflatten(place, 1, self._shape(name)))
                whole.grad = None
        total = torch.empty_like(flat[0])
        with self.world.rank_progress.waiting():
            reduce_scatter(total, flat.view(-1), group=self._sharing)
            if self._copies is not None:
                dist.all_reduce(total, group=self._copies)
        for name, piece in zip(names, torch.split(total, pieces), strict=True):
            shard: Any = self._shards[name]
            mine = piece.view(self._shape(name))[: shard.to_local().shape[0]]
            layout = {"shape": shard.shape, "stride": shard.stride(), "run_check": False}
            shard.grad = DTensor.from_local(mine, shard.device_mesh, shard.placements, **layout)

    def _shape(self, name: str) -> tuple[int, ...]:
        """Give the shape of a parameter's shard, padded: its first dimension is divided."""
        rows, *others = self._shards[name].shape
        return -(-rows // self._sharing.size()), *others

    @contextmanager
    def _computing(self, reduction: Reduction, *, is_last: bool) -> Iterator[None]:
        # In lockstep a block's parameters leave once it has used them. What is not reduced FSDP2
        # keeps, and adds to what it reduces next.
        if not self._in_lockstep:
            yield
            return
        root = self._root
        root.set_reshard_after_forward(True)
        # Backward begins with the root's own parameters.
        root.set_reshard_after_forward(False, recurse=False)
        root.set_reshard_after_backward(True)
        root.set_requires_gradient_sync(reduction != "none")
        # Overwritten by the line above, so it comes after.
        root.set_requires_all_reduce(reduction == "across")
        assert self._order is not None
        with self._order.micro_batch():
            yield

    def gradient_norm(self) -> Tensor:
        """See the base class."""
        if self.world.device.type == "cpu":
            here = [*map(local_part, self.gradients())]
            return self.sum_over_shards(norm_in_double(here).square()).sqrt()
        return whole_of(super().gradient_norm())

    def sum_over_shards(self, totals: Tensor) -> Tensor:
        """See the base class; copies of the shards have the same."""
        with self.world.rank_progress.waiting():
            dist.all_reduce(totals, group=self._sharing)
        return totals

    def scale_gradients(self, factor: Tensor) -> None:
        """See the base class."""
        torch._foreach_mul_([*map(local_part, self.gradients())], factor)

    def drop_gradients(self) -> None:
        """See the base class."""
        super().drop_gradients()
        for parameter in self._whole.values():
            parameter.grad = None
        fsdp_calls.reset(self._root)


def _groups_of(module: nn.Module, shards: dict[str, nn.Parameter]) -> dict[FSDPModule, list[str]]:
    """List the parameters that each unit gathers together and that are trained, by name."""
    names = {id(p): name for name, p in shards.items()}
    groups: dict[FSDPModule, list[str]] = {}
    for unit in module.modules():
        if not isinstance(unit, FSDPModule):
            continue
        mine: dict[str, None] = {}
        # By name once each: a tied parameter is met where each of its owners is.
        for parameter in _own(unit):
            if parameter.requires_grad:
                mine[names[id(parameter)]] = None
        types = {shards[name].dtype: name for name in reversed(mine)}
        if len(types) > 1:  # which FSDP2 would refuse in the first step
            listed = ", ".join(f"{name} {dtype}" for dtype, name in types.items())
            raise ConfigError(
                f"parallel=fsdp: FSDP2 needs one parameter dtype per block, but found {listed}: "
                "convert the model to one dtype, or use parallel=ddp"
            )
        groups[unit] = [*mine]
    return groups


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    """List what a unit gathers, in FSDP2's order: children first, other units left out."""
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own(child)
    yield from module.parameters(recurse=False)


def _chunk(whole: Tensor, chunks: Tensor) -> None:
    """Copy a tensor into `(ranks, rows, ...)`, rank by rank; what is over stays zero."""
    size, rows = chunks.shape[:2]
    if len(whole) == size * rows:
        chunks.copy_(torch.unflatten(whole, 0, (size, rows)))
        return
    for rank, part in enumerate(torch.split(whole, rows)):
        chunks[rank, : len(part)].copy_(part)


def _give_memory(module: nn.Module, device: torch.device, weights: FirstWeights | None) -> None:
    """Put shards with memory in place of those on the meta device, one parameter at a time."""
    real: dict[int, nn.Parameter] = {}
    for name, meta in module.named_parameters():
        if not meta.is_meta:
            continue
        shard = torch.empty_like(meta, device=device, requires_grad=False)
        if weights is not None:
            fill(shard, weights[name])
        real[id(meta)] = nn.Parameter(shard, meta.requires_grad)
    # Assigned under all of their names, so that tied ones stay tied.
    state = dict[str, nn.Parameter]()
    for name, meta in module.named_parameters(remove_duplicate=False):
        if id(meta) in real:
            state[name] = real[id(meta)]
    if state:
        module.load_state_dict(state, strict=False, assign=True)


def make_mesh(world: World, replicas: int = 1) -> DeviceMesh:
    """Make the mesh of all ranks, with its communicators. Collective.

    These take memory of a GPU from their first collective on, which is here, so that memory limits
    that are read later are without it. `replicas` are copies of the sharded model (HSDP); one is
    sharded over all ranks (FSDP).
    """
    shape, names = (replicas, world.size // replicas), ("replicate", "shard")
    start = int(replicas == 1)  # one copy has no dimension of its own
    mesh = init_device_mesh(world.device.type, shape[start:], mesh_dim_names=names[start:])
    for group in mesh.get_all_groups():
        dist.all_reduce(torch.zeros(1, device=world.device), group=group)
    return mesh


@contextmanager
def fake_mesh(size: int, replicas: int, device_type: str = "cpu") -> Iterator[DeviceMesh]:
    """Give the mesh of a sharded model over ranks that are not there, as its first rank sees it.

    May be entered by the main rank of a real run while the others wait. Collectives allocate as
    they would, and send nothing.
    """
    # Registers the backend. Its name says what it is for; nothing but its allocations counts here.
    import torch.testing._internal.distributed.fake_pg as _  # noqa: PLC0415, F401

    no_process_group = not dist.is_initialized()
    if no_process_group:
        dist.init_process_group("fake", rank=0, world_size=size)
    assert replicas == 1 or dist.get_rank() == 0, "only the main rank is in both groups below"
    ranks, names = torch.arange(size).view(replicas, -1), ("fake replicate", "fake shard")
    start = int(replicas == 1)  # one copy has no dimension of its own
    # Of this process's own: the other ranks hear nothing of them.
    new_group: Any = partial(dist.new_group, backend="fake", use_local_synchronization=True)
    groups = [new_group(each.tolist()) for each in (ranks[:, 0], ranks[0])[start:]]
    try:
        # Caches inside of DTensor take meshes of the same names for one and the same, and would go
        # on with this one's groups when they are gone.
        group, mesh = groups, ranks
        if replicas == 1:
            group, mesh = groups[0], ranks[0]
        yield DeviceMesh.from_group(group, device_type, mesh=mesh, mesh_dim_names=names[start:])
    finally:
        # Without a group all of them are destroyed.
        if no_process_group:
            groups = [None]
        for each in groups:
            dist.destroy_process_group(each)
