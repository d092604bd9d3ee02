"""Know what a GPU is: the type of its device, and what PyTorch says of it.

Nothing else names CUDA, so that a test can let another device stand for it by `DEVICE_TYPE`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

DEVICE_TYPE = "cuda"


def backend() -> Any:  # noqa: ANN401 - a module
    """Give PyTorch's module for GPUs, `torch.cuda`."""
    return torch.get_device_module(DEVICE_TYPE)


def is_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU, and neither a CPU nor the meta device."""
    return device.type == DEVICE_TYPE


def kind_of(device: torch.device) -> Literal["cpu", "gpu"]:
    """Give the key of tables that hold a number for CPUs and one for GPUs."""
    return "gpu" if is_gpu(device) else "cpu"


def devices() -> list[torch.device]:
    """List the GPUs that this process sees."""
    return [torch.device(DEVICE_TYPE, index) for index in range(backend().device_count())]


def name_of(device: torch.device) -> str | None:
    """Give the name that the driver reports; None for a CPU."""
    return str(backend().get_device_name(device)) if is_gpu(device) else None


def has_capability(device: torch.device, *least: int) -> bool:
    """Whether a GPU has at least a compute capability, as `8, 0`; one that is not here has it."""
    found = backend()
    return not found.is_available() or found.get_device_capability(device) >= least


def free_bytes(device: torch.device) -> int:
    """Give the bytes of a GPU that this process can still have."""
    found = backend()
    free, _ = found.mem_get_info(device)
    # What the allocator holds without using is free to this process alone.
    return int(free + found.memory_reserved(device) - found.memory_allocated(device))


def mark() -> Any:  # noqa: ANN401 - an event
    """Mark the present moment on the current stream, by an event that has a time."""
    event = backend().Event(enable_timing=True)
    event.record()
    return event


def wait() -> None:
    """Wait until this process's GPU has done what was asked of it; without one, do nothing."""
    found = backend()
    if found.is_initialized():
        found.synchronize()


def generator_states() -> list[Tensor]:
    """Read the random generators of all GPUs; none where this process has touched none."""
    # Asking for states would start the driver.
    found = backend()
    return list(found.get_rng_state_all()) if found.is_initialized() else []


def has_fast_bf16(device: torch.device) -> bool:
    """Whether matrix products in bf16 have instructions of their own, as the hardware says.

    A GPU that is not here is taken for one that has them, as all have since 2020.
    """
    if is_gpu(device):
        return has_capability(device, 8, 0)
    flags = torch.cpu.get_capabilities()
    return bool(flags.get("amx_bf16") or flags.get("avx512_bf16"))


def set_matmul_precision(precision: str, device: torch.device) -> None:
    """Let a GPU compute products of fp32 tensors in TF32, in convolutions too, unless in fp32.

    Under autocast those are what a model or an objective takes out of it; TF32 has three bits more
    than bf16. On a CPU nothing is changed.
    """
    if is_gpu(device):
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        torch.backends.cudnn.allow_tf32 = precision != "fp32"
