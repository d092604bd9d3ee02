"""Keep saved buffers, which forwards write and no gradient updates, the same on all ranks."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from trainer.core.errors import ConfigError
from trainer.core.tensors import bits_of, is_sharded
from trainer.core.world import World


@final
class ModelState:
    """Gives all ranks the main rank's saved buffers after a step, as PyTorch's DDP does.

    Running statistics, counters and codebooks move by what a rank's own forwards saw. Buffers that
    no checkpoint saves (`persistent=False`) are caches, and each rank's own. With `is_ordered` bits
    are to be those of every number of ranks; then nothing may move, on one rank neither.
    """

    def __init__(self, model: nn.Module, world: World, *, is_ordered: bool = False) -> None:
        self._model, self._world, self._is_ordered = model, world, is_ordered
        self._parameters = dict(model.named_parameters())
        self._is_sharded = any(map(is_sharded, self._parameters.values()))
        self._buffers: list[tuple[dict[str, Any], str, str, torch.Size]] = []
        for prefix, part in model.named_modules() if world.size > 1 or is_ordered else ():
            for name, buffer in part._buffers.items():
                if name in part._non_persistent_buffers_set or buffer is None:
                    continue
                is_plain = not (is_sharded(buffer) or buffer.is_meta or buffer.is_quantized)
                if is_plain and buffer.layout == torch.strided:
                    whole_name = f"{prefix}.{name}".lstrip(".")
                    self._buffers.append((part._buffers, name, whole_name, buffer.shape))
        self._before: list[Tensor] = []
        self._versions: dict[str, int] = {}

    def watch(self) -> None:
        """Remember what no forward may move, before the micro-batches of a step."""
        # Tensors in shards refuse writes to frozen weights on their own.
        if self._world.size > 1 and not self._is_sharded:
            self._versions = {}
            for name, parameter in self._parameters.items():
                if not parameter.requires_grad:
                    self._versions[name] = parameter._version
        if self._is_ordered:
            self._before = [bits_of(entries[name]).clone() for entries, name, *_ in self._buffers]

    def check(self) -> None:
        """Refuse what forwards may not do to parameters and saved buffers."""
        for name, parameter in self._model.named_parameters():
            known = self._parameters.get(name)
            # Those of sharded models come and go with the window.
            if known is None or (known is not parameter and not self._is_sharded):
                raise ConfigError(
                    f"model: forward creates the parameter {name}, which no optimizer trains: "
                    "create it in the constructor, or make it a buffer"
                )
            if self._versions.get(name, parameter._version) != parameter._version:
                raise ConfigError(
                    f"model: forward writes into {name}, a frozen parameter, of which every rank "
                    "would keep its own values: make it a buffer"
                )
        for place, (entries, name, full_name, shape) in enumerate(self._buffers):
            if getattr(entries.get(name), "shape", None) != shape:
                raise ConfigError(
                    f"model: {full_name} changes its shape in forward: if it is a cache, register "
                    "it with persistent=False"
                )
            if self._before and not torch.equal(bits_of(entries[name]), self._before[place]):
                raise ConfigError(
                    f"deterministic=layout: forward updates {full_name} from the samples of each "
                    "rank: use GroupNorm or LayerNorm in its place, or deterministic=true"
                )

    def copy_from_main(self) -> None:
        """Take all saved buffers from the main rank. Collective where there are any."""
        tensors = [entries[name] for entries, name, *_ in self._buffers]
        if not tensors or self._world.size == 1 or self._is_ordered:
            return
        # As one vector of bytes: to send a hundred buffers one by one costs a hundred latencies.
        values = self._world.copy_from_main(torch.cat([*map(bits_of, tensors)]))
        pieces = torch.split(values, [tensor.nbytes for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            # A copy begins where its type may.
            tensor.detach().copy_(piece.clone().view(tensor.dtype).view(tensor.shape))
