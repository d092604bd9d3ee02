"""Turn the parts of a run into named tensors plus JSON, and back into live objects, bit for bit.

A tensor is named after its part and its place there: `model.<name>`, `optimizer.state.<parameter>.
<key>`; everything else is a JSON tree (`trainer.checkpoint.codec`). Of tied weights the first name
is stored. The optimizer's state is kept by parameter name, so the order in which parameters were
handed to it does not matter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint.codec import decode, encode, read_whole
from trainer.checkpoint.store import Loaded
from trainer.checkpoint.tensor_files import StoredTensor
from trainer.config.messages import clip, first_of
from trainer.core import gpu
from trainer.core.errors import ConfigError, NoCheckpointError, NonFiniteError, TrainError
from trainer.core.stateful import State, Stateful
from trainer.core.tensors import fill, is_sharded, local_part, rows_of
from trainer.core.user_code import described
from trainer.optim.bias_correction import change_betas
from trainer.optim.masters import masters_of

# Settings of a group that say how an update is computed, and not what it is; "params" are indices.
_EXECUTION = ("params", "fused", "foreach", "capturable")

# What wrappers put into names that execution alone decides on: compilation, recomputation.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def capture(parts: Mapping[str, Stateful]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take the state of parts, by name.

    Gives the tensors, which share the live ones' memory and are in shards where those are, and the
    rest as JSON. Collective only where a part keeps what is neither in rows nor whole.
    """
    tensors: dict[str, Tensor] = {}
    # `encode` fills in the tensors.
    states = dict[str, Any]()
    for name, part in parts.items():
        states[name] = {"version": part.version, "state": encode(part.state(), name, tensors)}
    for name, tensor in tensors.items():
        # An optimizer of one's own may cut along other dimensions; all ranks gather that.
        if is_sharded(tensor) and rows_of(tensor) is None:
            tensors[name] = tensor.full_tensor().cpu()
    return tensors, states


def restore(loaded: Loaded, parts: Mapping[str, Stateful], may_lack: Collection[str] = ()) -> None:
    """Restore parts by name; of what is in shards, each rank reads its rows.

    Parts may be on any device and in any shards. Of those in `may_lack` the checkpoint may have
    none.
    """
    for name, part in parts.items():
        if name in may_lack and name not in loaded.parts:
            continue
        state = _laid_out(loaded, name, part)
        try:
            part.load(state)
        except NoCheckpointError as error:
            raise NoCheckpointError(f"{loaded.path}: {error}") from error
        except TrainError:
            raise
        except Exception as error:
            # A part, perhaps of a user's own, meets what a stranger wrote: anything may be raised.
            raise NoCheckpointError(_unusable(loaded, name, error)) from error


def state_of(
    loaded: Loaded, name: str, version: int, read: Callable[[str], Any] | None = None
) -> Any:  # noqa: ANN401 - any state
    """Give the state of a part of a checkpoint; `read` gives its tensors, else unread."""
    saved = loaded.parts.get(name)
    try:
        if saved is None or saved["version"] != version:
            has = "is missing"
            if saved is not None:
                has = f"has version {saved['version']!r:.20}"
            text = f"{name} {has}, and this run reads version {version}: use init= for its weights"
            raise NoCheckpointError(f"{loaded.path}: {text}")
        return decode(saved["state"], read or loaded.tensors.__getitem__)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise NoCheckpointError(_unusable(loaded, name, error)) from error


def _unusable(loaded: Loaded, name: str, error: Exception) -> str:
    why = f"{name} cannot be restored ({described(error):.160})"
    return f"{loaded.path}: {why}: use init= for its weights"


def _laid_out(loaded: Loaded, name: str, part: Stateful) -> Any:  # noqa: ANN401 - any state
    """Give a part's state, each tensor laid out as the one that it has in its place now."""
    if part.loads_unread:
        return state_of(loaded, name, part.version)
    live: dict[str, Tensor] = {}
    encode(part.state(), name, live)
    return state_of(
        loaded, name, part.version, lambda place: _read(loaded.tensors[place], live.get(place))
    )


