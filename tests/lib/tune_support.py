"""Models and measurements that the tests of tuning share."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.accumulate.rollback import Snapshot
from trainer.models.gpt import GPT
from trainer.objectives.base import Objective, Sums, logits_of
from trainer.optim.optimizers import AdamW
from trainer.plan.memory import Shape
from trainer.training.model import Model
from trainer.tune.peak_bytes import MemoryEstimate, PeakBytes
from trainer.tune.workload import Tiled, Workload

VOCABULARY = 61


class FullAt(TorchDispatchMode):
    """Fails once tensors that `peak`, entered before it, counts take more than a limit, if any."""

    def __init__(self, peak: PeakBytes, limit: int | None) -> None:
        super().__init__()
        self.peak, self.limit = peak, limit

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self.limit is not None and self.peak.estimate.peak_bytes > self.limit:
            raise torch.OutOfMemoryError(f"tensors exceed the limit of {self.limit}")
        return result


class PerToken(Objective):
    """Cross entropy of every position, or of every sample."""

    def weights(self, fields: Mapping[str, Tensor]) -> Mapping[str, float]:
        return {"loss": float(fields["labels"].numel())}

    def sums(self, model: Any, fields: Mapping[str, Tensor]) -> Sums:
        logits = logits_of(model({k: v for k, v in fields.items() if k != "labels"}))
        labels = fields["labels"].flatten()
        loss = F.cross_entropy(logits.reshape(len(labels), -1), labels, reduction="sum")
        return Sums(losses={"loss": loss})


class Encoder(nn.Module):
    """Attention with a padding mask, its scores materialised: `batch x time x time` floats."""

    def __init__(self, width: int = 8, num_blocks: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(EncoderBlock(width, dropout) for _ in range(num_blocks))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.head(x)


class EncoderBlock(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = (q @ k.mT).masked_fill(mask[:, None, :] == 0, -1e9)
        return x + self.dropout(scores.softmax(-1)) @ v


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Linear(16, 5)

    def forward(self, pixels: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(pixels)))
        return self.head(F.relu(self.body(x)).mean((2, 3)))


class Stubborn(nn.Module):
    """Looks at a value, so that it cannot run on fake tensors; leaves traces wherever it can."""

    def __init__(self, *, looks: bool = True) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.norm = nn.BatchNorm1d(VOCABULARY)
        self.scale = torch.ones(VOCABULARY)  # neither parameter nor buffer
        self.looks = looks
        self.calls = 0
        self.seen: list[int] = []
        self.masks: dict[int, Tensor] = {}

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(input_ids))
        self.masks[input_ids.shape[1]] = self.last = attention_mask.clone()
        if self.looks and input_ids.max().item() < 0:
            raise AssertionError
        logits = self.encoder(input_ids, attention_mask) * self.scale
        return self.norm(logits.mT).mT


def text(length: int = 8) -> Tiled:
    tokens = torch.arange(3 * length).reshape(3, length) % VOCABULARY
    mask = torch.ones_like(tokens)
    mask[1, length // 2 :] = 0
    return Tiled({"input_ids": tokens, "labels": tokens.clone(), "attention_mask": mask}, length)


def images(size: int = 12) -> Tiled:
    pixels = torch.linspace(-1, 1, 2 * 3 * size * size).reshape(2, 3, size, size)
    return Tiled({"pixels": pixels, "labels": torch.tensor([1, 4])}, 1)


def workload(module: nn.Module, make_fields: Tiled | None = None, **changes: Any) -> Workload:
    """What a rank computes that trains a module, by fused AdamW unless by another `spec`."""
    model = Model(**{"objective": PerToken(), "spec": AdamW(lr=1e-3), "module": module} | changes)
    return Workload(model=model, make_fields=make_fields or text())


def gpt() -> GPT:
    return GPT(vocab_size=VOCABULARY, width=24, num_layers=2, num_heads=2, max_length=128)


def measured_peak(
    work: Workload,
    shape: Shape,
    *,
    recompute: bool = False,
    limit: int | None = None,
) -> MemoryEstimate:
    """Take two optimizer steps of two micro-batches each for real, on a copy of the model."""
    model = copy.deepcopy(work.model.module)
    copied = replace(work, model=replace(work.model, module=model))
    peak = PeakBytes()
    fields = copied.fields(*shape)
    full, variant = FullAt(peak, limit), copied.variant(recompute=recompute)
    with torch.random.fork_rng(devices=[]), peak, full, variant:
        peak.assign("parameters", model.parameters())
        peak.assign("buffers", model.buffers())
        peak.assign("activations", fields.values())
        optimizer, snapshot = work.model.spec.build(model), Snapshot(model)
        for _ in range(2):
            snapshot.take()
            copied.backward(fields)
            copied.backward(fields)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return peak.estimate


def traces(model: nn.Module, *, runs: bool = False) -> dict[str, Any]:
    """Everything a rehearsal may not change: without attributes, where the model itself runs."""
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "attributes": [
            {k: list(v) if isinstance(v, list) else v for k, v in vars(m).items()}
            for m in model.modules()
            if not runs
        ],
        "random": torch.get_rng_state(),
        "kinds": {type(value) for value in [*model.parameters(), *model.buffers()]},
    }


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)
    torch.testing.assert_close(found["random"], expected["random"], rtol=0, atol=0)
    for one, other in zip(found["gradients"], expected["gradients"], strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert [[*a] for a in found["attributes"]] == [[*a] for a in expected["attributes"]]
    for one, other in zip(found["attributes"], expected["attributes"], strict=True):
        for name, value in other.items():
            assert one[name] is value or isinstance(value, list | dict), name
            if isinstance(value, list | dict):
                assert one[name] == value or isinstance(value, dict), name
    assert found["kinds"] == expected["kinds"]
