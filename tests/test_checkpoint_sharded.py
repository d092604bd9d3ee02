"""State sharded over ranks (FSDP2) is stored whole, and restored on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trainer.checkpoint.state import capture, restore
from trainer.checkpoint.store import CheckpointStore


class Net(nn.Module):
    """Seven rows over two ranks: one shard is shorter; one weight has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 7, bias=False)
        self.third = nn.Linear(7, 7, bias=False)
        self.third.weight = self.second.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.third(self.second(self.first(x)))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Give every rank the same data, so that the mean over ranks is each one's gradient."""
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()


def work(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet-{size}", rank=rank, world_size=size
    )
    store = CheckpointStore(folder / "checkpoints")
    model, optimizer = build()
    loaded = store.load(1)
    restore(loaded, model, optimizer)
    again, _ = capture(model, optimizer, extra={})
    for name, tensor in again.items():
        assert torch.equal(tensor, loaded.tensors[name]), name
    train(model, optimizer, 1)
    tensors, meta = capture(model, optimizer, extra={"rank": rank})
    if rank == 0:
        store.save(2, tensors, meta)
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_checkpoint_of_one_rank_goes_on_on_two_and_comes_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    model, optimizer = build()
    train(model, optimizer, 2)
    store.save(1, *capture(model, optimizer, extra={}))
    mp.spawn(work, args=(2, tmp_path), nprocs=2)
    train(model, optimizer, 1)
    alone, meta = capture(model, optimizer, extra={"rank": 0})
    loaded = store.load(2)
    assert loaded.aliases == {"model.third.weight": "model.second.weight"}
    assert loaded.meta["optimizer"] == meta["optimizer"]
    assert loaded.tensors.keys() == alone.keys()
    for name, tensor in alone.items():
        if not name.startswith("rng"):
            assert torch.allclose(loaded.tensors[name], tensor, rtol=1e-6), name
    model, optimizer = build()
    restore(loaded, model, optimizer)
    assert torch.equal(model.first.weight, loaded.tensors["model.first.weight"])
