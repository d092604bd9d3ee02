"""What forwards move besides gradients, kept so that a step can be replayed or skipped.

Whatever a model holds that no gradient updates: buffers, frozen weights (codebooks), tensors,
arrays, counters and random generators among its modules' attributes and in what those hold. Some
operations write without a trace (BatchNorm, `.data`), so the smallest are copied in every step.
Larger ones are copied in the step in which they are new, and from then on only if they have been
seen to move; a copy of every frozen weight would be another model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor, nn

from trainer.accumulate.held import Held, Holder, hold
from trainer.accumulate.values import (
    Values,
    is_copyable,
    is_out_of_reach,
    is_same,
    mark_of,
    version_of,
    write,
)

EVERY_BYTES = 2**20
"""What every step copies, the smallest first, whether it moves or not."""

UNSEEN_BYTES = 32 * 2**20
"""What is copied besides of what is new, before it is known which of it moves."""

UNSEEN = "moved for the first time, too large to be copied before it was known to move"
TRAINED = "requires a gradient or is sparse, so it is not copied, and forward writes into it"
CROWDED = "changed, which holds too many entries to be kept"


@final
class Snapshot:
    """Keeps a model's state that no gradient updates, as it was before a step.

    Iterators and objects that are not plain, see `hold`, are put back by reference alone. Trained
    weights are not copied but where an embedding renormalises them; another one that a forward
    writes into ends a step that has to be put back.

    Args:
        model: on its device, with the weights it begins with.
        others: objects that a forward may move besides, such as the objective.
        every_bytes: copied in every step; None is `EVERY_BYTES`.
        unseen_bytes: copied besides of what is new; None is `UNSEEN_BYTES`.
        moving: identities of tensors to be copied whatever their size.
        by_value: whether writes without a trace are looked for in what is too large to be copied,
            once, which reads all of it.
        rewinds: whether random generators among the model's attributes are put back.
    """

    def __init__(
        self,
        model: nn.Module,
        *others: object,
        every_bytes: int | None = None,
        unseen_bytes: int | None = None,
        moving: Collection[int] = (),
        by_value: bool = True,
        rewinds: bool = True,
    ) -> None:
        self._model = model
        self._others = others
        self._every_bytes = EVERY_BYTES if every_bytes is None else every_bytes
        self._unseen_bytes = UNSEEN_BYTES if unseen_bytes is None else unseen_bytes
        self._moving = _renormalised(model).union(moving)
        self._by_value = by_value
        self._rewinds = rewinds
        self._held = Held()
        self._leaves: list[_Leaf] = []

    def take(self) -> None:
        """Remember how things are, before the first micro-batch of a step."""
        if not self._held.renew():
            self._held = hold(self._model, *self._others)
            self._leaves = sorted(self._found(), key=attrgetter("size"))
        for leaf in self._leaves:
            leaf.begin()
        every, unseen, copied = self._every_bytes, self._unseen_bytes, list[_Leaf]()
        for leaf in self._leaves:
            leaf.stays = leaf.keeps and (leaf.moves or leaf.size <= every)
            if leaf.stays:
                every -= leaf.size * (not leaf.moves)
                copied.append(leaf)
            elif leaf.keeps and leaf.is_new and leaf.size <= unseen:
                unseen -= leaf.size
                copied.append(leaf)
            else:
                leaf.copy = None
                if leaf.keeps and leaf.is_new and self._by_value:
                    leaf.mark = mark_of(leaf.it)
        _copy(copied)

    def _found(self) -> Iterator[_Leaf]:
        """Match what the model holds now with what is known of the places that hold it.

        Yields:
            Each tensor and array once.
        """
        known = {(id(leaf.holder.it), leaf.key): leaf for leaf in self._leaves}
        for holder, key, it in self._held.values:
            leaf = known.get((id(holder.it), key))
            if leaf is not None and leaf.it is it:
                leaf.holder = holder
                yield leaf
            elif not is_out_of_reach(it):
                is_known = id(it) in self._moving
                moves = is_known or (leaf is not None and leaf.moves)
                size = it.nbytes if is_copyable(it) or is_known else -1
                yield _Leaf(holder, key, it, size, moves, leaf is None, version_of(it))

    def restore(self) -> str | None:
        """Put everything back, what a forward replaced by others too, and remove what is new.

        Returns:
            What moved and could not be put back, and why; None when all is back.
        """
        large = self._held.put_back(rewinds=self._rewinds)
        for leaf in [leaf for leaf in self._leaves if not leaf.restore()]:
            name = leaf.holder.name(leaf.key)
            return f"{name} {UNSEEN if leaf.keeps else TRAINED}"
        return large and f"{large} {CROWDED}"

    def settle(self) -> None:
        """Learn from a step that is over what moves, and let go of what the next will not copy."""
        for leaf in self._leaves:
            leaf.settle(by_value=self._by_value)


@final
@dataclass(slots=True)
class _Leaf:
    """A tensor or array, and what is known of the place where the model holds it.

    Attributes:
        holder: container that holds it.
        key: under which.
        it: the tensor or array.
        size: in bytes; -1 where its numbers are not to be copied: a trained weight is the
            optimizer's.
        moves: whether what is there has been seen to be written, so that each step copies it.
        is_new: whether the place is new since the last step, or was written since.
        version: PyTorch's count of writes, before the step.
        stays: whether each step copies it.
        copy: of its numbers, if they are kept.
        mark: of its numbers when it was new, which sees the writes that `version` does not.
    """

    holder: Holder
    key: Any
    it: Values
    size: int
    moves: bool
    is_new: bool
    version: int
    stays: bool = False
    copy: Values | None = None
    mark: int | None = None

    @property
    def keeps(self) -> bool:
        return self.size >= 0

    def begin(self) -> None:
        """Count the writes before the step; what was written between steps is like new."""
        version = version_of(self.it)
        if version != self.version:
            self.version, self.mark, self.is_new = version, None, True

    def has_moved(self) -> bool:
        """Tell whether it was written; exactly where there is a copy."""
        if self.version != version_of(self.it):
            return True
        if self.copy is not None:
            return not is_same(self.it, self.copy)
        return self.mark is not None and self.mark != mark_of(self.it)

    def settle(self, *, by_value: bool) -> None:
        """Learn from a step whether it moves; one that does not leaves a mark."""
        if self.keeps and not self.moves:
            if self.version != version_of(self.it) or (self.is_new and self.has_moved()):
                self.moves = True
            elif self.is_new and by_value and self.mark is None:
                self.mark = mark_of(self.it)
        self.is_new = False
        if not self.stays:
            self.copy = None

    def restore(self) -> bool:
        """Put its numbers back; False when they have moved and there is no copy."""
        if self.copy is None:
            if self.has_moved():
                self.moves = True
                return False
            return True
        if not is_same(self.it, self.copy):
            self.moves = True
            write(self.it, self.copy)
        self.version = version_of(self.it)
        return True


def _renormalised(model: nn.Module) -> frozenset[int]:
    """Find the trained weights that a forward scales in place, by identity."""
    found = (part for part in model.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag))
    return frozenset(id(part.weight) for part in found if part.max_norm is not None)


def _copy(leaves: Sequence[_Leaf]) -> None:
    """Copy numbers, where they were copied before into the same room: on a GPU in a few kernels."""
    pairs: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for leaf in leaves:
        it, copy = leaf.it, leaf.copy
        if not isinstance(it, Tensor):
            leaf.copy = it.copy()
        elif isinstance(copy, Tensor) and copy.shape == it.shape and copy.dtype == it.dtype:
            into, of = pairs.setdefault((it.dtype, it.device), ([], []))
            into.append(copy)
            of.append(it)
        else:
            leaf.copy = it.detach().clone()
    with torch.no_grad():
        for into, of in pairs.values():
            torch._foreach_copy_(into, of)
