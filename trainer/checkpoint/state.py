"""The state of a run as named tensors plus JSON, and back into live objects, bit for bit.

Tensors are named `model.<name>`, `optimizer.<parameter>.<key>`, `rng.<source>`, `modules.<...>`
(what modules keep besides) and `extra.<...>`; everything else is a JSON tree
(`trainer.checkpoint.codec`). The optimizer's state is kept by parameter name, so the order in which
parameters were handed to it does not matter.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint.codec import decode, encode
from trainer.checkpoint.dtensors import Source, fill, gathered, local
from trainer.checkpoint.manifest import DamagedError
from trainer.checkpoint.moments import (
    check_any,
    check_settings,
    check_states,
    check_without,
)
from trainer.checkpoint.store import Loaded
from trainer.checkpoint.tensor_reader import Stored
from trainer.config.messages import clip, first_of
from trainer.core.errors import NoCheckpointError, NonFiniteError

# Settings of a group that say how an update is computed, and not what it is; "params" are indices.
_EXECUTION = ("params", "fused", "foreach", "capturable")

# What wrappers put into names that execution alone decides on: compilation, recomputation.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def capture(
    model: nn.Module, optimizer: Optimizer, *, extra: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take everything that the next steps depend on.

    Collective only where an optimizer keeps what is neither in rows over the ranks nor whole.

    Args:
        model: the bare module, not a data-parallel wrapper.
        optimizer: of parameters of `model`.
        extra: what else to keep: numbers, strings, tensors, and lists, tuples, mappings of them.

    Returns:
        The tensors, which share the live ones' memory and are in shards where those are, and the
        rest as JSON.

    Raises:
        ValueError: the optimizer holds a parameter that is not the model's.
        TypeError: something is neither a tensor nor JSON.
    """
    tensors: dict[str, Tensor] = {}
    meta = {
        "model": _encode_model(model, tensors),
        "optimizer": _encode_optimizer(model, optimizer, tensors),
        "rng": encode(_random_states(), "rng", tensors),
        "extra": encode(extra, "extra", tensors),
    }
    return gathered(tensors), meta


def restore(
    loaded: Loaded,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    hyperparameters: Literal["saved", "live"] = "saved",
) -> dict[str, Any]:
    """Put a state back, all of it or an error; of what is in shards, each rank reads its rows.

    Args:
        loaded: what `capture` gave and `CheckpointStore` kept.
        model: of the same architecture; wrapped as it likes, on any device.
        optimizer: of the same class and parameters.
        hyperparameters: whether the optimizer's groups keep the checkpoint's settings or, for a
            run whose settings were changed on purpose, their own.

    Returns:
        The `extra` that was captured.

    Raises:
        NoCheckpointError: names, shapes, dtypes, groups or the optimizer's class differ.
    """
    try:
        saved = {key: loaded.meta[key] for key in ("model", "optimizer", "rng", "extra")}
        extra = dict(decode(saved["extra"], loaded.tensors).items())
        _restore_model(loaded, model, dict(decode(saved["model"], loaded.tensors).items()))
        _restore_optimizer(loaded, model, optimizer, saved["optimizer"], hyperparameters)
        _restore_random_states(decode(saved["rng"], loaded.tensors))
    except (DamagedError, OSError) as error:
        raise NoCheckpointError(f"{loaded.path}: changed while it was read: {error}") from error
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise NoCheckpointError(
            f"{loaded.path}: not a training state of this version ({error!r:.80}): use init="
        ) from error
    return extra


