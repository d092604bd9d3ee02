"""What one rank computes, as far as time and memory are concerned: a rehearsal of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor, nn

from trainer.accumulate.base import sum_of
from trainer.micro_batch import Fields, to_device
from trainer.models.recompute import with_checkpointing
from trainer.objectives.base import ModelCall, Objective
from trainer.tune.tensors import PeakBytes


class MakeFields(Protocol):
    """Makes the fields of a micro-batch of any shape."""

    def __call__(self, num_samples: int, length: int) -> Fields:
        """Give collated fields of `num_samples` samples, each padded to `length` tokens."""


class MakeOptimizer(Protocol):
    """Builds the optimizer of a run."""

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build it over the parameters the model has at this moment, real or fake."""


@final
@dataclass(frozen=True, kw_only=True)
class Workload:
    """One rank's model, loss, optimizer and data.

    Attributes:
        model: as it is before it is compiled or wrapped for several ranks.
        call: runs that same module on the fields it takes, under the run's precision.
        objective: gives the loss sums.
        make_optimizer: builds the run's optimizer.
        make_fields: gives micro-batches on the CPU; draws nothing from global generators.
    """

    model: nn.Module
    call: ModelCall
    objective: Objective
    make_optimizer: MakeOptimizer
    make_fields: MakeFields

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return next(self.model.parameters()).device

    @property
    def resident_bytes(self) -> int:
        """Bytes of the model's own tensors, which are in memory already."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        storages = (tensor.untyped_storage() for tensor in tensors)
        return sum({id(storage): storage.nbytes() for storage in storages}.values())

    def fields(self, num_samples: int, length: int) -> Fields:
        """Make a micro-batch where the model computes."""
        return to_device(self.make_fields(num_samples, length), self.device)

    def backward(self, fields: Fields) -> None:
        """Add the gradient of one micro-batch to `.grad`."""
        losses = self.objective.sums(self.call, fields).losses
        sum_of([*losses.values()]).backward()  # type: ignore[no-untyped-call] # untyped in torch

    @contextmanager
    def variant(self, *, recompute: bool) -> Iterator[None]:
        """Compute with or without activation checkpointing inside the block."""
        with with_checkpointing(self.model) if recompute else nullcontext():
            self.model.train()
            yield


def rehearse(work: Workload, fields: Fields, peak: PeakBytes) -> None:
    """Bring a model into the fullest state of training, and leave the peak of what follows.

    Once the first step has made the optimizer's state, and a micro-batch the gradients, no later
    moment needs more than one more micro-batch and the update after it. Changes the weights, so
    it is for fake tensors or copies.

    Args:
        work: what to compute.
        fields: the micro-batch, computed twice.
        peak: counts; already entered.
    """
    model = work.model
    peak.assign("parameters", model.parameters())
    peak.assign("buffers", model.buffers())
    peak.assign("activations", fields.values())
    optimizer = work.make_optimizer(model)
    for _ in range(2):
        peak.reset()
        work.backward(fields)
        peak.assign("gradients", gradients(model))
        optimizer.step()
        peak.assign("optimizer_state", state_of(optimizer))


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List the tensors an optimizer keeps between steps."""
    kept = [values for values in optimizer.state.values() if isinstance(values, Mapping)]
    return [value for values in kept for value in values.values() if isinstance(value, Tensor)]


def gradients(model: nn.Module) -> list[Tensor]:
    """List the gradients a model holds."""
    return [p.grad for p in model.parameters() if p.grad is not None]


@final
@dataclass(frozen=True)
class Tiled:
    """Makes micro-batches of any shape out of one real one, repeating its samples and tokens.

    The first dimension of a field is the samples; any further one of `length` entries is the
    sequence. Samples without tokens have length 1 and no sequence. An example that says where
    packed documents begin is one row, and so is what is made of it.

    Attributes:
        example: collated fields, at least one sample.
        length: what its samples are padded to.
    """

    example: Fields
    length: int

    def __call__(self, num_samples: int, length: int) -> Fields:
        """See `MakeFields`."""
        if "cu_seqlens" in self.example:
            return self._packed(num_samples, length)
        return {
            name: self._tiled(field, num_samples, length) for name, field in self.example.items()
        }

    def _packed(self, num_samples: int, length: int) -> Fields:
        """Lay `num_samples` documents of `length` tokens end to end in one row."""
        index = torch.arange(length).repeat(num_samples)
        row = {
            name: field.index_select(1, index % self.length)
            for name, field in self.example.items()
            if name not in {"cu_seqlens", "position_ids"}
        }
        ends = torch.arange(num_samples + 1, dtype=torch.int32) * length
        return {**row, "position_ids": index[None], "cu_seqlens": ends}

    def _tiled(self, field: Tensor, num_samples: int, length: int) -> Tensor:
        for dim, size in enumerate(field.shape):
            is_sequence = dim > 0 and size == self.length > 1
            wanted = num_samples if dim == 0 else length if is_sequence else size
            if wanted != size:
                field = field.index_select(dim, torch.arange(wanted) % size)
        return field
