"""Turn the state of a run into named tensors plus JSON, and back into live objects, bit for bit.

Tensors are named `model.<name>`, `optimizer.<parameter>.<key>`, `rng.<source>`, `modules.<...>`
(what modules keep besides) and `extra.<...>`; everything else is a JSON tree
(`trainer.checkpoint.codec`). Of tied weights the first name is stored. The optimizer's state is
kept by parameter name, so the order in which parameters were handed to it does not matter.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint.codec import decode, encode
from trainer.checkpoint.store import MODEL, Loaded
from trainer.checkpoint.tensor_files import StoredTensor, fill, is_sharded, local_part, rows_of
from trainer.config.messages import clip, first_of
from trainer.core.errors import NoCheckpointError, NonFiniteError

# Settings of a group that say how an update is computed, and not what it is; "params" are indices.
_EXECUTION = ("params", "fused", "foreach", "capturable")

# The classes that hand their state to fused kernels, which trust its shapes.
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)

# What wrappers put into names that execution alone decides on: compilation, recomputation.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def capture(
    model: nn.Module, optimizer: Optimizer, *, extra: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take everything that the next steps depend on.

    Gives the tensors, which share the live ones' memory and are in shards where those are, and the
    rest as JSON. Collective only where an optimizer keeps what is neither in rows nor whole.

    Raises:
        ValueError: the optimizer has a parameter that is not the model's.
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
    return {name: _in_rows_or_whole(tensor) for name, tensor in tensors.items()}, meta


def restore(
    loaded: Loaded,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    hyperparameters: Literal["saved", "live"] = "saved",
) -> dict[str, Any]:
    """Restore a state, all of it or an error; of what is in shards, each rank reads its rows.

    Args:
        loaded: what `capture` returned and `CheckpointStore` saved.
        model: of the same architecture; wrapped as it likes, on any device.
        optimizer: of the same class and parameters.
        hyperparameters: "live" where the optimizer's groups keep settings changed on purpose.

    Returns:
        The `extra` that was captured.

    Raises:
        NoCheckpointError: names, shapes, dtypes, groups or the optimizer's class differ.
    """
    try:
        extra = dict(decode(loaded.meta["extra"], loaded.read).items())
        others = dict(decode(loaded.meta["model"]["others"], loaded.read).items())
        remedy = "resume with the model that was trained, or use init= to take over weights"
        load_model(model, loaded.weights, loaded.path, remedy, others)
        _restore_optimizer(loaded, model, optimizer, keeps_settings=hyperparameters == "live")
        _restore_random_states(decode(loaded.meta["rng"], loaded.read))
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise NoCheckpointError(
            f"{loaded.path}: not a training state of this version ({error!r:.80}): start a new "
            "run from its weights with init="
        ) from error
    return extra


def assert_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise `NonFiniteError`, which names the first few, where tensors hold NaN or infinity."""
    if bad := not_finite(tensors):
        raise NonFiniteError(
            f"not saved: {first_of([*map(clip, bad)])} not finite; older checkpoints are kept"
        )


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Name those that hold NaN or infinity in this rank's part; one synchronisation per device."""
    answers: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        values = local_part(tensor)
        if values.numel() > 0 and (values.is_floating_point() or values.is_complex()):
            values = values.float() if values.dtype.itemsize == 1 else values  # no norms in 8 bits
            # The largest magnitude, in one pass and without a mask as large as the tensor.
            largest = torch.linalg.vector_norm(values, float("inf"))
            answers.setdefault(values.device, {})[name] = torch.isfinite(largest)
    bad: list[str] = []
    for found in answers.values():
        finite = torch.stack([*found.values()]).tolist()
        bad += [name for name, is_finite in zip(found, finite, strict=True) if not is_finite]
    return bad


def plain_name(name: str) -> str:
    """Take out of a parameter's name what compilation and recomputation put in."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """List the tensors a model keeps, by plain name, tied ones under each of their names."""
    state = model.state_dict(keep_vars=True)
    return {plain_name(n): value for n, value in state.items() if isinstance(value, Tensor)}


def find_ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Find the names of a tensor that has an earlier one, each with the first."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    return {name: origin for name, origin in names.items() if name != origin}


@torch.no_grad()
def load_model(
    model: nn.Module,
    weights: Mapping[str, StoredTensor],
    source: object,
    remedy: str = "init= needs weights of this very model",
    others: Mapping[str, Any] | None = None,
) -> None:
    """Check stored weights and buffers against a model's, and copy them, one tensor at a time.

    Args:
        model: whose tensors are to be filled.
        weights: by plain name; a tied one under its first name in the model, or under others.
        source: begins the error, which `remedy` ends.
        remedy: what to do.
        others: by plain name, what modules keep besides tensors.

    Raises:
        NoCheckpointError: names, shapes or dtypes differ; the text names the first differences.
    """
    expected = model_tensors(model)
    found = dict(weights)
    for alias, name in find_ties(expected).items():
        if one := found.get(name) or found.get(alias):
            found |= {name: found.get(name, one), alias: found.get(alias, one)}
    if faults := _differences(found, expected):
        raise NoCheckpointError(f"{source}: does not fit the model: {'; '.join(faults)}: {remedy}")
    state = model.state_dict()
    for name, target in state.items():
        if isinstance(target, Tensor):
            fill(target, found[plain_name(name)])
        elif others is not None:
            state[name] = others[plain_name(name)]
    # The tensors are in place; this is for the modules' own hooks, and what they keep besides.
    model.load_state_dict(state)


def _differences(found: Mapping[str, StoredTensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Say how stored tensors differ from a model's in names, shapes and dtypes."""
    wrong = [
        f"{name} ({_kind(found[name])} in the checkpoint, {_kind(tensor)} in the model)"
        for name, tensor in expected.items()
        if name in found and _kind(found[name]) != _kind(tensor)
    ]
    differing = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": sorted(found.keys() - expected.keys()),
        "different": wrong,
    }
    return [f"{what} {first_of([*map(clip, names)])}" for what, names in differing.items() if names]


