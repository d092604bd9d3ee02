"""A GPU made of Python: tensors on the device `emulated:0`, whose values lie in main memory.

To mix its tensors with others raises, as on CUDA, and each wait of the host for the device is
counted with its place. PyTorch takes one such device for each process and does not give it back:
import this in a process of its own, ahead of anything else of the trainer.

What it cannot show: kernels, the casts of autocast, memory, streams, NCCL, fake tensors.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from trainer.core import gpu

NAME = "emulated"
TRAINER = str(Path(gpu.__file__).parents[1])
WAITS: Counter[str] = Counter()
"""How often the host waited for the device, by what made it wait and the lines of the trainer."""


def count_wait(what: str) -> None:
    """Enter a wait, with the innermost lines of the trainer that asked for it."""
    frame, lines = sys._getframe(1), []
    while frame is not None and len(lines) < 3:
        if frame.f_code.co_filename.startswith(TRAINER):
            lines.append(f"{frame.f_code.co_filename[len(TRAINER) + 1 :]}:{frame.f_lineno}")
        frame = frame.f_back
    WAITS[f"{what} at {' < '.join(lines)}"] += 1


class Event:
    """A moment; all that was asked of the device is done at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.time = 0.0

    def record(self, stream: object = None) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Wait for copies that were made behind kernels: no wait for all of the device."""

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.time - self.time)


def backend() -> ModuleType:
    """Make what `torch.cuda` is to a GPU."""
    module = ModuleType(f"torch.{NAME}")
    total = 80 * 2**30
    card = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=total)
    answers = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "_is_in_bad_fork": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": card.name,
        "get_device_capability": (9, 0),
        "get_device_properties": card,
        "mem_get_info": (70 * 2**30, total),
        "memory_reserved": 0,
        "memory_allocated": 0,
        "max_memory_allocated": 123_456,
        "max_memory_reserved": 123_456,
        "get_amp_supported_dtype": [torch.bfloat16, torch.float16, torch.float32],
        "memory_summary": "none",
    }
    for name, answer in answers.items():
        setattr(module, name, lambda *_, answer=answer, **__: answer)
    for name in (
        *("init", "_lazy_init", "set_device", "empty_cache", "reset_peak_memory_stats"),
        *("manual_seed", "manual_seed_all", "set_rng_state", "set_rng_state_all"),
    ):
        setattr(module, name, lambda *_, **__: None)
    for name in ("stream", "device"):
        setattr(module, name, lambda *_, **__: nullcontext())
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.get_rng_state_all = lambda: [torch.get_rng_state()]
    module.synchronize = lambda *_: count_wait("synchronize")
    module.Event = Event
    module.amp = SimpleNamespace()
    module.memory = SimpleNamespace(_record_memory_history=lambda **_: None)
    return module


_setup_privateuseone_for_python_backend(rename=NAME, backend_module=backend())
torch.__future__.set_swap_module_params_on_conversion(True)  # else tied weights part on the way
torch.Tensor.pin_memory = lambda self, *_: self
torch.Tensor.is_pinned = lambda self, *_: False

aten = torch.ops.aten
MAKES_THE_HOST_WAIT = {
    aten._local_scalar_dense.default,
    aten._unique2.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten.unique_dim.default,
}
INDEXES = {
    aten._index_put_impl_.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
}


def values_of(value: object) -> object:
    """Give the values of a tensor of the device; anything else is itself."""
    return value.values if isinstance(value, DeviceTensor) else value


class DeviceTensor(torch.Tensor):
    """A tensor of the device, around one in main memory."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, requires_grad: bool = False) -> DeviceTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )

    def __init__(self, values: torch.Tensor, requires_grad: bool = False) -> None:
        self.values = values

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:
        return f"DeviceTensor({self.values!r})"

    def tolist(self) -> list:
        count_wait("tolist")
        return self.values.tolist()

    def numpy(self, **_) -> None:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy; use Tensor.cpu()")

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        refuse_mixed(operator, args, kwargs)
        target = kwargs.get("device")
        kind = None if target is None else torch.device(target).type
        waits = operator in MAKES_THE_HOST_WAIT or (
            operator in INDEXES and by_mask(args[1]) and operator is aten.index.Tensor
        )
        if operator is aten._to_copy.default and kind in {"cpu", NAME}:
            is_across = isinstance(args[0], cls) != (kind == NAME)
            waits = is_across and not kwargs.get("non_blocking")
        if operator is aten.copy_.default:
            is_across = isinstance(args[0], cls) != isinstance(args[1], cls)
            waits = is_across and not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking")
        if waits:
            count_wait(str(operator))
        if kind == "meta":
            return operator(*tree_map(on_meta, args), **kwargs)
        plain = dict(kwargs)
        if kind == NAME:
            plain["device"] = "cpu"
        plain.pop("pin_memory", None)
        found = operator(*tree_map(values_of, args), **tree_map(values_of, plain))
        if kind == "cpu" or (operator is aten.copy_.default and not isinstance(args[0], cls)):
            return found
        wrapped = tree_map(on_device, found)
        return return_and_correct_aliasing(operator, args, kwargs, wrapped)


def on_device(value: object) -> object:
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor)
    return DeviceTensor(value) if is_plain else value


def on_meta(value: object) -> object:
    if not isinstance(value, DeviceTensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def by_mask(indices: object) -> bool:
    """Whether an index is a mask, whose marks the host has to count."""
    return any(t.dtype in {torch.bool, torch.uint8} for t in tree_leaves(indices) if t is not None)


def refuse_mixed(operator: object, args: object, kwargs: object) -> None:
    """Refuse a tensor of main memory beside one of the device, but for numbers and copies."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    here = [t for t in tensors if not isinstance(t, DeviceTensor)]
    if len(here) == len(tensors) or operator in {aten.copy_.default, aten._to_copy.default}:
        return
    if operator in INDEXES and isinstance(args[0], DeviceTensor):
        if any(isinstance(t, torch.Tensor) for t in here):
            count_wait(f"{operator} with an index in main memory")
        return
    takes_numbers = operator not in {aten.cat.default, aten.stack.default}
    if any((t.dim() or not takes_numbers) and t.device.type != "meta" for t in here):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{NAME}:0 and cpu! ({operator})"
        )


def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return DeviceTensor(torch.empty(size, dtype=dtype or torch.get_default_dtype()))


def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    values = torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype())
    return DeviceTensor(values)


def copy_from(source, target, non_blocking=False):
    if not non_blocking:
        count_wait("copy")
    values_of(target).copy_(values_of(source))
    return target


def copy_from_and_resize(source, target):
    values_of(target).resize_(values_of(source).shape).copy_(values_of(source))
    return target


def arange(*bounds, dtype=None, layout=None, device=None, pin_memory=None):
    return DeviceTensor(torch.arange(*bounds, dtype=dtype))


LIBRARY = torch.library.Library("aten", "IMPL")
LIBRARY.impl("empty.memory_format", empty, "PrivateUse1")
LIBRARY.impl("empty_strided", empty_strided, "PrivateUse1")
for overload in ("arange", "arange.start", "arange.start_step"):
    LIBRARY.impl(overload, arange, "PrivateUse1")  # PyTorch's own resizes an empty tensor
LIBRARY.impl("_copy_from", copy_from, "PrivateUse1")
LIBRARY.impl("_copy_from_and_resize", copy_from_and_resize, "PrivateUse1")
AUTOCAST = torch.library.Library("_", "IMPL")
AUTOCAST.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")

gpu.DEVICE_TYPE = NAME
