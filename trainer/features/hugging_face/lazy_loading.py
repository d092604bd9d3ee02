"""Load a model of transformers without its weights, which stay in their files until asked for.

transformers itself decides which weight of a file becomes which of the model: it is given stand-ins
without memory for what the files hold, and where they end up says which file each parameter is read
from. What it computes from several, as of experts in files of their own, has no such place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from types import EllipsisType
from typing import Any, TypeAlias, final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from trainer.checkpoint.tensor_files import StoredTensor
from trainer.core.tensors import InMemoryTensor, LazyTensor
from trainer.models.first_weights import FIRST_WEIGHTS

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


_Notes: TypeAlias = dict[int, tuple[Tensor, StoredTensor]]


@final
class _StandIn:
    """Takes the place of a file's tensor while transformers loads, and notes what it becomes."""

    def __init__(self, part: Any, notes: _Notes) -> None:  # noqa: ANN401 - of safetensors
        self._part, self._notes = part, notes

    def __getitem__(self, rows: EllipsisType) -> _StandIn:
        """Read nothing."""
        return self

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> Tensor:
        """Give a tensor without memory that is known again by its storage."""
        shape = torch.Size(self._part.get_shape())
        made = torch.empty(shape, dtype=dtype, device="meta")
        source = StoredTensor(shape, made.dtype, (self._part,))
        # The tensor stays alive with it, so that no other storage gets its id.
        self._notes[made.untyped_storage()._cdata] = made, source
        return made


def load_unread(
    auto_class: Any,  # noqa: ANN401 - of transformers, untyped
    config: Any,  # noqa: ANN401 - as above
    path: str,
    **options: Any,  # noqa: ANN401 - as above
) -> tuple[nn.Module, Mapping[str, Any]]:
    """Load a model with its parameters on the meta device; gives it and transformers' report.

    What they begin with is its attribute `first_weights`, by name; there is none where a parameter
    is not one tensor of the files as it is. Buffers have their values.
    """
    notes: _Notes = {}
    with _disable_current_modes():
        with torch.device("meta"):
            kind = type(auto_class.from_config(deepcopy(config)))
        with torch.device("cpu"), torch.no_grad():
            files = {n: _StandIn(part, notes) for n, part in _parts(path)}
            module, report = kind.from_pretrained(None, config=config, state_dict=files, **options)
            _read_buffers(module, notes)
            origins = _take_parameters(module, notes)
    module.config.name_or_path = path
    tied = module.all_tied_weights_keys.items()
    # Left apart where files hold both, whose values were not there to be compared.
    is_split = any(module.get_parameter(a) is not module.get_parameter(b) for a, b in tied)
    is_on_meta = any(buffer.is_meta for buffer in module.buffers())
    if not (is_split or is_on_meta or None in origins.values()):
        setattr(module, FIRST_WEIGHTS, origins)
    return module, report


def _parts(path: str) -> Iterator[tuple[str, Any]]:
    """List the tensors of a model's files, unread; those of a name on the hub are fetched."""
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files  # noqa: PLC0415

    one = cached_file(path, _FILE, _raise_exceptions_for_missing_entries=False)
    shards: Any = get_checkpoint_shard_files
    files = [one]
    if not one:
        files, _ = shards(path, cached_file(path, _INDEX))
    for file in files:
        tensors: Any = safe_open(file, "pt")
        for name in tensors.keys():  # noqa: SIM118
            yield name, tensors.get_slice(name)


def _read_buffers(module: nn.Module, notes: _Notes) -> None:
    """Give the buffers that files hold their values."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and (origin := _origin(buffer, notes)) is not None:
                part._buffers[name] = origin[...].clone()


def _take_parameters(module: nn.Module, notes: _Notes) -> dict[str, LazyTensor | None]:
    """Put all parameters on the meta device; gives what each begins with, by all of its names."""
    named = [*module.named_parameters(remove_duplicate=False)]
    origins, metas = dict[int, LazyTensor | None](), dict[int, nn.Parameter]()
    for _, parameter in named:
        # One that is tied has several names, and stays one
        if id(parameter) not in metas:
            origins[id(parameter)] = _origin(parameter, notes)
            empty = torch.empty_like(parameter, device="meta")
            metas[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for part in module.modules():
        for name, own in part._parameters.items():
            if own is not None:
                part._parameters[name] = metas[id(own)]
    return {name: origins[id(parameter)] for name, parameter in named}


def _origin(tensor: Tensor, notes: _Notes) -> LazyTensor | None:
    """Find where the values of a tensor are; None where they are computed from a file's."""
    if not tensor.is_meta:
        return InMemoryTensor(tensor.detach())
    _, source = notes.get(tensor.untyped_storage()._cdata, (None, None))
    # A view of a part of a file's tensor, or of it transposed, shares its storage.
    if source is None or source.shape != tensor.shape or not tensor.is_contiguous():
        return None
    return source
