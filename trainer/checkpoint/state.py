"""Turn the state of a run into named tensors plus JSON, and back into live objects, bit for bit.

Tensors are named `model.<name>`, `optimizer.<parameter>.<key>`, `rng.<source>`, `modules.<...>`
(what modules keep besides) and `extra.<...>`; everything else is a JSON tree
(`trainer.checkpoint.codec`). Of tied weights the first name is stored. The optimizer's state is
kept by parameter name, so the order in which parameters were handed to it does not matter.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint.codec import decode, encode
from trainer.checkpoint.store import MODEL, Loaded
from trainer.config.messages import clip, first_of
from trainer.core.errors import NoCheckpointError, NonFiniteError
from trainer.core.tensors import fill, is_sharded, local_part, rows_of

# Settings of a group that say how an update is computed, and not what it is; "params" are indices.
_EXECUTION = ("params", "fused", "foreach", "capturable")

# States that are no tensors of their parameter's shape; optimizers of PyTorch that have others.
_SCALARS = ("step", "mu_product", "eta", "mu")
_ODD = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam)

# What wrappers put into names that execution alone decides on: compilation, recomputation.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def capture(
    model: nn.Module, optimizer: Optimizer, *, extra: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take everything that the next steps depend on.

    Gives the tensors, which share the live ones' memory and are in shards where those are, and the
    rest as JSON. Collective only where an optimizer keeps what is neither in rows nor whole.

    Raises:
        TypeError: something is neither a tensor nor JSON.
    """
    state = {plain_name(n): value for n, value in model.state_dict(keep_vars=True).items()}
    weights = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in state.items() if name not in weights}
    ties = find_ties(weights)
    tensors = {f"{MODEL}{name}": each for name, each in weights.items() if name not in ties}
    meta = {
        "model": {"ties": ties, "others": encode(others, "modules", tensors)},
        "optimizer": _encode_optimizer(model, optimizer, tensors),
        "rng": encode(_random_states(), "rng", tensors),
        "extra": encode(extra, "extra", tensors),
    }
    for name, tensor in tensors.items():
        if is_sharded(tensor) and rows_of(tensor) is None:  # an optimizer's own way; collective
            tensors[name] = tensor.full_tensor().cpu()
    return tensors, meta


def restore(
    loaded: Loaded, model: nn.Module, optimizer: Optimizer, *, keeps_settings: bool = False
) -> dict[str, Any]:
    """Restore all but the model's own state, which `checkpoint_weights` gives, or raise an error.

    Args:
        loaded: what `capture` returned and `CheckpointStore` saved.
        model: with its weights; wrapped as it likes, on any device. Of what is in shards, each rank
            reads its rows.
        optimizer: of the same class and parameters.
        keeps_settings: whether the optimizer's groups keep theirs, which were changed on purpose.

    Returns:
        The `extra` that was captured.

    Raises:
        NoCheckpointError: groups or the optimizer's class differ.
    """
    try:
        extra = dict(decode(loaded.meta["extra"], loaded.read).items())
        _restore_optimizer(loaded, model, optimizer, keeps_settings=keeps_settings)
        _restore_random_states(decode(loaded.meta["rng"], loaded.read))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise NoCheckpointError(
            f"{loaded.path}: not a state of this version ({error!r:.80}): use init= for its weights"
        ) from error
    return extra


def assert_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise `NonFiniteError`, which names the first few, where tensors hold NaN or infinity."""
    if bad := not_finite(tensors):
        names = first_of([*map(clip, bad)])
        raise NonFiniteError(f"not saved: {names} not finite; older checkpoints are kept")


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Name those that hold NaN or infinity in this rank's part; waits for the device at each."""
    return [name for name, tensor in tensors.items() if not _is_finite(local_part(tensor))]


def _is_finite(values: Tensor) -> bool:
    if values.numel() == 0 or not (values.is_floating_point() or values.is_complex()):
        return True
    values = values.float() if values.dtype.itemsize == 1 else values  # no norms in 8 bits
    # The largest magnitude, in one pass and without a mask as large as the tensor.
    return bool(torch.linalg.vector_norm(values, float("inf")).isfinite())