def _kind(tensor: Tensor | StoredTensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _in_rows_or_whole(tensor: Tensor) -> Tensor:
    """Make whole what an optimizer shards otherwise than FSDP2, not in rows. Collective then."""
    if is_sharded(tensor) and rows_of(tensor) is None:
        return tensor.full_tensor().cpu()
    return tensor


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
    live = _named_groups(optimizer, [*parameters])
    own, theirs = ([sorted(group["params"]) for group in each] for each in (live, groups))
    if saved["class"] != type(optimizer).__qualname__ or not (keeps_settings or own == theirs):
        raise NoCheckpointError(
            f"{loaded.path}: its optimizer ({saved['class']}, {_sizes(theirs)}) is not this run's "
            f"({type(optimizer).__qualname__}, {_sizes(own)}): resume with the optimizer that was "
            "used, or use init= to take over the weights alone"
        )
    settings = optimizer.state_dict()["param_groups"]
    if not keeps_settings:
        settings = [
            {**group, **{key: mine[key] for key in _EXECUTION if key in mine}}
            for group, mine in zip(groups, settings, strict=True)
        ]
    states = decode(saved["state"], loaded.tensors.__getitem__)
    if isinstance(optimizer, _FUSED) and any(group.get("fused") for group in settings):
        _check_fused_states(states, parameters)
    frozen_since = {name for names in theirs for name in names} - parameters.keys()
    indices = {name: index for index, name in enumerate(parameters)}
    state = {
        indices.get(name, name): _read(values, parameters.get(name))
        for name, values in states.items()
        if name not in frozen_since
    }
    optimizer.load_state_dict({"state": state, "param_groups": settings})
    _undo_casts(optimizer, {parameters[name]: state.get(indices[name], {}) for name in parameters})


def _check_fused_states(states: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> None:
    """Refuse states of another shape or dtype, beyond which a fused kernel would read."""
    for name, parameter in parameters.items():
        own = (tuple(parameter.shape), parameter.dtype)
        for key, value in states.get(name, {}).items():
            expected = ((), torch.float32) if key == "step" else own
            kind = (tuple(value.shape), value.dtype) if isinstance(value, StoredTensor) else None
            if value is not None and kind != expected:
                raise ValueError(f"optimizer state {name}.{key} is {kind}, not {expected}")


def _undo_casts(optimizer: Optimizer, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Put back what `load_state_dict` cast to the parameter's dtype, e.g. fp32 moments of bf16."""
    for parameter, state in states.items():
        live = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and live[key].dtype != value.dtype:
                live[key] = value.to(live[key].device)


def _read(value: Any, parameter: Tensor | None) -> Any:  # noqa: ANN401 - any state
    """Read state out of a checkpoint, laid out and in shards as its parameter where it can be."""
    if isinstance(value, StoredTensor):
        if parameter is None or value.shape != parameter.shape or not value.shape:
            return value[...].clone()
        copy = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        fill(copy, value)
        return copy
    if isinstance(value, dict):
        return {key: _read(item, parameter) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_read(item, parameter) for item in value)
    return value


def _named_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """List an optimizer's parameters by plain name, in the order of its `state_dict` indices."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        return {names[id(parameter)]: parameter for parameter in parameters}
    except KeyError as error:
        raise ValueError("the optimizer holds a parameter that is not the model's") from error


def _named_groups(optimizer: Optimizer, names: Sequence[str]) -> list[dict[str, Any]]:
    """List the groups of an optimizer with the names of their parameters."""
    return [
        {**group, "params": [names[index] for index in group["params"]]}
        for group in optimizer.state_dict()["param_groups"]
    ]


def _sizes(groups: list[list[str]]) -> str:
    return f"groups of {' + '.join(str(len(group)) for group in groups)} parameters"


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
