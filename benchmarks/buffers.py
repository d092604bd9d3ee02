"""Count the bytes per parameter of weights, gradients and optimizer state, by dtype and buffer.

Two steps of a small GPT under AdamW, on one rank, of which every live tensor is counted; and what
`train plan` predicts for the same on one rank, and on eight ranks in shards.

    python benchmarks/buffers.py
"""

from __future__ import annotations

from dataclasses import replace

import torch

from trainer.models.bind import bind
from trainer.models.gpt import GPT
from trainer.objectives.next_token import NextToken
from trainer.optim.masters import masters_of, widen_gradients
from trainer.optim.optimizers import AdamW
from trainer.parallel.setup import ParallelSetup
from trainer.parallel.sync import Deferred
from trainer.training.model import Model
from trainer.tune.predict import resting
from trainer.tune.workload import Tiled, Workload

SCHEMES = [("float32", False), ("bfloat16", False), ("bfloat16", True)]
RANKS = 8


def build(dtype: str, *, is_wide: bool) -> GPT:
    """Make the model as a run does."""
    model = GPT(512, width=256, num_layers=4, num_heads=4, max_length=64)
    model.to(getattr(torch, dtype))
    if is_wide:
        widen_gradients(model)
    return model


def measured(model: GPT) -> list[float]:
    """Count the tensors that stay between steps, and the gradients within one."""
    optimizer, call = AdamW(lr=1e-3).build(model), bind(model)
    tokens = torch.randint(512, (2, 64))
    for _ in range(2):
        call({"input_ids": tokens}).float().logsumexp(-1).sum().backward()
        gradients = sum(p.grad.nbytes for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    states = [v for state in optimizer.state.values() for v in state.values()]
    kept = sum(v.nbytes for v in (*states, *(copy.data for _, copy in masters_of(optimizer))))
    return [sum(p.nbytes for p in model.parameters()), gradients, kept]


def predicted(model: GPT, ranks: int) -> list[float]:
    """What the plan counts at the peak of an update without samples."""
    setup = ParallelSetup(mode="fsdp", replicas=1, sync=Deferred())
    stage = Model(module=model, objective=NextToken(), setup=setup, spec=AdamW(lr=1e-3))
    work = Workload(model=stage, make_fields=Tiled({}, 1))
    if ranks > 1:
        device = torch.device("cpu")
        work = replace(work, fake_ranks=lambda: setup.fake_ranks(ranks, bind, device))
    found = resting(work)
    return [found.parameters, found.gradients, found.optimizer_state]


def main() -> None:
    """Print the table."""
    print(f"{'weights':10}{'buffer':8}{'':28}weights  gradient  optimizer")
    for dtype, is_wide in SCHEMES:
        model = build(dtype, is_wide=is_wide)
        count = sum(p.numel() for p in model.parameters())
        rows = {"measured, one rank": measured(model)}
        for ranks in (1, RANKS):
            rows[f"predicted, {ranks} rank(s)"] = predicted(build(dtype, is_wide=is_wide), ranks)
        for name, parts in rows.items():
            each = "  ".join(f"{part / count:8.2f}" for part in parts)
            print(f"{dtype:10}{'fp32' if is_wide else 'native':8}{name:24}{each}")


if __name__ == "__main__":
    main()
