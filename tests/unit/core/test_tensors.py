"""Copies in main memory."""

import torch

from trainer.core import gpu, tensors
from trainer.core.tensors import in_main_memory


def test_tensors_come_in_order_and_those_of_main_memory_wait_for_no_gpu(monkeypatch):
    waits = list[None]()
    monkeypatch.setattr(gpu, "wait", lambda: waits.append(None))
    monkeypatch.setattr(tensors, "COPIED_AT_ONCE", 24)
    given = [torch.full((n,), float(n)) for n in (3, 4, 0, 1)]
    assert [each.tolist() for each in in_main_memory(given)] == [each.tolist() for each in given]
    assert not waits
    monkeypatch.setattr(gpu, "DEVICE_TYPE", "cpu")
    assert len([*in_main_memory(given)]) == 4
    assert len(waits) == 2, "once for 28 bytes, and once for the rest"
