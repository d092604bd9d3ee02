"""Turn any state into a JSON tree plus named tensors, and back, without pickle.

JSON has no tensors, tuples, non-finite numbers or integer keys, and all of them occur in the
state of optimizers. Each becomes an object with one key that begins with `$`; a mapping whose own
keys look like that is written as pairs. `decode` builds only plain values and what it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from trainer.checkpoint.tensor_files import StoredTensor

Json = Any
"""What `json` reads and writes."""

_TENSOR, _TUPLE, _FLOAT, _PAIRS = "$tensor", "$tuple", "$float", "$pairs"
_MARKS = frozenset({_TENSOR, _TUPLE, _FLOAT, _PAIRS})


def encode(
    value: Any,  # noqa: ANN401 - any state
    name: str,
    tensors: dict[str, Tensor],
    known: dict[int, tuple[str, Tensor]] | None = None,
) -> Json:
    """Turn a state into JSON, moving its tensors out; one that occurs twice is stored once.

    A state is tensors, numbers, strings, None, and lists, tuples and mappings of them; `TypeError`
    says where something else occurs. Uncopied tensors go into `tensors`, named below `name`.
    """
    # Those that occurred, by identity. They are kept, since that of one gone may be another's.
    if known is None:
        known = {}
    if isinstance(value, Tensor):
        if id(value) not in known:
            if name in tensors:
                raise ValueError(f"{name}: two tensors would share this name")
            tensors[name], known[id(value)] = value.detach(), (name, value)
        return {_TENSOR: known[id(value)][0]}
    if isinstance(value, Mapping):
        pairs = list[tuple[Any, Json]]()
        for key, item in value.items():
            pairs.append((key, encode(item, f"{name}.{key}", tensors, known)))
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {_PAIRS: [[_encode_plain(key, name), item] for key, item in pairs]}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{name}.{i}", tensors, known) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    return _encode_plain(value, name)


def decode(tree: Json, read: Callable[[str], Any]) -> Any:  # noqa: ANN401 - any state
    """Undo `encode`; `read` gives what to put in for a tensor, by its name.

    `ValueError` where the tree is not one that `encode` returns.
    """
    if isinstance(tree, list):
        return [decode(item, read) for item in tree]
    if not isinstance(tree, dict):
        return tree
    mark = ""
    # An object that `encode` made has one key, and no other mapping has a key that begins with `$`.
    if len(tree) == 1:
        mark = next(iter(tree))
    if mark not in _MARKS:
        return {key: decode(item, read) for key, item in tree.items()}
    content = tree[mark]
    if mark in {_TENSOR, _FLOAT} and isinstance(content, str):
        return read(content) if mark == _TENSOR else float(content)
    if mark == _TUPLE and isinstance(content, list):
        return tuple(decode(item, read) for item in content)
    if mark == _PAIRS and isinstance(content, list):
        return {key: decode(item, read) for key, item in content}
    raise ValueError(f"{mark} has the invalid content {content!r}")


def read_whole(value: Any) -> Any:  # noqa: ANN401 - any state
    """Read every `StoredTensor` of a state that was decoded without reading any."""
    if isinstance(value, StoredTensor):
        return value[...].clone()
    if isinstance(value, Mapping):
        return {key: read_whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(read_whole, value))
    return value


def _encode_plain(value: Any, name: str) -> Json:  # noqa: ANN401 - any state
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    # NumPy's numbers are of these kinds, too.
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        if math.isfinite(number):
            return number
        # JSON has no such numbers, and a manifest refuses them.
        return {_FLOAT: repr(number)}
    raise TypeError(f"{name}: a checkpoint cannot hold {type(value).__qualname__}")