def _read(stored: StoredTensor, like: Tensor | None) -> Tensor:
    """Read a tensor, on the device and in the shards of another of its shape."""
    if like is None or stored.shape != like.shape:
        return stored[...].clone()
    copy = torch.empty_like(like, dtype=stored.dtype, requires_grad=False)
    fill(copy, stored)
    return copy


def assert_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise `NonFiniteError`, which names the first few, where tensors hold NaN or infinity."""
    if bad := not_finite(tensors):
        names = first_of([*map(clip, bad)])
        raise NonFiniteError(f"not saved: {names} not finite; older checkpoints are kept")


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Name those that hold NaN or infinity in this rank's part; waits once for each device."""
    largest: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        values = local_part(tensor)
        if values.numel() and (values.is_floating_point() or values.is_complex()):
            # PyTorch has no norms of numbers in 8 bits.
            if values.dtype.itemsize == 1:
                values = values.float()
            # In one pass, and without a mask as large as the tensor.
            norm = torch.linalg.vector_norm(values, float("inf")).double()
            largest.setdefault(values.device, {})[name] = norm
    bad = set[str]()
    for norms in largest.values():
        are_finite = torch.stack([*norms.values()]).isfinite().tolist()
        for name, is_finite in zip(norms, are_finite, strict=True):
            if not is_finite:
                bad.add(name)
    return [name for name in tensors if name in bad]


def plain_name(name: str) -> str:
    """Take out of a parameter's name what compilation and recomputation put in."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@final
class OptimizerPart(Stateful):
    """The state and the settings of an optimizer, by plain names of parameters.

    With `keeps_settings` its groups keep their settings, which were changed on purpose.
    """

    loads_unread = True

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, *, keeps_settings: bool = False
    ) -> None:
        self._module, self._optimizer = module, optimizer
        self._keeps_settings = keeps_settings

    def state(self) -> State:
        """See the base class."""
        names, by_name = [*self._named()], dict[Any, Any]()
        for key, values in self._optimizer.state_dict()["state"].items():
            # PyTorch numbers parameters; an optimizer may keep state of something else, too.
            if isinstance(key, int):
                by_name[names[key]] = values
            else:
                by_name[key] = values
        state = {
            "class": type(self._optimizer).__qualname__,
            "groups": self._groups(names),
            "state": by_name,
        }
        if masters := self._masters():
            state["masters"] = masters
        return state

    def load(self, state: State) -> None:
        """See the base class."""
        parameters, groups = self._named(), read_whole(state["groups"])
        live, own_class = self._groups([*parameters]), type(self._optimizer).__qualname__
        # By name, so that the order in which a model lists its parameters does not matter.
        own, theirs = _members(live), _members(groups)
        if state["class"] != own_class or not (self._keeps_settings or own == theirs):
            raise NoCheckpointError(
                f"its optimizer ({state['class']}) and groups are not this run's ({own_class}): "
                "resume with those that were used, or use init= for the weights alone"
            )
        settings = [*self._optimizer.state_dict()["param_groups"]]
        if not self._keeps_settings:
            # What is saved counts, but for how this machine computes it: fused or not.
            for place, (group, saved) in enumerate(zip(settings, groups, strict=True)):
                here = {key: group[key] for key in _EXECUTION if key in group}
                settings[place] = group | saved | here
        frozen_since = set[str]().union(*theirs) - parameters.keys()
        states = _read_states(state["state"], parameters, frozen_since)
        for group in live:
            if group.get("fused"):
                _refuse_misfits(group["params"], states, parameters)
        indices = {name: index for index, name in enumerate(parameters)}
        # State of something else than a parameter keeps its own key.
        by_index = {indices.get(name, name): values for name, values in states.items()}
        self._optimizer.load_state_dict({"state": by_index, "param_groups": settings})
        # PyTorch restores what it steps; of weights in half precision that is a copy in fp32.
        for name, copy in self._masters().items():
            local_part(copy).copy_(local_part(_read(state["masters"][name], copy)))
        self._load_bits(states, parameters)
        betas = dict[str, Any]()
        for group in groups:
            betas |= dict.fromkeys(group["params"], group.get("betas"))
        for group, own_names in zip(self._optimizer.param_groups, live, strict=True):
            before, own_betas = betas.get(own_names["params"][0]), group.get("betas")
            if self._keeps_settings and before and own_betas:
                # Those by which its steps were counted
                group["betas"] = before
                change_betas(self._optimizer, group, own_betas)

    def _load_bits(self, states: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> None:
        """Put back what was cast to a parameter's dtype, which loses bits of moments in fp32."""
        for name in parameters.keys() & states.keys():
            live_state = self._optimizer.state[parameters[name]]
            for key, value in states[name].items():
                if isinstance(value, Tensor) and live_state[key].dtype != value.dtype:
                    live_state[key] = value.to(live_state[key].device)

    def _named(self) -> dict[str, Tensor]:
        """List the parameters by plain name, in the order of `state_dict`'s indices."""
        names = {id(p): plain_name(name) for name, p in self._module.named_parameters()}
        names |= {id(copy): names[id(weight)] for weight, copy in masters_of(self._optimizer)}
        named = dict[str, Tensor]()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                named[names[id(parameter)]] = parameter
        return named

    def _masters(self) -> dict[str, Tensor]:
        """List the copies that are stepped in place of weights, by plain name."""
        copies = {id(copy) for _, copy in masters_of(self._optimizer)}
        found = dict[str, Tensor]()
        for name, parameter in self._named().items():
            if id(parameter) in copies:
                found[name] = parameter
        return found

    def _groups(self, names: Sequence[str]) -> list[dict[str, Any]]:
        groups = list[dict[str, Any]]()
        for group in self._optimizer.state_dict()["param_groups"]:
            groups.append({**group, "params": [names[index] for index in group["params"]]})
        return groups


