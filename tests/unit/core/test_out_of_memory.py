"""A failed allocation is recognised among all errors, whoever failed and whatever wrapped it."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.core.errors import DoesNotFitError
from trainer.core.out_of_memory import AllocationGuard, is_out_of_memory, no_replay, release_memory

CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "

FAILED: tuple[Exception | str, ...] = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError("Unable to allocate 1.00 EiB for an array"),
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation`"),
    f"{CPU}you tried to allocate 64 bytes. Error code 12 (Cannot allocate memory)",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes.",
    "HIP error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "MIOpen error: miopenStatusAllocFailed",
    "std::bad_alloc",
    "could not create a primitive",
    "could not create a memory object",
    "Storage size calculation overflowed with sizes=[1000000000000000000, 6]",
    "numel: integer multiplication overflow",
)
OTHERS: tuple[BaseException | str, ...] = (
    "the model keeps its memory in a buffer, which ran out of memory slots",
    "expected memory_format to be channels_last",
    "pin_memory: CUDA out of memory is not what this is about",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    "could not create a primitive descriptor for a matmul primitive",
    "out of resource: shared memory, Required: 262144, Hardware limit: 101376",
    "NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'",
    ValueError("CUDA out of memory"),
    OSError(12, "Cannot allocate memory"),
    KeyboardInterrupt(),
    DoesNotFitError("sample 3 of 9 tokens does not fit into memory"),
)


@pytest.mark.parametrize(("errors", "is_one"), [(FAILED, True), (OTHERS, False)])
def test_a_failed_allocation_is_recognised_alone_and_wrapped_and_nothing_else_is(errors, is_one):
    for each in errors:
        error = RuntimeError(each) if isinstance(each, str) else each
        wrapped, twice = ValueError("the model failed"), KeyError("layer")
        wrapped.__cause__, twice.__cause__ = error, wrapped
        assert is_out_of_memory(error) is is_out_of_memory(twice) is is_one, error


def test_an_error_with_a_line_of_its_own_keeps_it():
    named = DoesNotFitError("named already")
    named.__cause__ = MemoryError()
    assert not is_out_of_memory(named)
    assert not is_out_of_memory(None)


class _Greedy(torch.autograd.Function):
    @staticmethod
    def forward(context: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:
        return gradient + torch.empty(2**60, dtype=torch.uint8).sum()


def _absurd_backward() -> None:
    _Greedy.apply(torch.ones(2, requires_grad=True)).sum().backward()


def test_a_real_allocation_that_fails_is_recognised():
    for allocate in (
        lambda: torch.empty(2**60, dtype=torch.uint8),
        lambda: np.empty(2**60, dtype=np.uint8),
        lambda: bytearray(2**60),
        _absurd_backward,
    ):
        with AllocationGuard() as guard:
            allocate()
        assert guard.failed
        with (
            pytest.raises(DoesNotFitError, match="out of memory in a test"),
            no_replay("in a test"),
        ):
            allocate()


def test_no_tensor_of_a_failed_attempt_stays_even_in_a_cycle():
    def attempt() -> None:
        graph = torch.nn.Linear(8, 8)
        graph.own = graph
        seen.append(weakref.ref(graph))
        raise torch.OutOfMemoryError("injected")

    seen: list[weakref.ref[torch.nn.Module]] = []
    gc.disable()
    try:
        with AllocationGuard():
            attempt()
        release_memory()
        assert seen[0]() is None
    finally:
        gc.enable()