def assert_finite(tensors: Mapping[str, Tensor]) -> None:
    """Check that no tensor holds NaN or infinity; see `not_finite`.

    Raises:
        NonFiniteError: one does; the text names the first few.
    """
    bad = not_finite(tensors)
    if bad:
        raise NonFiniteError(
            f"not saved: {first_of([*map(clip, bad)])} not finite; the older checkpoints stand"
        )


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Name the tensors that hold NaN or infinity; one synchronisation per device if none does.

    Of what is in shards, this rank's is looked at.
    """
    floating = {
        name: tensor
        for name, tensor in ((name, local(each)) for name, each in tensors.items())
        if tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex())
    }
    if _all_finite(floating.values()):
        return []
    return [name for name, tensor in floating.items() if not _all_finite([tensor])]


def check_tensors(
    found: Mapping[str, Source], expected: Mapping[str, Tensor], where: object, remedy: str
) -> None:
    """Compare names, shapes and dtypes of tensors with those a model has.

    Args:
        found: the stored ones.
        expected: the model's.
        where: names the stored ones in the error.
        remedy: ends the error.

    Raises:
        NoCheckpointError: they differ; the text names the first few differences.
    """
    wrong = [
        f"{name} ({_kind(found[name])} in the checkpoint, {_kind(tensor)} in the model)"
        for name, tensor in expected.items()
        if name in found and _kind(found[name]) != _kind(tensor)
    ]
    faults = [
        f"{what} {first_of([*map(clip, names)])}"
        for what, names in (
            ("missing", sorted(expected.keys() - found.keys())),
            ("unexpected", sorted(found.keys() - expected.keys())),
            ("different", wrong),
        )
        if names
    ]
    if faults:
        raise NoCheckpointError(f"{where}: does not fit the model: {'; '.join(faults)}: {remedy}")


def plain_name(name: str) -> str:
    """Take out of a parameter's name what compilation and recomputation put in."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@torch.no_grad()
def load_model(
    model: nn.Module, tensors: Mapping[str, Source], others: Mapping[str, Any] | None = None
) -> None:
    """Copy a checked state into a model, one tensor at a time.

    Args:
        model: whose tensors are to be filled.
        tensors: by plain name; at least those of `model_tensors`.
        others: by plain name, what modules keep besides tensors.
    """
    state = model.state_dict()
    for name, target in state.items():
        plain = plain_name(name)
        if isinstance(target, Tensor):
            fill(target, tensors[plain])
        elif others is not None:
            state[name] = others[plain]
    # The tensors are in place; this is for the modules' own hooks, and what they keep besides.
    model.load_state_dict(state)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """List the tensors a model keeps, by plain name, tied ones under each of their names."""
    state = model.state_dict(keep_vars=True)
    return {plain_name(n): value for n, value in state.items() if isinstance(value, Tensor)}


