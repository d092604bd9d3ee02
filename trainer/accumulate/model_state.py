"""Keep saved buffers, which forwards write and no gradient updates, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.core.errors import ConfigError
from trainer.core.tensors import bits_of, is_sharded
from trainer.core.world import World


@final
class ModelState:
    """Keeps the registered state that forwards move the same on all ranks.

    Running statistics, counters and codebooks move by what a rank's own forwards saw. After a step
    all go on with the main rank's, as under PyTorch's DDP. Buffers that no checkpoint saves
    (`persistent=False`) are caches, and each rank's own.

    Args:
        model: laid out, before its first forward; what is in shards is its mechanism's.
        world: all ranks.
        is_ordered: whether the bits are to be those of every number of ranks; then nothing may
            move, on one rank neither.
    """

    def __init__(self, model: nn.Module, world: World, *, is_ordered: bool = False) -> None:
        self._model = model
        self._world = world
        self._is_ordered = is_ordered
        self._parameters = dict(model.named_parameters())
        self._is_sharded = any(is_sharded(p) for p in model.parameters())
        self._parts = list(_registered(model)) if world.size > 1 or is_ordered else []
        self._is_first = True
        self._news: list[str] = []

    def watch(self) -> None:
        """Remember how things are, before the micro-batches of a step."""
        for part in self._parts:
            part.watch(by_value=self._is_first)

    def moved(self) -> Sequence[bool]:
        """Tell which of its parts this rank's forwards have moved."""
        return [part.collectives or part.has_moved() for part in self._parts]

    def unmoved(self) -> Sequence[bool]:
        """Give what `moved` gives where nothing did."""
        return [False] * len(self._parts)

    def copy_from_main(self, moved: Sequence[bool]) -> None:
        """Take what has ever moved, on any rank, from the main rank. Collective where it has."""
        self._is_first = False
        for part, flag in zip(self._parts, moved, strict=True):
            if flag and not part.collectives:
                part.collectives = True
                self._news += [part.prefix + name for name in part.shapes]
        if self._is_ordered and self._news:
            raise ConfigError(
                f"deterministic=layout: forward updates {self._news[0]} from the samples of each "
                "rank: use GroupNorm or LayerNorm instead of BatchNorm, or deterministic=true"
            )
        tensors = [tensor for part in self._parts if part.collectives for tensor in part.tensors()]
        if not tensors:
            return
        values = self._world.copy_from_main(torch.cat([bits_of(tensor) for tensor in tensors]))
        pieces = torch.split(values, [tensor.nbytes for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            # A copy begins where its type may.
            tensor.detach().copy_(piece.clone().view(tensor.dtype).view(tensor.shape))

    def news(self) -> Sequence[str]:
        """Name what was seen to move for the first time since this was last asked."""
        found, self._news = self._news, []
        return found

    def refuse_late(self) -> None:
        """Refuse parameters that a forward made, which no optimizer would train."""
        for name, parameter in self._model.named_parameters():
            known = self._parameters.get(name)
            # Those of sharded models come and go with the window.
            if known is None or (known is not parameter and not self._is_sharded):
                raise ConfigError(
                    f"model: forward creates the parameter {name}, which no optimizer trains: "
                    "create it in the constructor, or make it a buffer"
                )


@final
@dataclass(slots=True)
class _Part:
    """Tensors of a module that move together."""

    prefix: str  # name of the module, with a dot
    entries: Any  # what it has registered, by name
    shapes: dict[str, torch.Size]  # of the tensors, by name
    # Before a step: the tensors, PyTorch's counts of writes to them, and in the first step copies
    # of buffers, which show what is written through `.data`.
    seen: list[tuple[Tensor, int, Tensor | None]] = field(default_factory=list)
    collectives: bool = False  # whether they were seen to

    def tensors(self) -> list[Tensor]:
        """List them as they are now."""
        return [self.entries[name] for name in self.shapes]

    def watch(self, *, by_value: bool) -> None:
        """Remember how they are. A frozen parameter is too large for a copy."""
        self.seen = []
        for each in self.tensors():
            is_copied = by_value and not isinstance(each, nn.Parameter)
            self.seen.append((each, each._version, each.detach().clone() if is_copied else None))

    def has_moved(self) -> bool:
        """Compare them with how they were; `ConfigError` where one has another shape."""
        for name, shape in self.shapes.items():
            if getattr(self.entries.get(name), "shape", None) != shape:
                raise ConfigError(
                    f"model: {self.prefix}{name} changes its shape in forward: if it is "
                    "a cache, register it with persistent=False"
                )
        return any(
            now is not tensor
            or now._version != version
            or (before is not None and not torch.equal(bits_of(now), bits_of(before)))
            for now, (tensor, version, before) in zip(self.tensors(), self.seen, strict=True)
        )


def _registered(model: nn.Module) -> Iterator[_Part]:
    """Find each buffer and frozen parameter that a checkpoint saves; a BatchNorm's together."""
    # It writes its statistics without a trace but in a counter beside them.
    for name, part in model.named_modules():
        cached, prefix = part._non_persistent_buffers_set, f"{name}.".lstrip(".")
        for entries in (part._buffers, part._parameters):
            saved = ((n, t) for n, t in entries.items() if t is not None and n not in cached)
            shapes = {n: t.shape for n, t in saved if _is_watched(t)}
            if isinstance(part, _BatchNorm) and shapes:
                yield _Part(prefix, entries, shapes)
            else:
                yield from (_Part(prefix, entries, {n: shape}) for n, shape in shapes.items())


def _is_watched(tensor: Tensor) -> bool:
    """Whether only a forward can have written a tensor; a shard is its mechanism's."""
    if is_sharded(tensor) or tensor.is_meta or not tensor.is_leaf:
        return False
    return not tensor.requires_grad and tensor.layout == torch.strided and not tensor.is_quantized