def _members(groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [sorted(group["params"]) for group in groups]


def _read_states(
    saved: Mapping[str, Any], parameters: Mapping[str, Tensor], left_out: Collection[str]
) -> dict[str, Any]:
    """Read what an optimizer keeps of each parameter, but of those left out."""
    states = dict[str, Any]()
    for name, values in saved.items():
        if name not in left_out:
            states[name] = _read_all(values, parameters.get(name))
    return states


def _read_all(values: Any, parameter: Tensor | None) -> Any:  # noqa: ANN401 - as the optimizer likes
    """Read the state of a parameter, laid out and in shards as it is where shapes agree."""
    if isinstance(values, StoredTensor):
        return _read(values, parameter if values.shape else None)
    if isinstance(values, Mapping):
        return {key: _read_all(value, parameter) for key, value in values.items()}
    return read_whole(values)


def _refuse_misfits(
    names: Sequence[str], states: Mapping[str, Any], parameters: Mapping[str, Tensor]
) -> None:
    """Refuse states that a fused kernel would read beyond."""
    for name in names:
        own = parameters[name].shape, parameters[name].dtype
        for key, value in states.get(name, {}).items():
            is_tensor = isinstance(value, Tensor)
            if not is_tensor or (key != "step" and (value.shape, value.dtype) != own):
                raise ValueError(f"optimizer state {name}.{key} does not fit its parameter")


@final
class GeneratorsPart(Stateful):
    """The global random generators of this process: Python's, NumPy's and PyTorch's."""

    def state(self) -> State:
        """See the base class."""
        # 624 words each, as tensors: as JSON they would be most of the manifest.
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state()
        numpy_words = torch.from_numpy(np.asarray(keys).astype(np.int64))
        return {
            "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
            "numpy": [name, numpy_words, position, has_gauss, cached],
            "cpu": torch.get_rng_state(),
            "cuda": gpu.generator_states(),
        }

    def load(self, state: State) -> None:
        """See the base class."""
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        torch.set_rng_state(state["cpu"].clone())
        # A run that had no GPU must not start the driver here; another may have had more of them.
        if state["cuda"]:
            for words, device in zip(state["cuda"], gpu.devices(), strict=False):
                gpu.backend().set_rng_state(words.clone(), device)


def refuse_unsavable(parts: Mapping[str, Stateful]) -> None:
    """Refuse parts whose state no checkpoint can hold, before the first step."""
    try:
        capture(parts)
    except (TypeError, ValueError) as error:
        text = "give tensors, numbers, strings and None in lists, tuples and mappings"
        raise ConfigError(f"{error}: {text}") from error
