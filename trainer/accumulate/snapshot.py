"""What forwards move besides gradients, kept so that a step can be replayed or skipped.

Buffers, frozen parameters (codebooks), and tensors among a module's attributes. Small ones are
copied in every step, since some operations write without a trace: BatchNorm, `.data`. Larger ones
are copied only once they have been seen to move; a copy of every frozen weight would be another
model.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

SMALL_BYTES = 64 * 2**10
"""What is no larger is copied in every step."""

UNSEEN_BYTES = 32 * 2**20
"""What the first step copies of larger tensors, in all, before it is known which of them move."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@final
class Snapshot:
    """Keeps a model's state that no gradient updates, as it was before a step.

    Plain numbers and objects of a module are its own: they are not put back.

    Args:
        model: on its device, with the weights it begins with.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: list[_Place] | None = None

    def take(self) -> None:
        """Remember how things are, before the first micro-batch of a step."""
        if self._places is not None:
            for place in self._places:
                place.take()
            return
        self._places = sorted(_places(self._model), key=lambda place: place.found.nbytes)
        room = UNSEEN_BYTES
        for place in self._places:
            room -= place.found.nbytes
            place.take(copies=room >= 0)
            place.mark = None if place.is_small else _mark(place.found)

    def restore(self) -> str | None:
        """Put everything back, those tensors too that a forward replaced by others.

        Returns:
            The name of what moved for the first time and was not copied, None when all is back.
        """
        lost = [place.name for place in self._places or () if not place.restore()]
        return next(iter(lost), None)

    def settle(self) -> None:
        """Learn from a step that is over what moves, and let the copies go."""
        for place in self._places or ():
            place.settle()


@final
@dataclass(slots=True)
class _Place:
    """Where a module holds a tensor.

    Attributes:
        name: for messages.
        owner: mapping or list that holds it.
        key: under which.
        found: what it held before the step.
        copy: of its values, if they are kept.
        version: PyTorch's count of writes, before the step.
        mark: a sum of its bits before the first step, which sees what `.data` hides from `version`.
        moves: whether it has been seen to.
    """

    name: str
    owner: Any
    key: Hashable
    found: Tensor
    copy: Tensor | None = None
    version: int = 0
    mark: int | None = None
    moves: bool = False

    @property
    def is_small(self) -> bool:
        return self.found.nbytes <= SMALL_BYTES

    def take(self, *, copies: bool = False) -> None:
        found = _held(self.owner, self.key)
        if found is not None:
            self.found = found
        self.version = _version(self.found)
        keeps = copies or self.moves or self.is_small
        self.copy = self.found.detach().clone() if keeps else None

    def has_moved(self) -> bool:
        if self.version != _version(self.found):
            return True
        return self.mark is not None and self.mark != _mark(self.found)

    def restore(self) -> bool:
        """Put the tensor and its values back; False when there is no copy of what moved."""
        if self.is_small or self.moves or self.has_moved():
            if self.copy is None:
                self.moves = True
                return False
            with torch.no_grad():
                self.found.copy_(self.copy)
            self.version = _version(self.found)
        if _held(self.owner, self.key) is not self.found:
            self.owner[self.key] = self.found
        return True

    def settle(self) -> None:
        self.moves = self.moves or (not self.is_small and self.has_moved())
        self.copy = self.mark = None


def _places(model: nn.Module) -> Iterator[_Place]:
    """Find where modules hold tensors that no gradient updates, in lists and mappings too.

    Yields:
        Each tensor once.
    """
    seen: set[int] = set()
    for prefix, part in model.named_modules():
        for owner in _owners(part):
            entries = owner.items() if isinstance(owner, dict) else enumerate(owner)
            for key, value in entries:
                if _is_watched(value) and id(value) not in seen:
                    seen.add(id(value))
                    yield _Place(f"{prefix}.{key}".lstrip("."), owner, key, value)


def _owners(part: nn.Module) -> Iterator[Any]:
    attributes = vars(part)
    yield attributes
    for value in attributes.values():
        if isinstance(value, dict | list):
            yield value


def _is_watched(value: Any) -> bool:  # noqa: ANN401 - any attribute
    """Whether a value is a tensor that only a forward can have written.

    A shard is its mechanism's, which forgets what a forward writes into the gathered whole.
    """
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.requires_grad:
        return False
    return value.layout == torch.strided and not value.is_meta


def _held(owner: Any, key: Hashable) -> Tensor | None:  # noqa: ANN401 - mapping or list
    try:
        value = owner[key]
    except LookupError:
        return None
    return value if _is_watched(value) else None


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _mark(tensor: Tensor) -> int:
    """Sum the bits of a tensor that is not small, as integers: no float, so NaN is like others.

    One without bits, in a rehearsal of memory, has nothing to hide.
    """
    if isinstance(tensor, FakeTensor):
        return 0
    flat = tensor.detach().reshape(-1)
    return hash(flat.view(_WORDS.get(tensor.element_size(), torch.int64)).sum().tolist())