def _encode_model(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Name the model's tensors; what modules keep besides (`get_extra_state`) is returned."""
    others: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        plain = plain_name(name)
        if isinstance(value, Tensor):
            tensors[f"model.{plain}"] = value
        else:
            others[plain] = encode(value, f"modules.{plain}", tensors)
    return others


def _restore_model(loaded: Loaded, model: nn.Module, others: Mapping[str, Any]) -> None:
    found = {
        name.removeprefix("model."): tensor
        for name, tensor in loaded.stored.items()
        if name.startswith("model.")
    }
    remedy = "resume with the model that was trained, or use init= to take over weights"
    check_tensors(found, model_tensors(model), loaded.path, remedy)
    load_model(model, found, others)


def _encode_optimizer(
    model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    names = _parameter_names(model, optimizer)
    state = optimizer.state_dict()
    groups = [
        {**group, "params": [names[index] for index in group["params"]]}
        for group in state["param_groups"]
    ]
    by_name = {names.get(key, key): value for key, value in state["state"].items()}
    return {
        "class": type(optimizer).__qualname__,
        "groups": encode(groups, "optimizer.groups", tensors),
        "state": encode(by_name, "optimizer", tensors),
        "without": sorted(name for name in names.values() if not by_name.get(name)),
    }


def _restore_optimizer(
    loaded: Loaded,
    model: nn.Module,
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    hyperparameters: Literal["saved", "live"],
) -> None:
    names = _parameter_names(model, optimizer)
    groups = decode(saved["groups"], loaded.tensors)
    live = optimizer.state_dict()["param_groups"]
    own = {"class": type(optimizer).__qualname__, "groups": [_members(g, names) for g in live]}
    theirs = {"class": saved["class"], "groups": [sorted(g["params"]) for g in groups]}
    if own["class"] != theirs["class"] or (
        hyperparameters == "saved" and own["groups"] != theirs["groups"]
    ):
        raise NoCheckpointError(
            f"{loaded.path}: its optimizer ({theirs['class']}, {_sizes(theirs['groups'])}) is not "
            f"this run's ({own['class']}, {_sizes(own['groups'])}): resume with the optimizer "
            "that was used, or use init= to take over the weights alone"
        )
    if hyperparameters == "saved":
        pairs = list(zip(groups, live, strict=True))
        live = [
            {**theirs, **{key: mine[key] for key in _EXECUTION if key in mine}}
            for theirs, mine in pairs
        ]
        for (_, mine), merged in zip(pairs, live, strict=True):
            check_settings(optimizer, merged, mine)
    parameters = dict(enumerate(_parameters(optimizer)))
    states = decode(saved["state"], loaded.stored)
    trained = {name for group in groups for name in group["params"]}
    check_without(saved, trained, states)
    if loaded.step and "without" not in saved and hyperparameters == "saved":
        check_any(optimizer, states)
    for frozen in trained - set(names.values()):
        states.pop(frozen, None)
    check_states(
        optimizer,
        {names[index]: parameter for index, parameter in parameters.items()},
        {names[index]: group for group in live for index in group["params"]},
        states,
    )
    state: dict[Any, Any] = {}
    keys = {name: index for index, name in names.items()}
    for name, values in states.items():
        key = keys.get(name, name)
        parameter = parameters.get(key)
        state[key] = _copied(values, parameter)
    optimizer.load_state_dict({"state": state, "param_groups": live})
    _undo_casts(optimizer, state, parameters)


def _undo_casts(
    optimizer: Optimizer, state: Mapping[Any, Any], parameters: Mapping[int, Tensor]
) -> None:
    """Put back what `load_state_dict` cast to the parameter's dtype, e.g. fp32 moments of bf16."""
    for key, parameter in parameters.items():
        live = optimizer.state.get(parameter, {})
        for name, value in state.get(key, {}).items():
            if isinstance(value, Tensor) and live[name].dtype != value.dtype:
                live[name] = value.to(live[name].device)


def _copied(value: Any, parameter: Tensor | None) -> Any:  # noqa: ANN401 - any state
    """Read state out of a checkpoint, laid out and dealt out like its parameter where it can be."""
    if isinstance(value, Stored):
        if parameter is None or value.shape != parameter.shape or not value.shape:
            return value[...].clone()
        copy = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        fill(copy, value)
        return copy
    if isinstance(value, dict):
        return {key: _copied(item, parameter) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item, parameter) for item in value)
    return value


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """List an optimizer's parameters in the order of its `state_dict` indices."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _parameter_names(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    parameters = _parameters(optimizer)
    if any(id(parameter) not in names for parameter in parameters):
        raise ValueError("the optimizer holds a parameter that is not the model's")
    return {index: names[id(parameter)] for index, parameter in enumerate(parameters)}


def _members(group: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    return sorted(names[index] for index in group["params"])


def _sizes(groups: Sequence[Sequence[str]]) -> str:
    return f"groups of {' + '.join(str(len(group)) for group in groups)} parameters"


def _random_states() -> dict[str, Any]:
    """Take the state of every global generator of this process."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    words_of_numpy = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [name, words_of_numpy, position, has_gauss, cached],
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if _uses_cuda() else [],
    }


def _uses_cuda() -> bool:
    """Whether this process has touched a GPU; asking for states would start the driver."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _restore_random_states(states: Mapping[str, Any]) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["cpu"].clone())
    num_devices = torch.cuda.device_count() if states["cuda"] else 0
    for device, state in enumerate(states["cuda"][:num_devices]):
        torch.cuda.set_rng_state(state.clone(), device)


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all are finite: a fused maximum per dtype, one answer per device."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        values = values.float() if values.dtype.itemsize == 1 else values  # no norms in 8 bits
        groups.setdefault((values.device, values.dtype), []).append(values)
    verdicts: dict[torch.device, list[Tensor]] = {}
    for (device, _), group in groups.items():
        largest = torch.stack(torch._foreach_norm(group, float("inf")))
        verdicts.setdefault(device, []).append(torch.isfinite(largest).all())
    return all(bool(torch.stack(answers).all()) for answers in verdicts.values())


def _kind(tensor: Source) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
