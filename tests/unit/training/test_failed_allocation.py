"""What is written when memory runs out, and that it can do no harm."""

from dataclasses import replace

import pytest
import torch

from tests.lib.support import Bench
from trainer.plan.cuts import Fixed
from trainer.training.failed_allocation import FailedAllocation


@pytest.mark.skipif(torch.cuda.is_available(), reason="the allocator then answers")
def test_an_allocator_that_does_not_answer_leaves_the_step_to_its_replay(tmp_path):
    bench = Bench(Fixed(micro=4))
    world = replace(bench.context.world, device=torch.device("cuda"))
    FailedAllocation(tmp_path, world, 2**30, None)(bench.feed.next(), MemoryError("no room"))
    (written,) = (tmp_path / "errors").glob("*.txt")
    text = written.read_text()
    assert "no room\npredicted peak: 1.00 GiB\nlimit of tensors: unknown\n" in text
    assert "1: 4 samples, padded to" in text