def plain_name(name: str) -> str:
    """Take out of a parameter's name what compilation and recomputation put in."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def find_ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Find the names of a tensor that has an earlier one, each with the first."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    return {name: origin for name, origin in names.items() if name != origin}


def _encode_optimizer(
    model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    names = [*_named_parameters(model, optimizer)]
    state = optimizer.state_dict()["state"]
    by_name = {names[key] if isinstance(key, int) else key: state[key] for key in state}
    return {
        "class": type(optimizer).__qualname__,
        "groups": encode(_named_groups(optimizer, names), "optimizer.groups", tensors),
        "state": encode(by_name, "optimizer", tensors),
    }


def _restore_optimizer(
    loaded: Loaded, model: nn.Module, optimizer: Optimizer, *, keeps_settings: bool
) -> None:
    saved, parameters = loaded.meta["optimizer"], _named_parameters(model, optimizer)
    groups = decode(saved["groups"], loaded.read)
    live, own_class = _named_groups(optimizer, [*parameters]), type(optimizer).__qualname__
    own, theirs = ([sorted(group["params"]) for group in each] for each in (live, groups))
    if saved["class"] != own_class or not (keeps_settings or own == theirs):
        raise NoCheckpointError(
            f"{loaded.path}: its optimizer ({saved['class']}) and groups are not this run's "
            f"({own_class}): resume with those that were used, or use init= for the weights alone"
        )
    settings = optimizer.state_dict()["param_groups"]
    if not keeps_settings:
        pairs = zip(settings, groups, strict=True)
        settings = [{**own, **g, **{k: own[k] for k in _EXECUTION if k in own}} for own, g in pairs]
    frozen_since = {name for names in theirs for name in names} - parameters.keys()
    states = {
        name: decode(tree, partial(_read, loaded, parameters.get(name)))
        for name, tree in saved["state"].items()
        if name not in frozen_since
    }
    is_known = type(optimizer).__module__.startswith(("torch.optim.", "trainer.optim."))
    for group in live:
        if group.get("fused") or (is_known and not isinstance(optimizer, _ODD)):
            _check_states(states, parameters, group)
    indices = {name: index for index, name in enumerate(parameters)}
    state = {indices.get(name, name): values for name, values in states.items()}
    optimizer.load_state_dict({"state": state, "param_groups": settings})
    # Which casts to the parameter's dtype, and so loses bits of fp32 moments of bf16.
    for name in parameters.keys() & states.keys():
        live_state = optimizer.state[parameters[name]]
        for key, value in states[name].items():
            if isinstance(value, Tensor) and live_state[key].dtype != value.dtype:
                live_state[key] = value.to(live_state[key].device)


def _check_states(
    states: Mapping[str, Any], parameters: Mapping[str, Tensor], group: Mapping[str, Any]
) -> None:
    """Refuse states that PyTorch would stumble over, or a fused kernel read beyond.

    Raises:
        LookupError: a name is missing that another parameter of the group has.
        ValueError: a shape or dtype is not its parameter's.
    """
    stated = [(name, parameters[name]) for name in group["params"] if name in states]
    keys = {key for name, _ in stated for key in states[name]}
    for (name, parameter), key in product(stated, keys):
        value: Any = states[name][key]
        found = (value.shape, value.dtype) if isinstance(value, Tensor) else None
        own = ((), torch.float32) if key in _SCALARS else (parameter.shape, parameter.dtype)
        is_as_wide = found and found[0] == own[0] and found[1].itemsize >= own[1].itemsize
        if value is not None and found != own and (group.get("fused") or not is_as_wide):
            raise ValueError(f"optimizer state {name}.{key} is {found}, not {own}")


def _read(loaded: Loaded, parameter: Tensor | None, name: str) -> Tensor:
    """Read a tensor of the state, laid out and in shards as its parameter where it can be."""
    stored = loaded.tensors[name]
    if parameter is None or stored.shape != parameter.shape or not stored.shape:
        return stored[...].clone()
    copy = torch.empty_like(parameter, dtype=stored.dtype, requires_grad=False)
    fill(copy, stored)
    return copy


def _named_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """List an optimizer's parameters by plain name, in the order of its `state_dict` indices."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {names[id(parameter)]: parameter for parameter in parameters}


def _named_groups(optimizer: Optimizer, names: Sequence[str]) -> list[dict[str, Any]]:
    """List the groups of an optimizer with the names of their parameters."""
    return [
        {**group, "params": [names[index] for index in group["params"]]}
        for group in optimizer.state_dict()["param_groups"]
    ]


def _random_states() -> dict[str, Any]:
    """Take the state of every global generator of this process."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    numpy_words = torch.from_numpy(np.asarray(keys).astype(np.int64))
    # Only where this process has touched a GPU; asking for states would start the driver.
    uses_cuda = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [name, numpy_words, position, has_gauss, cached],
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if uses_cuda else [],
    }


def _restore_random_states(states: Mapping[str, Any]) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["cpu"].clone())
    num_devices = torch.cuda.device_count() if states["cuda"] else 0
    for device, state in enumerate(states["cuda"][:num_devices]):
        torch.cuda.set_rng_state(state.clone(), device)
