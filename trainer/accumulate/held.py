"""What a model holds, found by walking it: its modules, their attributes, and what those hold.

Goes through modules, dictionaries, lists, tuples, deques, sets and plain objects, wherever they
are, each once. Objects of PyTorch's and the standard library's own are tools and not state: locks,
files, loggers, threads, functions, and what lays a model out over ranks.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import is_
from typing import Any, final

import numpy as np
from torch import Generator, Tensor, nn
from torch.distributed.tensor import DTensor

MOST_ENTRIES = 20_000
"""Entries of containers and objects that are looked at, in all; modules come free."""

REGISTERED = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
"""Attributes of PyTorch's own in which a module holds what it has registered."""

PASSED = frozenset(vars(nn.Module())) - REGISTERED
"""Those that are not a forward's to move: hooks and flags."""

_TOOLS = (sys.stdlib_module_names | {"torch", "numpy", "wandb"}) - {
    "abc",
    "argparse",
    "builtins",
    "collections",
    "enum",
    "types",
    "typing",
}
"""Packages whose objects, and those derived from them, are not looked into."""


class Kind(Enum):
    """What becomes of a value."""

    SIMPLE = "a reference is all there is to keep"
    VALUES = "a tensor or an array: its numbers are kept besides"
    DRAWS = "a random generator: its state is kept besides"
    CONTAINER = "has entries: tuples and frozen sets, which keep theirs, are looked through"
    OBJECT = "has attributes"
    MODULE = "has attributes, some of them PyTorch's own"


def _kind(kind: type) -> Kind:
    known: tuple[tuple[Any, Kind], ...] = (
        (np.memmap, Kind.SIMPLE),
        (Tensor | np.ndarray, Kind.VALUES),
        (Generator | np.random.Generator | np.random.RandomState | random.Random, Kind.DRAWS),
        (nn.Module, Kind.MODULE),
        (dict | list | deque | tuple | set | frozenset, Kind.CONTAINER),
    )
    for base, found in known:
        if issubclass(kind, base):
            return found
    packages = {base.__module__.partition(".")[0] for base in kind.__mro__}
    is_plain = kind.__dictoffset__ != 0 and not issubclass(kind, type) and not packages & _TOOLS
    # Types of the interpreter's own have attributes, too: functions and modules.
    return Kind.OBJECT if is_plain and kind.__module__ != "builtins" else Kind.SIMPLE


@final
class _Kinds(dict[type, Kind]):
    """Types that have been met."""

    def __missing__(self, kind: type) -> Kind:
        found = self[kind] = _kind(kind)
        return found


_KINDS = _Kinds()


@final
@dataclass(slots=True)
class Holder:
    """A container, and what it held.

    Attributes:
        it: the container, or the attributes of an object.
        kept: its entries, by key or in order.
        parent: what holds it; None for the model itself.
        key: under which the parent does.
        passed: keys that are left alone.
    """

    it: Any
    kept: Any
    parent: Holder | None
    key: Any
    passed: frozenset[str] = frozenset()

    def name(self, key: object) -> str:
        """Spell the way to an entry, as attributes of modules are."""
        path, holder = [str(key)], self
        while holder.parent is not None:
            path.append(str(holder.key))
            holder = holder.parent
        return ".".join(part for part in reversed(path) if part not in REGISTERED)

    def entries(self) -> Iterable[tuple[Any, Any]]:
        """Give what it held, each with its key."""
        return self.kept.items() if isinstance(self.kept, dict) else enumerate(self.kept)

    def is_same(self) -> bool:
        """Tell whether it holds the very same, in the same order."""
        it, kept = self.it, self.kept
        if len(it) != len(kept):
            return False
        if not kept or type(it) is tuple:
            return True
        if isinstance(it, set):
            return bool(it == kept)
        same = all(map(is_, it, kept))
        return same and (type(kept) is not dict or all(map(is_, it.values(), kept.values())))

    def renew(self) -> bool:
        """Keep what it holds now; False where that is more than simple values exchanged."""
        now = _copied(self.it)
        if type(now) is not dict or now.keys() != self.kept.keys():
            return False
        for key, value in now.items():
            old = self.kept[key]
            if value is not old and not (_is_simple(value) and _is_simple(old)):
                return False
        self.kept = now
        return True

    def put_back(self) -> None:
        """Put the entries back, and remove those that were born since."""
        if isinstance(self.it, dict):
            self._put_back_mapping()
        elif isinstance(self.it, set):
            self.it.clear()
            self.it.update(self.kept)
        elif isinstance(self.it, list | deque):
            self._put_back_sequence()

    def _put_back_mapping(self) -> None:
        for key in [key for key in self.it if key not in self.kept]:
            if key not in self.passed and not _is_laid_out(self.it[key]):
                del self.it[key]
        for key, value in self.kept.items():
            is_there = key in self.it and self.it[key] is value
            if not is_there and key not in self.passed and not _is_laid_out(value):
                self.it[key] = value
        if [*self.it] != [*self.kept]:
            for key in [key for key in self.kept if key in self.it]:
                self.it[key] = self.it.pop(key)

    def _put_back_sequence(self) -> None:
        now, entries = [*self.it], self.kept
        if len(now) == len(entries):
            pairs = zip(now, entries, strict=True)
            entries = [new if _is_laid_out(old) else old for new, old in pairs]
        if len(now) != len(entries) or any(a is not b for a, b in zip(now, entries, strict=True)):
            self.it.clear()
            self.it.extend(entries)


def _is_simple(value: object) -> bool:
    return _KINDS[type(value)] is Kind.SIMPLE


def _is_laid_out(value: object) -> bool:
    """Whether a value is the trainer's to exchange: a trained weight, a shard, or a way to one."""
    if isinstance(value, DTensor | weakref.ref):
        return True
    return isinstance(value, nn.Parameter) and value.requires_grad


@final
@dataclass(slots=True)
class Held:
    """What a walk found.

    Attributes:
        holders: every container that was looked into.
        values: tensors and arrays: who holds each first, under which key, and itself.
        generators: of random numbers.
        large: containers with too many entries to be looked at: who holds each, and under which
            key.
        draws: puts the generators back.
        outlines: of the large containers.
    """

    holders: list[Holder] = field(default_factory=list)
    values: list[tuple[Holder, Any, Any]] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)
    large: list[tuple[Holder, Any, Any]] = field(default_factory=list)
    draws: list[Callable[[], object]] = field(default_factory=list)
    outlines: list[tuple[int, Any, Any]] = field(default_factory=list)

    def renew(self) -> bool:
        """Remember how things are now; False where what was found is no longer what is there."""
        for holder in self.holders:
            if not holder.is_same() and not holder.renew():
                return False
        self.draws = [_undo_of(generator) for generator in self.generators]
        self.outlines = [_outline(it) for _, _, it in self.large]
        return bool(self.holders)

    def put_back(self, *, rewinds: bool = True) -> str | None:
        """Put back all but the numbers in tensors and arrays.

        Args:
            rewinds: generators too.

        Returns:
            The name of a container that has moved and could not be put back; None without one.
        """
        pairs = zip(self.large, self.outlines, strict=True)
        moved = [holder.name(key) for (holder, key, it), seen in pairs if not _is_like(it, seen)]
        for holder in self.holders:
            if not holder.is_same():
                holder.put_back()
        for undo in self.draws if rewinds else ():
            undo()
        return next(iter(moved), None)


def hold(model: nn.Module, *others: object) -> Held:
    """Walk a model, nearest first, and keep what is found by reference (some 10 us per module).

    Args:
        model: and what its modules hold.
        others: objects that a forward may move besides.
    """
    found, room = Held(), MOST_ENTRIES
    roots = [(it, _KINDS[type(it)]) for it in (model, *others)]
    roots = [(it, kind) for it, kind in roots if kind in {Kind.MODULE, Kind.OBJECT}]
    seen = {id(it) for it, _ in roots}
    waiting: deque[tuple[Any, Kind, Holder | None, Any]] = deque(
        (it, kind, None, "") for it, kind in roots
    )
    while waiting:
        value, kind, parent, key = waiting.popleft()
        it = vars(value) if kind in {Kind.MODULE, Kind.OBJECT} else value
        is_free = parent is None or kind is Kind.MODULE or (parent.passed and key in REGISTERED)
        size = 0 if is_free else len(it)
        if size > room and parent is not None:
            found.large.append((parent, key, it))
            continue
        room -= size
        passed = PASSED if kind is Kind.MODULE else frozenset[str]()
        holder = Holder(it, _copied(it), parent, key, passed)
        found.holders.append(holder)
        for entry, child in holder.entries():
            of = _KINDS[type(child)]
            if of is Kind.SIMPLE or entry in passed or id(child) in seen:
                continue
            seen.add(id(child))
            if of is Kind.VALUES:
                found.values.append((holder, entry, child))
            elif of is Kind.DRAWS:
                found.generators.append(child)
            else:
                waiting.append((child, of, holder, entry))
    found.renew()
    return found


def _copied(it: Any) -> Any:  # noqa: ANN401 - any container
    if isinstance(it, dict):
        return dict(it)
    return set(it) if isinstance(it, set) else it if isinstance(it, tuple | frozenset) else [*it]


def _outline(it: Any) -> tuple[int, Any, Any]:  # noqa: ANN401 - any container
    """Give what shows most changes of a container at once: its size and its ends."""
    if isinstance(it, set | frozenset) or not it:
        return len(it), None, None
    values = it.values() if isinstance(it, dict) else it
    return len(it), next(iter(values)), next(reversed(values))


def _is_like(it: Any, outline: tuple[int, Any, Any]) -> bool:  # noqa: ANN401 - any container
    size, first, last = _outline(it)
    return size == outline[0] and first is outline[1] and last is outline[2]


def _undo_of(generator: Any) -> Callable[[], object]:  # noqa: ANN401 - of any kind
    """Remember the state of a random generator."""
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())
